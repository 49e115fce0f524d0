# SPDX-License-Identifier: Apache-2.0
"""How RL frameworks drive vLLM, one small driver each.

A driver makes the calls that the framework's own worker or trainer code makes, in its order and on the objects
that it touches; nothing of the framework is needed. It is a generator that yields wherever the framework is between
two calls, so that the engine can be stepped there. Whatever a framework reuses (a bucket, a live parameter) is
overwritten as soon as its call returned.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weightlife.testing._source import names, read
from weightlife.testing.transfer import FolderTransferEngine
from weightlife.testing.worker_ext import TestWorkerExtension, spoil

if TYPE_CHECKING:
    from _client_rig import Rig

EXTENSION = "_client_drivers.ClientExtension"
BUCKETS = 5


class ClientExtension(TestWorkerExtension):
    """Worker side of the frameworks that ship a worker extension, under the method names that they use.

    Their data come over IPC or NCCL; here each call reads its tensors from a checkpoint folder into memory of its
    own, which is overwritten when the call ends.
    """

    def update_weight(self, folder: str, name: str, empty_cache: bool = False) -> None:
        """OpenRLHF: one broadcast tensor, one `load_weights`; `empty_cache` marks the last, and is ignored."""
        ((_, tensor),) = read(Path(folder), [name])
        weight = tensor.clone()
        self.model_runner.model.load_weights(weights=[(name, weight)])
        spoil(weight)
        del weight

    def update_weights_from_ipc(self, folder: str, bucket_bytes: int) -> None:
        """verl: buckets through one reused buffer, model and drafter, then the module-level processing."""
        model = self.model_runner.model
        _verl_patch_moe_loaders(model)
        buffer = torch.empty(bucket_bytes, dtype=torch.uint8)
        for bucket in _packed(folder, buffer):
            for target in self._client_models():
                target.load_weights(bucket)
            spoil(buffer)
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with set_current_vllm_config(self.vllm_config):
            for target in self._client_models():
                process_weights_after_loading(target, self.model_config, self.device)

    def skyrl_start_weight_update(self) -> None:
        """SkyRL: its own element counter in both modules that bind it, then vLLM's begin."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, layerwise, meta

        layerwise.get_numel_loaded = meta.get_numel_loaded = _skyrl_get_numel_loaded
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            initialize_layerwise_reload(self.model_runner.model)

    def update_weights_ipc(self, folder: str, wanted: list[str]) -> None:
        """SkyRL: one chunk, views of one packed buffer that is released afterwards."""
        weights = [(name, tensor.clone()) for name, tensor in read(Path(folder), wanted)]
        self.model_runner.model.load_weights(weights=weights)
        for _, tensor in weights:
            spoil(tensor)

    def skyrl_finish_weight_update(self) -> None:
        """SkyRL: vLLM's end."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)

    def update_weights_via_ipc_zmq(self, folder: str, wanted: list[str], lifecycle: bool = True) -> bool:
        """NeMo-RL: batches, then (IPC, collective) the module-level processing twice; an error becomes False."""
        try:
            for part in _parts(wanted):
                weights = [(name, tensor.clone()) for name, tensor in read(Path(folder), part)]
                for target in self._client_models():
                    target.load_weights(weights=weights)
                for _, tensor in weights:
                    spoil(tensor)
            if lifecycle:
                self._nemo_process()
                self._nemo_process()  # once more, as with an fp8 KV cache
        except Exception:  # noqa: BLE001 - the client's own habit
            traceback.print_exc()
            return False
        gc.collect()
        return True

    def prepare_refit_info(self) -> list[str]:
        """NeMo-RL: cache the live parameters once; returns names whose live layout is the checkpoint's own."""
        self._nrl_named_parameters = dict(self.model_runner.model.named_parameters())
        for name, parameter in self._nrl_named_parameters.items():
            loader = getattr(parameter, "weight_loader", None)
            if name.endswith(("w13_weight", "w2_weight")) and getattr(loader, "__self__", None) is None:
                raise RuntimeError(f"could not inspect the expert weight loader of {name}")
        whole = ("embed_tokens.weight", "norm.weight", "layernorm.weight")
        return [name for name in self._nrl_named_parameters if name.endswith(whole)]

    def nccl_reshard_refit(self, folder: str, direct: list[str]) -> bool:
        """NeMo-RL: what fits is received into the cached live parameters, the rest loaded, then processed."""
        try:
            with torch.no_grad():
                for name, tensor in read(Path(folder), direct):
                    self._nrl_named_parameters[name].data.copy_(tensor)
            rest = [name for name in names(Path(folder)) if name not in set(direct)]
            self.model_runner.model.load_weights(weights=list(read(Path(folder), rest)))
            self._nemo_process()
        except Exception:  # noqa: BLE001 - the client's own habit
            traceback.print_exc()
            return False
        return True

    def _nemo_process(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with set_current_vllm_config(self.vllm_config):
            process_weights_after_loading(self.model_runner.model, self.model_config, self.device)

    def _client_models(self) -> list[Any]:
        drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        return [self.model_runner.model, *([] if drafter is None else [drafter])]


class VerlDeltaEngine(FolderTransferEngine):
    """verl's delta engine: each dense flush is a layerwise reload of its own."""

    def start_weight_update(self) -> None:
        """Nothing to prepare."""

    def receive_weights(self, update_info: Any) -> None:
        """One dense flush."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        super().receive_weights(update_info)
        finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing is rebuilt."""


def _verl_patch_moe_loaders(model: Any) -> None:
    """verl re-attaches the experts' loader to their parameters before each sync."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name in ("w13_weight", "w2_weight") and hasattr(module, "weight_loader"):
                parameter.weight_loader = module.weight_loader


def _skyrl_get_numel_loaded(weight_loader: Callable[..., Any], args: Any) -> tuple[int, Any]:
    """SkyRL's replacement of vLLM's counter: counts by the loaded tensor, not by the copies."""
    loaded = args.arguments.get("loaded_weight")
    out = weight_loader(*args.args, **args.kwargs)
    return (loaded.numel() if isinstance(loaded, torch.Tensor) else 0), out


def _packed(folder: str, buffer: torch.Tensor) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of views into `buffer`; each bucket is valid until the next is asked for."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in read(Path(folder), names(Path(folder))):
        size = -(-tensor.numel() * tensor.element_size() // 64) * 64
        if bucket and used + size > buffer.numel():
            yield bucket
            bucket, used = [], 0
        view = (
            buffer[used : used + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        )
        view.copy_(tensor)
        bucket.append((name, view))
        used += size
    yield bucket


def _parts(wanted: list[str], count: int = BUCKETS) -> Iterator[list[str]]:
    size = -(-len(wanted) // count)
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]


def shuffled(folder: Path) -> list[str]:
    """All names of a checkpoint, so mixed that q, k, v and their biases come in different buckets."""
    found = names(folder)
    random.Random(7).shuffle(found)
    return found


Driver = Callable[["Rig", Path], Iterator[None]]


# -- drivers -------------------------------------------------------------------------------------------------------


def trl_colocate(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL: `param.data` of a float32 trainer, one call each, and `reset_prefix_cache` at the end."""
    for name, tensor in read(folder, names(folder)):
        trained = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
        rig.worker.model_runner.model.load_weights([(name, trained)])
        spoil(trained)  # the next optimiser step
        yield
    rig.llm.reset_prefix_cache()


def trl_server(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL server: start, one request for all tensors, finish, reset."""
    rig.rpc("start_weight_update")
    yield
    rig.rpc("update_weights", {"folder": str(folder), "names": shuffled(folder)})
    yield
    rig.rpc("finish_weight_update")
    rig.llm.reset_prefix_cache()


def trl_async_grpo(rig: Rig, folder: Path) -> Iterator[None]:
    """TRL AsyncGRPO, NeMo-RL dynamo: pause (which clears the caches), start, updates, finish, resume; no reset."""
    core = rig.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="keep")
    rig.rpc("start_weight_update")
    for part in _parts(shuffled(folder)):
        rig.rpc("update_weights", {"folder": str(folder), "names": part})
        yield
    rig.rpc("finish_weight_update")
    core.resume_scheduler()


def openrlhf(rig: Rig, folder: Path) -> Iterator[None]:
    """OpenRLHF: the cache is reset *before* the first tensor; one RPC each; the last says `empty_cache`."""
    rig.llm.reset_prefix_cache()
    order = names(folder)
    for name in order:
        rig.rpc("update_weight", str(folder), name, name == order[-1])
        yield


def verl_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """verl: all buckets and the processing inside one worker method, then three cache resets."""
    largest = max(t.numel() * t.element_size() for _, t in read(folder, names(folder)))
    yield
    rig.rpc("update_weights_from_ipc", str(folder), largest + 4096)
    rig.llm.reset_prefix_cache(reset_connector=True)
    rig.llm.reset_mm_cache()
    rig.llm.llm_engine.reset_encoder_cache()
    yield


def verl_delta_dense(rig: Rig, folder: Path) -> Iterator[None]:
    """verl delta, dense: a registered engine whose flush opens and closes a layerwise reload itself."""
    worker = rig.worker.worker
    worker.weight_transfer_engine.__class__ = VerlDeltaEngine
    try:
        rig.rpc("start_weight_update")
        yield
        rig.rpc("update_weights", {"folder": str(folder), "names": shuffled(folder)})
        rig.rpc("finish_weight_update")
    finally:
        worker.weight_transfer_engine.__class__ = FolderTransferEngine
    rig.llm.reset_prefix_cache()


def skyrl_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """SkyRL: its own bracket round chunks, then `reset_prefix_cache(reset_running_requests=True)`."""
    rig.rpc("skyrl_start_weight_update")
    yield
    for part in _parts(shuffled(folder)):
        rig.rpc("update_weights_ipc", str(folder), part)
        yield
    rig.rpc("skyrl_finish_weight_update")
    rig.llm.reset_prefix_cache(reset_running_requests=True)


def nemo_ipc(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL IPC and collective: reset first, one worker method, which says whether it worked."""
    rig.llm.reset_prefix_cache()
    yield
    if not rig.rpc("update_weights_via_ipc_zmq", str(folder), names(folder)):
        raise RuntimeError("the refit returned False")


def nemo_checkpoint_engine(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL checkpoint engine: cached parameters are inspected; batches; no processing and no end at all."""
    rig.rpc("prepare_refit_info")
    yield
    if not rig.rpc("update_weights_via_ipc_zmq", str(folder), shuffled(folder), False):
        raise RuntimeError("the refit returned False")


def nemo_nccl_reshard(rig: Rig, folder: Path) -> Iterator[None]:
    """NeMo-RL nccl reshard: straight into live parameters where their layout allows, then processing."""
    direct = [name for name in rig.rpc("prepare_refit_info") if name in set(names(folder))]
    yield
    if not rig.rpc("nccl_reshard_refit", str(folder), direct):
        raise RuntimeError("the refit returned False")


DRIVERS: dict[str, Driver] = {
    driver.__name__: driver
    for driver in (
        trl_colocate,
        trl_server,
        trl_async_grpo,
        openrlhf,
        verl_ipc,
        verl_delta_dense,
        skyrl_ipc,
        nemo_ipc,
        nemo_checkpoint_engine,
        nemo_nccl_reshard,
    )
}
