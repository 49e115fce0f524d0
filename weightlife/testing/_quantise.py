# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints made from dense ones: five formats that vLLM's CPU kernels read.

The values need only be valid, not close to the dense model's: both sides of a comparison load the
same file. Packed integers are random, scales small, so that outputs stay finite.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final

import torch

GROUP: Final = 32
_PER_INT32: Final = 8  # four-bit values in an int32

Tensors = dict[str, torch.Tensor]


def _random_int32(generator: torch.Generator, *shape: int) -> torch.Tensor:
    wide = torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int64)
    return wide.to(torch.int32)


# Layers that are fused read the same input: a real checkpoint holds one input scale for them, and the engine
# keeps whichever it loads last.
_FUSED: Final = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
}


def _input_scale(stem: str, seed: int) -> torch.Tensor:
    layer, _, name = stem.removesuffix(".").rpartition(".")
    place = zlib.crc32(f"{seed} {layer} {_FUSED.get(name, name)}".encode())
    return 0.03 + 0.04 * torch.rand(1, generator=torch.Generator().manual_seed(place))


def _w8a8(stem: str, weight: torch.Tensor, seed: int, static: bool) -> Tensors:
    scale = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
    out = {
        f"{stem}weight": torch.round(weight.float() / scale).to(torch.int8),
        f"{stem}weight_scale": scale.to(torch.bfloat16),
    }
    if static:
        out[f"{stem}input_scale"] = _input_scale(stem, seed)
    return out


def _awq(stem: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    n, k = weight.shape
    return {
        f"{stem}qweight": _random_int32(generator, k, n // _PER_INT32),
        f"{stem}qzeros": _random_int32(generator, k // GROUP, n // _PER_INT32),
        f"{stem}scales": (torch.rand(k // GROUP, n, generator=generator) * 0.02 + 0.005).to(torch.float16),
    }


def _gptq(stem: str, weight: torch.Tensor, generator: torch.Generator) -> Tensors:
    n, k = weight.shape
    return {
        f"{stem}qweight": _random_int32(generator, k // _PER_INT32, n),
        f"{stem}qzeros": torch.full((k // GROUP, n // _PER_INT32), 0x77777777, dtype=torch.int32),
        f"{stem}g_idx": (torch.arange(k) // GROUP).to(torch.int32),
        f"{stem}scales": (torch.rand(k // GROUP, n, generator=generator) * 0.02 + 0.005).to(torch.float16),
    }


def _w4a16(stem: str, weight: torch.Tensor, generator: torch.Generator, symmetric: bool) -> Tensors:
    n, k = weight.shape
    out = {
        f"{stem}weight_packed": _random_int32(generator, n, k // _PER_INT32),
        f"{stem}weight_scale": (torch.rand(n, k // GROUP, generator=generator) * 0.02 + 0.005).to(
            torch.bfloat16
        ),
        f"{stem}weight_shape": torch.tensor([n, k], dtype=torch.int64),
    }
    if not symmetric:
        out[f"{stem}weight_zero_point"] = _random_int32(generator, n // _PER_INT32, k // GROUP)
    return out


def _compressed_tensors(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _config(recipe: str) -> dict[str, Any]:
    if recipe.startswith("w8a8"):
        static = recipe == "w8a8static"
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "tensor" if static else "token",
            "dynamic": not static,
        }
        weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
        return _compressed_tensors("int-quantized", weights, inputs)
    if recipe.startswith("w4a16"):
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": recipe == "w4a16",
            "strategy": "group",
            "group_size": GROUP,
            "dynamic": False,
        }
        return _compressed_tensors("pack-quantized", weights, None)
    if recipe == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "w_bit": 4,
            "group_size": GROUP,
            "q_group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }
    if recipe == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "desc_act": False,
            "lm_head": False,
        }
    raise ValueError(f"unknown quantisation recipe {recipe!r}")


def quantise(recipe: str, dense: Mapping[str, torch.Tensor], seed: int) -> tuple[Tensors, dict[str, Any]]:
    """Replace every `*_proj.weight` of `dense` by its tensors in the format `recipe`.

    Returns the new tensors and the `quantization_config` to put in `config.json`.

    Raises:
        ValueError: `recipe` is not known.
    """
    config = _config(recipe)
    generator = torch.Generator().manual_seed(seed)
    out: Tensors = {}
    for name, weight in dense.items():
        if not name.endswith("_proj.weight"):
            out[name] = weight
            continue
        stem = name.removesuffix("weight")
        if recipe.startswith("w8a8"):
            out.update(_w8a8(stem, weight, seed, static=recipe == "w8a8static"))
        elif recipe.startswith("w4a16"):
            out.update(_w4a16(stem, weight, generator, symmetric=recipe == "w4a16"))
        elif recipe == "awq":
            out.update(_awq(stem, weight, generator))
        else:
            out.update(_gptq(stem, weight, generator))
    return out, config


STRUCTURAL: Final = (".g_idx", ".qzeros", ".weight_shape")
"""Tensors that describe the format: equal in every checkpoint of a family (AWQ's zero points excepted)."""
