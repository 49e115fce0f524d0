# SPDX-License-Identifier: Apache-2.0
"""A model of the host with its own loaders, for `ledger_cost.py`: vLLM's Mixtral with 256 experts a layer.

`model.load_weights` is the host's from end to end (name mapping, `AutoWeightsLoader`, the expert loader). What it
does after a load (repacking) is left out: it has nothing to do with a loader call, and the bare loader has none.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightlife.hosts.torch import TorchHost

EXPERTS, HIDDEN, INNER = 256, 32, 16
CALLS_A_LAYER = 3 * EXPERTS
SHAPES = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}


class Unprocessed(TorchHost):
    """A model whose hooks are not run."""

    def layer_hook(self, layer: torch.nn.Module) -> str | None:  # noqa: ARG002 - the protocol
        """None is run."""
        return None

    def is_deferred(self, layer: torch.nn.Module) -> bool:  # noqa: ARG002 - the protocol
        """None is run."""
        return False


def _config(layers: int) -> Any:
    """A configuration of its own for each model: it keeps the layers by name."""
    from vllm.engine.arg_utils import EngineArgs

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": layers, "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 128,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }))  # fmt: skip
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, max_model_len=64
    ).create_engine_config()


@functools.cache
def _groups() -> None:
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
    initialize_model_parallel(1, 1)


def make(layers: int) -> Any:
    """The model as vLLM constructs it, nothing loaded. Memory: under 1 MiB a layer."""
    os.environ["WEIGHTLIFE"] = "0"  # it is wrapped here, by hand
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    config = _config(layers)
    with set_current_vllm_config(config):
        _groups()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
    return model.requires_grad_(False)


def stream(calls: int, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of one checkpoint's experts, in its order. One tensor for each shape: reading costs nothing."""
    for call in range(calls):
        layer, rest = divmod(call, CALLS_A_LAYER)
        expert, which = divmod(rest, 3)
        shard = ("w1", "w2", "w3")[which]
        yield f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{shard}.weight", tensors[shard]


def tensors() -> dict[str, torch.Tensor]:
    """What is sent, by shard."""
    return {shard: torch.ones(shape, dtype=torch.bfloat16) for shard, shape in SHAPES.items()}
