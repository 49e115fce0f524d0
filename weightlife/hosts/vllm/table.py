# SPDX-License-Identifier: Apache-2.0
"""Where vLLM is wrapped: the table of seams. `weightlife.status()` prints it with what was found.

Wrappers are named, not imported: torch and the engine are loaded when the first of them is called.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from weightlife.hosts import runtime
from weightlife.hosts.patching import Seam


def _late(name: str, module: str = "seams") -> Any:
    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not runtime.installed():  # a name that was taken where no sweep reaches it
            return wrapped(*args, **kwargs)
        return getattr(importlib.import_module(f"weightlife.hosts.vllm.{module}"), name)(
            wrapped, instance, args, kwargs
        )

    wrapper.__name__ = name
    return wrapper


def _tracing(name: str) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(importlib.import_module("weightlife.hosts.vllm.propagation"), name)(
            wrapped, instance, args, kwargs
        )

    wrapper.__name__ = name
    return wrapper


def _answer(worker: Any, question: Any, payload: Any = None, /, *args: Any, **kwargs: Any) -> Any:
    from weightlife.hosts.vllm import remote

    if question == "call":
        return remote.call(worker, payload, args, kwargs)
    return remote.answer(worker, question, payload)


TESTED = ("0.32.0",)
"""Versions of vLLM that the test-suite runs against."""

_LOADER = "vllm.model_executor.model_loader"
_WORKER = "vllm.v1.worker.gpu_worker"

SEAMS = [
    Seam("initialize_model", f"{_LOADER}.utils", "initialize_model", _late("initialize_model"), True,
         why="the constructor's state"),
    Seam("process_weights_after_loading", f"{_LOADER}.utils", "process_weights_after_loading",
         _late("process_weights_after_loading"), True, why="first processing; later an end mark"),
    Seam("check_skipped_aliases", "vllm.model_executor.models.utils", "AutoWeightsLoader._check_skipped_aliases",
         _late("check_skipped_aliases"), why="a tied tensor's partner may come in another bucket"),
    Seam("load_model", f"{_LOADER}.base_loader", "BaseModelLoader.load_model", _late("load_model"), True,
         why="every loader processes"),
    Seam("get_model_loader", _LOADER, "get_model_loader", _late("get_model_loader"), why="loaders that override load_model"),
    Seam("reload_weights", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", _late("reload_weights"), True,
         why="reload by path or iterator (V1 runner)"),
    Seam("reload_weights_v2", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.reload_weights", _late("reload_weights"),
         since="0.22", why="reload by path or iterator (V2 runner)"),
    Seam("initialize_layerwise_reload", f"{_LOADER}.reload.layerwise", "initialize_layerwise_reload",
         _late("initialize_layerwise_reload"), True, why="begin of an update"),
    Seam("finalize_layerwise_reload", f"{_LOADER}.reload.layerwise", "finalize_layerwise_reload",
         _late("finalize_layerwise_reload"), True, why="end of an update"),
    Seam("update_weights", _WORKER, "Worker.update_weights", _late("update_weights"), why="a failed chunk aborts"),
    Seam("finish_weight_update", _WORKER, "Worker.finish_weight_update", _late("finish_weight_update"), since="0.21",
         why="a refused finish resets the worker"),
    Seam("capture_model", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.capture_model", _late("capture_model"),
         why="addresses that graphs read are the contract from then on (V1 runner)"),
    Seam("capture_model_v2", "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.capture_model", _late("capture_model"),
         since="0.22", why="addresses that graphs read are the contract from then on (V2 runner)"),
    Seam("execute_model", _WORKER, "Worker.execute_model", _late("execute_model"), True, why="the guard"),
    Seam("sample_tokens", _WORKER, "Worker.sample_tokens", _late("run_on_a"), why="the guard, second half of a batch"),
    Seam("execute_dummy_batch", _WORKER, "Worker.execute_dummy_batch", _late("run_on_a"), why="the guard, idle ranks"),
    Seam("sleep", _WORKER, "Worker.sleep", _late("sleep"), why="level 2 leaves nothing that may serve"),
    Seam("wake_up", _WORKER, "Worker.wake_up", _late("wake_up"), why="no update while asleep"),
    Seam("engine_rpc", "vllm.v1.engine.core", "EngineCore.collective_rpc", _late("engine_rpc", "caches"),
         why="cached blocks and encoder outputs of the old weights are forgotten"),
    Seam("executor_rpc", "vllm.v1.executor.multiproc_executor", "MultiprocExecutor.collective_rpc",
         _late("executor_rpc", "executor"), why="after a failure each worker's answer stays with its question"),
    Seam("reset_prefix_cache", "vllm.v1.engine.core", "EngineCore.reset_prefix_cache",
         _late("reset_prefix_cache", "caches"),
         why="NaN of former weights does not outlive them in the caches"),
    Seam("engine_step", "vllm.v1.engine.core", "EngineCore.step", _late("engine_step"),
         why="a refused batch does not kill the engine"),
    Seam("engine_step_queue", "vllm.v1.engine.core", "EngineCore.step_with_batch_queue", _late("engine_step"),
         why="a refused batch does not kill the engine"),
    # Not by a variable of vLLM's: those are factors of its compile cache's key, and every start would compile anew.
    Seam("ray_variables", "vllm.ray.ray_env", "get_env_vars_to_copy", _late("ray_variables"),
         why="settings travel to Ray workers"),
    Seam("worker_rpc", "vllm.v1.worker.worker_base", "WorkerBase._weightlife_rpc", cast("Any", _answer), adds=True,
         why="status and reports of workers"),
    Seam("front_rpc", "vllm.v1.engine.llm_engine", "LLMEngine.collective_rpc", _tracing("front_rpc"),
         why="the caller's trace goes on in the workers"),
    Seam("front_rpc_async", "vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", _tracing("front_rpc_async"),
         why="the caller's trace goes on in the workers"),
    Seam("http_context", "vllm.entrypoints.launchers.app", "build_app", _tracing("build_app"), since="0.32",
         why="a trace that comes with an HTTP request goes on in the workers"),
    Seam("handshake", "vllm.v1.engine.llm_engine", "LLMEngine.__init__", _late("after_engine"),
         why="workers run weightlife too"),
    Seam("handshake_core", "vllm.v1.engine.core", "EngineCore.__init__", _late("after_engine"),
         why="workers run weightlife too"),
]  # fmt: skip
