# SPDX-License-Identifier: Apache-2.0
"""Layers that `audit` builds: small ones, of every quantisation that vLLM reads from a checkpoint's configuration.

The configurations are those that checkpoints of each format bring. Values need only be valid: both passes load the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

SIZE = 128
"""Width of every layer: a multiple of all block and group sizes below."""

GROUP = 32


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, layout: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"g": group},
        "ignore": [],
    }


def _values(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    base = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    return {**base, "group_size": None, **more}


def _quark(weight: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    config = {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "global_quant_config": config, "layer_quant_config": {},
        "layer_type_quant_config": {}, "exclude": [], "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }  # fmt: skip


def _gptq(bits: int, act: bool = False, sym: bool = True) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act, "sym": sym,
            "lm_head": False}  # fmt: skip


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": [], **more}
    }


_TOKEN8 = _values(8, "int", "token", dynamic=True)
_TOKENF8 = _values(8, "float", "token", dynamic=True)

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "unquantised": None,
    "awq": ("awq", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}),
    "gptq 4 bit": ("gptq", _gptq(4)),
    "gptq 8 bit": ("gptq", _gptq(8)),
    "gptq act order": ("gptq", _gptq(4, act=True)),
    "gptq asymmetric": ("gptq", _gptq(4, sym=False)),
    "moe wna16": ("moe_wna16", _gptq(4)),
    "fp8 dynamic": ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 static": ("fp8", {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8 block": (
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fbgemm fp8": ("fbgemm_fp8", {"modules_to_not_convert": [], "activation_scale_ub": 1200.0}),
    "w8a8 int dynamic": (
        "compressed-tensors",
        _compressed(_values(8, "int", "channel"), _TOKEN8, "int-quantized"),
    ),
    "w8a8 int static": (
        "compressed-tensors",
        _compressed(_values(8, "int", "channel"), _values(8, "int", "tensor"), "int-quantized"),
    ),
    "w4a16": (
        "compressed-tensors",
        _compressed(_values(4, "int", "group", group_size=GROUP), None, "pack-quantized"),
    ),
    "w4a16 asymmetric": (
        "compressed-tensors",
        _compressed(_values(4, "int", "group", group_size=GROUP, symmetric=False), None, "pack-quantized"),
    ),
    "w8a16": ("compressed-tensors", _compressed(_values(8, "int", "channel"), None, "pack-quantized")),
    "w4a8 int": (
        "compressed-tensors",
        _compressed(_values(4, "int", "group", group_size=128), _TOKEN8, "int-quantized"),
    ),
    "w4a8 fp8": (
        "compressed-tensors",
        _compressed(_values(4, "int", "group", group_size=128), _TOKENF8, "pack-quantized"),
    ),
    "fp8 channel": (
        "compressed-tensors",
        _compressed(_values(8, "float", "channel"), _TOKENF8, "float-quantized"),
    ),
    "fp8 tensor": (
        "compressed-tensors",
        _compressed(_values(8, "float", "tensor"), _values(8, "float", "tensor"), "float-quantized"),
    ),
    "fp8 blocks": (
        "compressed-tensors",
        _compressed(
            _values(8, "float", "block", block_structure=[128, 128]),
            _values(8, "float", "group", group_size=128, dynamic=True),
            "float-quantized",
        ),
    ),
    "w8a16 fp8": ("compressed-tensors", _compressed(_values(8, "float", "channel"), None, "float-quantized")),
    "nvfp4": (
        "compressed-tensors",
        _compressed(
            _values(4, "float", "tensor_group", group_size=16),
            _values(4, "float", "tensor_group", group_size=16, dynamic="local"),
            "nvfp4-pack-quantized",
        ),
    ),
    "w4a16 nvfp4": (
        "compressed-tensors",
        _compressed(_values(4, "float", "tensor_group", group_size=16), None, "nvfp4-pack-quantized"),
    ),
    "w4a16 mxfp4": (
        "compressed-tensors",
        _compressed(_values(4, "float", "group", group_size=32), None, "mxfp4-pack-quantized"),
    ),
    "modelopt fp8": ("modelopt", {"quant_method": "modelopt", **_modelopt("FP8")}),
    "modelopt nvfp4": ("modelopt_fp4", _modelopt("NVFP4", group_size=16)),
    "modelopt mxfp8": ("modelopt_mxfp8", _modelopt("MXFP8")),
    "mxfp4": ("mxfp4", {"quant_method": "mxfp4"}),
    "gpt-oss mxfp4": ("gpt_oss_mxfp4", {"quant_method": "mxfp4"}),
    "quark fp8": (
        "quark",
        _quark(
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True},
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": True, "symmetric": True},
        ),
    ),
    "quark int8": (
        "quark",
        _quark(
            {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": False, "symmetric": True, "ch_axis": 0},
            {"dtype": "int8", "qscheme": "per_channel", "is_dynamic": True, "symmetric": True, "ch_axis": 1},
        ),
    ),
    "quark mxfp4": (
        "quark",
        _quark(
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "symmetric": None,
             "scale_format": "e8m0", "ch_axis": -1},
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "symmetric": None,
             "scale_format": "e8m0", "ch_axis": -1},
        ),
    ),
    "inc": (
        "inc",
        {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "packing_format": "auto_round:auto_gptq"},
    ),
    "experts int8": ("experts_int8", {"quant_method": "experts_int8"}),
    "humming": ("humming", {"quant_method": "humming"}),
    "fp_quant": ("fp_quant", {"quant_method": "fp_quant"}),
}  # fmt: skip
"""Name -> (vLLM's name of the method, what a checkpoint's configuration says); None: no quantisation."""


WITH_HEAD = ("unquantised", "fp8 static", "w8a8 int static", "modelopt fp8", "quark fp8")
"""Configurations that say something of the head or of attention; the others leave both unquantised."""


class Layers:
    """Builds layers and their weights. Use it in the current configuration and default dtype."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._made = 0

    def quantisation(self, name: str) -> Any:
        """A fresh configuration object, or None."""
        from vllm.model_executor.layers.quantization import get_quantization_config

        entry = CONFIGURATIONS[name]
        if entry is None:
            return None
        made = get_quantization_config(entry[0]).from_config(entry[1])
        made.packed_modules_mapping = getattr(made, "packed_modules_mapping", None) or {}
        return made

    def linear(self, name: str) -> Any:
        """A column-parallel linear layer."""
        from vllm.model_executor.layers.linear import ColumnParallelLinear

        return ColumnParallelLinear(
            SIZE,
            SIZE,
            bias=False,
            quant_config=self.quantisation(name),
            prefix="model.layers.0.mlp.up_proj",
        )

    def head(self, name: str) -> Any:
        """An output head."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        return ParallelLMHead(SIZE, SIZE, quant_config=self.quantisation(name), prefix="lm_head")

    def experts(self, name: str) -> Any:
        """Four experts, two a token."""
        from vllm.model_executor.layers import fused_moe

        self._made += 1  # every such layer of a process has a name of its own
        make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
        return make(
            num_experts=4,
            top_k=2,
            hidden_size=SIZE,
            intermediate_size=SIZE,
            renormalize=True,
            quant_config=self.quantisation(name),
            prefix=f"model.layers.{self._made}.mlp.experts",
        )

    def attention(self, name: str) -> Any:
        """Attention with four heads."""
        from vllm.model_executor.layers.attention import Attention

        self._made += 1
        return Attention(
            4,
            SIZE // 4,
            1.0,
            num_kv_heads=4,
            quant_config=self.quantisation(name),
            prefix=f"model.layers.{self._made}.self_attn.attn",
        )

    def weights(self, root: Any) -> dict[str, Any]:
        """Valid values for every parameter of a module, by name."""
        torch = self.torch
        generator = torch.Generator().manual_seed(1)
        out = {}
        for name, parameter in root.named_parameters():
            shape, dtype = tuple(parameter.shape), parameter.dtype
            last = name.rpartition(".")[2]
            if last.endswith("g_idx") or "g_idx" in last:
                value = (torch.arange(parameter.numel()) // GROUP).reshape(shape)
            elif last == "weight_shape":
                value = torch.tensor([SIZE, SIZE])
            elif dtype.is_floating_point and (
                "scale" in last or (dtype.itemsize == 1 and "e8m0" in str(dtype))
            ):
                value = torch.rand(shape, generator=generator) * 0.05 + 0.01
            elif dtype.is_floating_point:
                value = torch.randn(shape, generator=generator) * 0.05
            elif dtype is torch.bool:
                value = torch.rand(shape, generator=generator) > 0.5
            elif dtype is torch.uint8 and "scale" in last:
                value = torch.randint(120, 130, shape, generator=generator)
            else:
                info = torch.iinfo(dtype)
                value = torch.randint(
                    max(info.min, -(2**31)), min(info.max, 2**31 - 1), shape, generator=generator
                )
            out[name] = value.to(dtype)
        return out


def layer_recipes(build: Layers) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, how to build it) of every layer."""
    for name in CONFIGURATIONS:
        for kind in ("linear", "experts", *(("head", "attention") if name in WITH_HEAD else ())):
            yield f"{name} {kind}", _recipe(getattr(build, kind), name)


def _recipe(make: Callable[[str], Any], name: str) -> Callable[[], Any]:
    return lambda: make(name)
