# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints A and B of many model families, and big ones of a given shape.

Each checkpoint is a Hugging Face folder (configuration, safetensors, a small tokenizer). A and B of a
family differ in *every* tensor, one-dimensional ones included, so that a tensor which kept its old
value shows. The same call writes the same bytes on every machine with the same torch.

    python -m weightlife.testing.checkpoints OUT [FAMILY ...]

From Python::

    from weightlife.testing import checkpoints
    a, b = checkpoints.pair("mixtral", root)

Needs torch, transformers, tokenizers and safetensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from weightlife.testing import _modal
from weightlife.testing._families import FAMILIES, MORE, Family
from weightlife.testing._quantise import STRUCTURAL, quantise

__all__ = ["CONTENT_VERSION", "FAMILIES", "MORE", "Family", "Pair", "families", "make", "pair"]

CONTENT_VERSION: Final = 2
"""Raise it when the bytes of any family change: folders made by another version are made again."""

_SEEDS: Final = {"a": 1, "b": 2}
_STAMP: Final = ".weightlife-testing.json"


class Pair(NamedTuple):
    """The folders of checkpoint A and checkpoint B of one family."""

    a: Path
    b: Path


def families(*tags: str) -> list[str]:
    """Names of the families that carry all of `tags`; without tags, of all. Those of `MORE` are not among them."""
    return [name for name, row in FAMILIES.items() if row.tags.issuperset(tags)]


def pair(family: str, root: Path | str) -> Pair:
    """Folders A and B of `family` below `root`, made when they are not there yet.

    Raises:
        KeyError: no such family.
    """
    return make(family, Path(root))


def make(family: str, root: Path) -> Pair:
    """Write `root/<family>/{a,b}`, unless a folder with the same content is there.

    A half-written folder is never taken for a whole one: the pair is assembled beside its place
    and moved there. Two processes that want the same family make it once.

    Raises:
        KeyError: no such family.
        RuntimeError: two tensors of A and B came out equal (a mistake in the table).
    """
    row = FAMILIES.get(family) or MORE[family]
    place = root / family
    stamp = {"family": family, "content": CONTENT_VERSION, "row": _digest(row)}
    folders = Pair(place / "a", place / "b")
    if _read_stamp(place) == stamp:
        return folders
    root.mkdir(parents=True, exist_ok=True)
    with (
        _only_maker(root / f".{family}.lock"),
        tempfile.TemporaryDirectory(dir=root, prefix=f".{family}-") as scratch,
    ):
        if _read_stamp(place) == stamp:
            return folders  # made while we waited
        work = Path(scratch) / family
        for side in _SEEDS:
            _write_side(row, side, work / side)
        _require_different(work / "a", work / "b")
        (work / _STAMP).write_text(json.dumps(stamp))
        if place.exists():
            shutil.rmtree(place)
        work.replace(place)
    return folders


@contextlib.contextmanager
def _only_maker(lock: Path) -> Iterator[None]:
    """Nobody else replaces a folder that somebody already reads."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order in which loaders read them."""
    return sorted(folder.glob("*.safetensors"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, in file order."""
    out: dict[str, torch.Tensor] = {}
    for shard in shards(folder):
        out.update(load_file(shard))
    return out


def _digest(row: Family) -> str:
    text = repr(
        (
            row.config,
            row.model,
            sorted(row.settings.items(), key=str),
            row.quantise,
            row.head,
            *([row.modal] if row.modal else []),
        )
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read_stamp(place: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((place / _STAMP).read_text())
    except (OSError, ValueError):
        return None
    return found


def _write_side(row: Family, side: str, out: Path) -> None:
    seed = _SEEDS[side]
    model = _dense_model(row, seed)
    model.save_pretrained(out)
    if row.modal:
        _modal.write(row.modal, out, tokenizer(_modal.TEXT))
        return
    save_tokenizer(out, int(model.config.vocab_size))
    if not row.quantise and not row.head:
        return
    content = tensors(out)
    if row.head:
        embedding = content["model.embed_tokens.weight"]
        generator = torch.Generator().manual_seed(seed + 100)
        other = (torch.randn(embedding.shape, generator=generator) * 0.06).to(embedding.dtype)
        content["lm_head.weight"] = embedding.clone() if row.head == "equal" else other
    if row.quantise:
        content, section = quantise(row.quantise, content, seed + 6)
        path = out / "config.json"
        config = {**json.loads(path.read_text()), "quantization_config": section}
        path.write_text(json.dumps(config, indent=2))
    for shard in shards(out):
        shard.unlink()
    save_file({k: v.contiguous() for k, v in content.items()}, out / "model.safetensors", {"format": "pt"})


def _dense_model(row: Family, seed: int) -> Any:
    """The Hugging Face model of `row` in bfloat16, every floating tensor of it random."""
    import transformers

    torch.manual_seed(seed)
    model = getattr(transformers, row.model)(getattr(transformers, row.config)(**row.settings))
    persistent = {id(t) for t in model.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if id(b) in persistent)):
            if tensor.is_floating_point():
                # Norms and biases start at one value in every model: the noise makes A and B differ.
                tensor.add_(torch.randn_like(tensor) * (0.1 if tensor.ndim <= 1 else 0.06))
    return model.to(torch.bfloat16)


def save_tokenizer(out: Path, vocab_size: int) -> None:
    """A tokenizer of one character a token, so that a folder is complete for whoever wants one."""
    tokenizer(vocab_size).save_pretrained(out)


def tokenizer(vocab_size: int) -> Any:
    """A tokenizer of one character a token."""
    import transformers
    from tokenizers import Tokenizer, models

    vocab = {chr(i) if i >= 32 else f"<{i}>": i for i in range(vocab_size)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<2>"))
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=made, bos_token="<0>", eos_token="<1>")


def _require_different(a: Path, b: Path) -> None:
    left, right = tensors(a), tensors(b)
    if left.keys() != right.keys():
        raise RuntimeError(f"A and B hold different names: {sorted(left.keys() ^ right.keys())[:5]}")
    same = [n for n, t in left.items() if torch.equal(t, right[n]) and not n.endswith(STRUCTURAL)]
    if same:
        raise RuntimeError(f"tensors equal in A and B: {same[:5]}")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0].startswith("-"):
        sys.stderr.write(__doc__ or "")
        return 2
    root, names = Path(words[0]), words[1:] or list(FAMILIES)
    unknown = sorted(set(names) - set(FAMILIES) - set(MORE))
    if unknown:
        sys.stderr.write(f"unknown families {unknown}; there are {[*FAMILIES, *MORE]}\n")
        return 2
    for name in names:
        sys.stdout.write(f"{make(name, root).a.parent}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
