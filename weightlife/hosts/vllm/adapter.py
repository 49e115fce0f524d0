# SPDX-License-Identifier: Apache-2.0
"""What the engine must know of vLLM, for one model. Everything is looked up at call time, nothing at import."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from weightlife._version import __version__
from weightlife.hosts import runtime

if TYPE_CHECKING:
    from weightlife.source_checks import Source

# Process-wide objects that layers hold but do not own: configuration, process groups, compiled code.
FOREIGN_MODULES = (
    "vllm.config", "vllm.distributed", "vllm.compilation", "vllm.platforms", "vllm.logger", "vllm.transformers_utils",
    "vllm.utils", "vllm.v1.worker", "vllm.v1.core", "vllm.lora", "transformers", "logging", "threading",
)  # fmt: skip

# Rows of a probe of a packed weight, in bfloat16. With 16, of 400 changes of the least bit of one weight among 896 inputs
# 66 % showed (4,864 inputs: 40 %), of its bit 5 98 %. More rows cost a multiplication instead of a read.
PROBE_ROWS = 16
PROBE_SEED = 20_260

# Ranks of one engine make the same calls in the same order; one that does not arrive in this time never will.
VOTE_TIMEOUT = timedelta(seconds=120)


class VllmHost:
    """The host protocol for a vLLM model.

    Args:
        model: the root module.
        vllm_config: the engine's configuration (for the current-config context).
        model_config: the configuration of this model (a draft model has its own).
        device: where processing runs.
    """

    name = "vllm"

    def __init__(
        self, model: torch.nn.Module, vllm_config: Any, model_config: Any, device: torch.device
    ) -> None:
        import weakref

        self._model = weakref.ref(model)
        self.vllm_config = vllm_config
        self.model_config = model_config
        self.device = device
        self.asleep = False
        self.scrubbed = 0  # the generation for which caches were last looked through
        self._votes = 0

    @property
    def model(self) -> torch.nn.Module:
        """The root module."""
        model = self._model()
        assert model is not None
        return model

    def skip(self, obj: Any) -> bool:
        """Configuration, groups, compiled code: not a layer's own state."""
        return (type(obj).__module__ or "").startswith(FOREIGN_MODULES)

    def transient(self, path: str) -> bool:
        """Caches of keys, values and states, which every layer that has one keeps under one name."""
        return "kv_cache" in re.split(r"[.\[\]]", path)

    # -- hooks -------------------------------------------------------------------------------------------------

    @staticmethod
    def _quant_method(layer: torch.nn.Module) -> Any:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

        method = getattr(layer, "quant_method", None)
        return method if isinstance(method, QuantizeMethodBase) else None

    def layer_hook(self, layer: torch.nn.Module) -> str | None:
        """The class of the layer's quant method."""
        method = self._quant_method(layer)
        return None if method is None else type(method).__name__

    def process_layer(self, layer: torch.nn.Module) -> None:
        """The quant hook in the contexts in which vLLM runs it."""
        from vllm.model_executor.model_loader import utils

        method = self._quant_method(layer)
        moved = getattr(method, "requires_device_loading", True)
        with ExitStack() as stack:
            stack.enter_context(utils.device_loading_context(layer, self.device) if moved else nullcontext())
            method.process_weights_after_loading(layer)
        # Hooks may register fresh parameters, which know the global rank only: a replicated layer would then be
        # narrowed at the wrong offset by the next load.
        refresh = getattr(layer, "update_param_tp_status", None)
        if refresh is not None:
            refresh()

    def is_deferred(self, layer: torch.nn.Module) -> bool:
        """Attention, and what is like it, with a callable hook."""
        hook = getattr(layer, "process_weights_after_loading", None)
        return callable(hook) and isinstance(layer, _deferred_classes())

    def process_deferred(self, layer: torch.nn.Module) -> None:
        """An attention hook; it takes the model's dtype."""
        from vllm.model_executor.model_loader import utils

        with utils.device_loading_context(layer, self.device):
            layer.process_weights_after_loading(self.model_config.dtype)  # type: ignore[operator]

    def rerun_deferred(self) -> bool:
        """The host itself runs them at every reload, also on layers that received nothing."""
        return True

    def may_process_early(self, layer: torch.nn.Module) -> bool:
        """All but embeddings and heads, which may be tied again first."""
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        return not isinstance(layer, VocabParallelEmbedding)

    def before_processing(self) -> None:
        """Tie the head to the embeddings again where the checkpoint's copies turn out to be equal."""
        try:
            from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings
        except ImportError:  # before 0.31
            return
        maybe_retie_word_embeddings(self.model, self.model_config)

    def process_model(self) -> None:
        """The model's own hook."""
        hook = getattr(self.model, "process_weights_after_loading", None)
        if hook is not None:
            hook()
        if getattr(self.model_config, "quantization", None) == "torchao":
            from vllm.model_executor.model_loader.reload import set_torchao_reload_attrs

            set_torchao_reload_attrs(self.model, self.model_config)

    def ties_late(self) -> bool:
        """A head that the checkpoint brings although the configuration says tied."""
        return bool(getattr(self.model_config, "word_embeddings_untied_by_checkpoint", False))

    def has_model_hook(self) -> bool:
        """The model's own hook, or attributes that torchao sets on all layers."""
        hook = getattr(self.model, "process_weights_after_loading", None)
        return hook is not None or getattr(self.model_config, "quantization", None) == "torchao"

    def probe(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Linear layers, embeddings and heads, called as their `forward` calls them, without bias."""
        method = self._quant_method(layer)
        names = ("input_size_per_partition", "input_size", "embedding_dim")
        width = next((w for name in names if isinstance(w := getattr(layer, name, None), int)), None)
        if method is None or width is None:
            return None
        rows = _probe_rows(width)
        # A router's weights may be float32 in a bfloat16 model, and native kernels don't look at their input's dtype.
        dtype = getattr(layer, "params_dtype", None) or self.model_config.dtype
        with torch.no_grad():
            answer = method.apply(layer, rows.to(dtype).to(self.device), None)
        return answer if isinstance(answer, torch.Tensor) else None

    @contextmanager
    def contexts(self) -> Iterator[None]:
        """The current vLLM configuration."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            yield

    def loader(self) -> Callable[[Any], Any]:
        """The model's `load_weights`."""
        return self.model.load_weights  # type: ignore[return-value]

    def headers(self, path: Any) -> Source | None:
        """Of all files that a load of this path would read, secondary weights included."""
        from weightlife.hosts.vllm import sources

        return sources.of(self, path, dummy="auto")

    # -- what may be done --------------------------------------------------------------------------------------

    def observe_reason(self) -> str | None:
        """Online quantisation, CPU offload, pipeline and experts under LoRA run vLLM's own lifecycle.

        Before all that: a version of vLLM that can't be enforced.
        """
        if why := runtime.unproven():
            return why
        for module in self.model.modules():
            if getattr(getattr(module, "quant_method", None), "uses_meta_device", False):
                return "online quantisation loads and processes layer by layer on its own"
        parallel = getattr(self.vllm_config, "parallel_config", None)
        if getattr(parallel, "pipeline_parallel_size", 1) > 1:
            return "pipeline parallel"
        if getattr(self.vllm_config, "lora_config", None) is not None:
            experts = _expert_classes()
            if any(isinstance(module, experts) for module in self.model.modules()):
                return "LoRA gives expert layers other kernels after the load"
        offload = getattr(self.vllm_config, "offload_config", None)
        uva = getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0)
        prefetch = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
        if uva or prefetch:
            return "CPU offload"
        return None

    def refuse_reason(self, operation: str) -> str | None:
        """A sleeping engine has no memory to write to; moved experts would be written by initial placement."""
        if self.asleep:
            return "the weights are asleep: wake the engine first"
        parallel = getattr(self.vllm_config, "parallel_config", None)
        if getattr(parallel, "enable_eplb", False):
            return (
                "expert load balancing may have moved experts: a load would write them by initial placement"
            )
        return None

    def adoptable(self) -> str | None:
        """Why addresses must stay."""
        from vllm.config import CompilationMode, CUDAGraphMode

        config = self.vllm_config
        compilation = config.compilation_config
        if getattr(config.model_config, "enable_sleep_mode", False):
            return "sleep mode maps the weights at fixed addresses"
        graphs = compilation.cudagraph_mode not in (None, CUDAGraphMode.NONE)
        if self.device.type != "cpu" and graphs:
            return "captured graphs read the present addresses"
        if compilation.mode not in (None, CompilationMode.NONE) and self.device.type != "cpu":
            return "compiled code may hold the present addresses"
        return None

    # -- ranks -------------------------------------------------------------------------------------------------

    def rank(self) -> tuple[int, int]:
        """Rank and size of the world group; (0, 1) where none is initialised."""
        if not torch.distributed.is_initialized():
            return 0, 1
        return torch.distributed.get_rank(), torch.distributed.get_world_size()

    def exchange(self, words: list[int]) -> list[list[int]]:
        """All ranks' words through the group's store: a rank that never comes is an error, not a hang."""
        rank, world = self.rank()
        store = torch.distributed.distributed_c10d._get_default_store()
        self._votes += 1
        prefix = f"weightlife/{self._votes}"
        store.set(f"{prefix}/{rank}", ",".join(map(str, words)))
        keys = [f"{prefix}/{other}" for other in range(world)]
        try:
            store.wait(keys, VOTE_TIMEOUT)
        except RuntimeError:
            present = [other for other, key in enumerate(keys) if store.check([key])]
            return [
                [int(word) for word in store.get(key).decode().split(",")] if other in present else [0, 0]
                for other, key in enumerate(keys)
            ]
        return [[int(word) for word in store.get(key).decode().split(",")] for key in keys]

    def commit_notes(self) -> list[str]:
        """A worker can't reach the scheduler's prefix cache."""
        note = (
            "the prefix cache is reset by weightlife only after reload_weights and finish_weight_update;"
            " otherwise call reset_prefix_cache()"
        )
        return [note]

    def versions(self) -> dict[str, str]:
        """weightlife, torch and vLLM."""
        vllm = sys.modules.get("vllm")
        return {
            "weightlife": __version__,
            "torch": str(torch.__version__),
            "vllm": str(getattr(vllm, "__version__", "unknown")),
        }


@functools.lru_cache(maxsize=8)
def _probe_rows(width: int) -> torch.Tensor:
    """The rows that kernels are asked with, shape (PROBE_ROWS, width), float32."""
    generator = torch.Generator().manual_seed(PROBE_SEED)
    return torch.randn(PROBE_ROWS, width, generator=generator, dtype=torch.float32)


def _deferred_classes() -> tuple[type, ...]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    try:
        from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
    except ImportError:
        return (AttentionLayerBase,)
    return (AttentionLayerBase, MMEncoderAttention)


def _expert_classes() -> tuple[type, ...]:
    try:
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    except ImportError:  # before 0.30 the layer held its experts itself
        from vllm.model_executor.layers.fused_moe import FusedMoE

        return (FusedMoE,)
    return (RoutedExperts,)
