# SPDX-License-Identifier: Apache-2.0
"""Big random checkpoints of a given shape, for benchmarks: written tensor by tensor, in little memory.

    from weightlife.testing import scaled
    a = scaled.dense(root / "a", seed=1)
    m = scaled.experts(root / "m", seed=1)

Values are cheap rather than random in every element: one random block, scaled differently for each tensor,
so that a gigabyte takes seconds and two seeds still differ everywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from weightlife.testing.checkpoints import CONTENT_VERSION, save_tokenizer

__all__ = ["DENSE", "EXPERTS", "Shape", "dense", "experts", "write"]

_BLOCK: Final = 1 << 20  # elements of the random block that all tensors are cut from
_BYTES: Final = 2  # of a bfloat16
_STAMP: Final = ".weightlife-testing.json"


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: Qwen2 when `experts` is 0, else Qwen3-MoE (`experts` feed-forwards a layer)."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 2
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.heads

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            stem = f"model.layers.{layer}."
            yield f"{stem}input_layernorm.weight", (self.hidden,)
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{stem}self_attn.{name}_proj.weight", (rows, self.hidden)
                if not self.experts:
                    yield f"{stem}self_attn.{name}_proj.bias", (rows,)
            yield f"{stem}self_attn.o_proj.weight", (self.hidden, queries)
            if self.experts:
                yield f"{stem}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{stem}self_attn.k_norm.weight", (self.head_dim,)
                yield f"{stem}mlp.gate.weight", (self.experts, self.hidden)
            yield f"{stem}post_attention_layernorm.weight", (self.hidden,)
            for part in [f"experts.{e}." for e in range(self.experts)] or [""]:
                yield f"{stem}mlp.{part}gate_proj.weight", (self.intermediate, self.hidden)
                yield f"{stem}mlp.{part}up_proj.weight", (self.intermediate, self.hidden)
                yield f"{stem}mlp.{part}down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def config(self) -> dict[str, Any]:
        """The content of `config.json`."""
        common = {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 4096,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 0,
            "eos_token_id": 1,
            **self.extra,
        }
        if not self.experts:
            kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            return {**kind, **common, "intermediate_size": self.intermediate}
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **common,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


DENSE: Final = Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocab=151_936)
"""The shape of a 0.5B model, untied: 291 tensors, 1.26 GB in bfloat16."""

EXPERTS: Final = Shape(
    hidden=256, intermediate=128, layers=12, heads=8, kv_heads=2, vocab=4096, experts=64, experts_per_token=4
)
"""A mixture of experts with 2,304 expert tensors, 155 MB in bfloat16."""


def dense(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """Write a checkpoint of `DENSE`, tied or not; returns `folder`."""
    return write(replace(DENSE, tied=tied), folder, seed)


def experts(folder: Path, seed: int) -> Path:
    """Write a checkpoint of `EXPERTS`; returns `folder`."""
    return write(EXPERTS, folder, seed)


def write(shape: Shape, folder: Path, seed: int) -> Path:
    """Write a checkpoint of `shape`, unless the same one is there; returns `folder`.

    Every tensor differs from that of another seed. Memory: the largest tensor's bytes, not the model's.

    Raises:
        OSError: the disk is full, or not ours to write.
    """
    stamp = json.dumps({"content": CONTENT_VERSION, "shape": repr(shape), "seed": seed})
    mark = folder / _STAMP
    if mark.exists() and mark.read_text() == stamp:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    save_tokenizer(folder, min(shape.vocab, 512))
    with (folder / "model.safetensors").open("wb") as file:
        _stream(shape, file, seed)
    mark.write_text(stamp)
    return folder


def _stream(shape: Shape, file: BinaryIO, seed: int) -> None:
    """A safetensors file: the length of the header, the header, the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in shape.tensors():
        start, end = end, end + _BYTES * _count(dimensions)
        header[name] = {"dtype": "BF16", "shape": list(dimensions), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(_BLOCK, generator=generator).repeat(2)  # twice: any window of one length is a slice
    for index, (_, dimensions) in enumerate(shape.tensors()):
        _write_tensor(file, block, dimensions, index, seed)


def _write_tensor(
    file: BinaryIO, block: torch.Tensor, dimensions: tuple[int, ...], index: int, seed: int
) -> None:
    # A norm is near one, a matrix scaled by its fan-in: activations stay finite at any depth.
    flat = len(dimensions) == 1
    scale = 0.1 if flat else 0.7 / dimensions[-1] ** 0.5
    left = _BYTES * _count(dimensions)
    start = (index * 7919 + seed) % _BLOCK
    window = block[start : start + min(_count(dimensions), _BLOCK)] * (scale * (1 + (index % 13) / 64))
    piece = ((window + 1.0) if flat else window).to(torch.bfloat16)
    raw = memoryview(piece.view(torch.uint8).numpy())
    while left > 0:
        file.write(raw[: min(left, len(raw))])
        left -= len(raw)


def _count(dimensions: tuple[int, ...]) -> int:
    total = 1
    for size in dimensions:
        total *= size
    return total
