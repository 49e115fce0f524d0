# SPDX-License-Identifier: Apache-2.0
"""The checkpoints that are measured: random weights in real shapes, written tensor by tensor.

Making one needs the memory of its largest tensor only. A and B of a model hold the same names and shapes with
different values in every tensor; the same call writes the same bytes with the same torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CONTENT_VERSION: Final = 1
"""Raise it when the bytes of any model change: folders of another version are made again."""

Shape = tuple[int, ...]
_STAMP: Final = "bench.json"
_SHARD_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Model:
    """A configuration (of Hugging Face) and the names and shapes of its checkpoint."""

    name: str
    title: str
    config: dict[str, Any]
    tensors: Callable[[dict[str, Any]], Iterator[tuple[str, Shape]]]

    def shapes(self) -> dict[str, Shape]:
        """Names and shapes, in checkpoint order."""
        return dict(self.tensors(self.config))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, two an element."""
        return 2 * sum(math.prod(shape) for shape in self.shapes().values())


def _attention(at: str, c: dict[str, Any], bias: bool) -> Iterator[tuple[str, Shape]]:
    hidden, width = c["hidden_size"], c["hidden_size"] // c["num_attention_heads"]
    for letter, heads in (
        ("q", "num_attention_heads"),
        ("k", "num_key_value_heads"),
        ("v", "num_key_value_heads"),
    ):
        rows = c[heads] * width
        yield f"{at}.self_attn.{letter}_proj.weight", (rows, hidden)
        if bias:
            yield f"{at}.self_attn.{letter}_proj.bias", (rows,)
    yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
    yield f"{at}.input_layernorm.weight", (hidden,)
    yield f"{at}.post_attention_layernorm.weight", (hidden,)


def _ends(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", (c["vocab_size"], c["hidden_size"])
    yield "model.norm.weight", (c["hidden_size"],)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], c["hidden_size"])


def _qwen2(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _attention(at, c, bias=True)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield from _ends(c)


def _mixtral(c: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield from _attention(at, c, bias=False)
        yield f"{at}.block_sparse_moe.gate.weight", (c["num_local_experts"], hidden)
        for expert in range(c["num_local_experts"]):
            inside = f"{at}.block_sparse_moe.experts.{expert}"
            yield f"{inside}.w1.weight", (inner, hidden)
            yield f"{inside}.w2.weight", (hidden, inner)
            yield f"{inside}.w3.weight", (inner, hidden)
    yield from _ends(c)


def _config(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        **settings,
    }


def _qwen2_config(**settings: Any) -> dict[str, Any]:
    return _config("Qwen2ForCausalLM", "qwen2", **settings)


def _mixtral_config(**settings: Any) -> dict[str, Any]:
    return _config("MixtralForCausalLM", "mixtral", num_experts_per_tok=2, sliding_window=None, **settings)


_HALF_B: Final = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
_SMALL: Final = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
}

MODELS: Final = {
    model.name: model
    for model in (
        Model("dense", "dense, 0.5B shape (Qwen2, head not tied)", _qwen2_config(**_HALF_B), _qwen2),
        Model(
            "moe",
            "mixture of experts, 2,304 expert tensors (Mixtral, 12 layers x 64 experts)",
            _mixtral_config(
                hidden_size=256,
                intermediate_size=256,
                num_hidden_layers=12,
                num_attention_heads=8,
                num_key_value_heads=8,
                num_local_experts=64,
                vocab_size=32000,
            ),
            _mixtral,
        ),
        Model("dense-small", "dense, small (Qwen2, 4 layers)", _qwen2_config(**_SMALL), _qwen2),
        Model(
            "moe-small",
            "mixture of experts, 192 expert tensors (Mixtral, 4 layers x 16 experts)",
            _mixtral_config(**_SMALL, num_local_experts=16),
            _mixtral,
        ),
    )
}


def folders(model: Model, cache: Path) -> dict[str, Path]:
    """The checkpoint folders `a` and `b` of a model below `cache`, made where they are not there yet."""
    place = cache / model.name
    out = {side: place / side for side in ("a", "b")}
    stamp = {"content": CONTENT_VERSION, "config": model.config, "torch": str(torch.__version__)}
    try:
        if json.loads((place / _STAMP).read_text()) == stamp:
            return out
    except (OSError, ValueError):
        pass
    shutil.rmtree(place, ignore_errors=True)
    for side, folder in out.items():
        folder.mkdir(parents=True)
        _write(model, side, folder)
    # Written last: a half-made folder is never taken for a whole one.
    (place / _STAMP).write_text(json.dumps(stamp))
    return out


def _write(model: Model, side: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(model.config, indent=2))
    shards: list[list[tuple[str, Shape]]] = [[]]
    size = 0
    for name, shape in model.shapes().items():
        nbytes = 2 * math.prod(shape)
        if size and size + nbytes > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    where = {}
    for file, tensors in zip(names, shards, strict=True):
        with (folder / file).open("wb") as out:
            _write_shard(out, tensors, side)
        where.update({name: file for name, _ in tensors})
    index = {"metadata": {"total_size": model.nbytes}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(out: BinaryIO, tensors: list[tuple[str, Shape]], side: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name, shape in tensors:
        out.write(_values(name, shape, side).view(torch.uint8).numpy().tobytes())
    out.flush()
    os.fsync(out.fileno())  # else the kernel writes back while we measure


def _values(name: str, shape: Shape, side: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{side}/{name}".encode()))
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return (noise * 0.1 + (1.0 if "norm" in name else 0.0)).to(torch.bfloat16)
    return (noise * (1.0 if "embed_tokens" in name else shape[-1] ** -0.5)).to(torch.bfloat16)
