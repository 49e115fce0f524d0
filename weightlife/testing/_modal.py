# SPDX-License-Identifier: Apache-2.0
"""What a family that also reads images or audio needs beside its weights: a processor, and an input to ask about.

Only processors that need neither torchvision nor torchaudio: vLLM's CPU build has none beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

INPUTS: Final = ".weightlife-testing-inputs.json"
"""A file beside the weights: what `oracle.fingerprint` asks in addition. Keys: those of `Modality` below."""

TEXT: Final = 500  # ids below are single characters, ids from here on are a family's special tokens


@dataclass(frozen=True)
class Modality:
    """How to make a family's processor, and what to ask.

    Attributes:
        special: tokens of the processor; their ids are 500, 501, ...
        write: saves a processor; called with the folder and the tokenizer.
        prompt: token ids with the placeholder, as a caller sends them.
        kind: image or audio.
        size: pixels of a side, or samples at 16 kHz.
        alone: nothing can be asked without such an input (attention to no encoder's output is NaN).
    """

    special: tuple[str, ...]
    write: Callable[[Path, Any], None]
    prompt: tuple[int, ...]
    kind: str
    size: int
    alone: bool = False


def _transformers() -> Any:
    import transformers

    return transformers


def _idefics3(out: Path, tokenizer: Any) -> None:
    hf = _transformers()
    edge = {"longest_edge": 28}
    images = hf.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    hf.Idefics3Processor(images, tokenizer, image_seq_len=1, chat_template="-").save_pretrained(out)


def _blip2(out: Path, tokenizer: Any) -> None:
    hf = _transformers()
    images = hf.BlipImageProcessorPil(size={"height": 28, "width": 28})
    hf.Blip2Processor(images, tokenizer, num_query_tokens=4).save_pretrained(out)


def _whisper(out: Path, _tokenizer: Any) -> None:
    hf = _transformers()
    hf.WhisperFeatureExtractor(feature_size=16, chunk_length=3).save_pretrained(out)
    # The class asks for a tokenizer with Whisper's vocabulary when it is made, not when it is found by its name.
    (out / "processor_config.json").write_text(json.dumps({"processor_class": "WhisperProcessor"}))


MODALITIES: Final[Mapping[str, Modality]] = {
    "idefics3": Modality(
        ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
        _idefics3, (5, 501, 7, 9), "image", 56,
    ),
    "blip2": Modality(("<image>",), _blip2, (5, 7, 9), "image", 56),
    "whisper": Modality(
        ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>", "<|endoftext|>"),
        _whisper, (500, 501), "audio", 16000, alone=True,
    ),
}  # fmt: skip


def write(name: str, out: Path, tokenizer: Any) -> None:
    """Complete a folder: tokenizer, processor, and what to ask."""
    from tokenizers import AddedToken

    modality = MODALITIES[name]
    tokenizer.add_tokens([AddedToken(token, special=True) for token in modality.special])
    tokenizer.save_pretrained(out)
    modality.write(out, tokenizer)
    asked = {
        "prompt": list(modality.prompt),
        "kind": modality.kind,
        "size": modality.size,
        "alone": modality.alone,
    }
    (out / INPUTS).write_text(json.dumps(asked))


def asked(folder: str | Path) -> dict[str, Any] | None:
    """What is to be asked of a model that was made here, or None: it reads text only."""
    try:
        found: dict[str, Any] = json.loads((Path(folder) / INPUTS).read_text())
    except (OSError, ValueError):
        return None
    return found


def prompt(question: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt for `LLM.generate`: the same numbers each time."""
    import numpy as np

    size = int(question["size"])
    data: Any
    if question["kind"] == "image":
        from PIL import Image

        pixels = np.arange(size * size * 3) % 251
        data = Image.fromarray(pixels.astype(np.uint8).reshape(size, size, 3))
    else:
        data = (np.sin(np.arange(size) / 7).astype(np.float32), 16000)
    return {
        "prompt_token_ids": list(question["prompt"]),
        "multi_modal_data": {question["kind"]: data},
    }
