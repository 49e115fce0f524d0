# SPDX-License-Identifier: Apache-2.0
"""What a client does to an engine when it goes its own way, or wrong: NaN marks, failures, own lifecycles, sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _client_drivers import DRIVERS, shuffled
from _client_rig import Rig, chunks, every_seventh, raised_by, scenario, send, variant
from torch.utils._python_dispatch import TorchDispatchMode

from weightlife.testing import oracle
from weightlife.testing._source import names, read
from weightlife.testing._walk import walk

# -- consequence 10: NaN is legal ----------------------------------------------------------------------------------


@scenario
def consequence_10_all_nan_dry_pass(rig: Rig) -> None:
    """NeMo-RL learns names from a pass of NaN: raised or not, no NaN ever serves."""
    applier = SparseApplier(rig.model)
    marks = ((n, torch.full_like(t, float("nan"))) for n, t in read(rig.a, names(rig.a)))
    rig.facts["raised"] = raised_by(lambda: applier.load(marks))
    rig.equal(rig.a, "after a dry pass of NaN")
    send(rig, rig.b, names(rig.b))
    rig.equal(rig.b, "a full sync after the dry pass")


@scenario
def consequence_10_nan_marks_unchanged(rig: Rig) -> None:
    """A sparse delta is applied exactly or refused while A is whole."""
    mixed = variant(rig, "sparse", every_seventh)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    applier = SparseApplier(rig.model)
    raised = raised_by(lambda: applier.load(_marked(rig, names(rig.a))))
    rig.facts["raised"] = raised
    rig.equal(rig.a if raised else mixed, "after a sparse delta" + (" that was refused" if raised else ""))


@scenario
def consequence_10_nan_marks_in_untouched_layouts(rig: Rig) -> None:
    """Where processing changes nothing a sparse delta needs no model format, and is exact."""
    wanted = [n for n in names(rig.a) if n.endswith(("norm.weight", "layernorm.weight"))]
    mixed = variant(rig, "sparse_norms", lambda n, a, b: every_seventh(n, a, b) if n in wanted else a)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    SparseApplier(rig.model).load(_marked(rig, wanted))
    rig.equal(mixed, "after a sparse delta of norms")


@scenario
def consequence_10_sparse_patches_of_the_host(rig: Rig) -> None:
    """vLLM's own sparse patches (verl delta, the sparse engine): exact or refused while A is whole."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    mixed = variant(rig, "sparse", every_seventh)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    patches = []
    for name, tensor in read(rig.b, names(rig.b)):
        indices = torch.arange(0, tensor.numel(), 7)
        values = tensor.reshape(-1)[indices].clone()
        patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, indices))
    raised = raised_by(lambda: load_checkpoint_weight_patches(rig.model, patches))
    rig.facts["raised"] = raised
    rig.equal(rig.a if raised else mixed, "after sparse patches" + (" that were refused" if raised else ""))


class SparseApplier:
    """NeMo-RL's way: the loader's copies into live storages become partial overwrites; NaN means unchanged."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.targets = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Apply; like the original it complains when a weight was reported that it saw no copy of."""
        mode = _Sparse(self.targets)
        with torch.no_grad(), mode:
            loaded = self.model.load_weights(weights)
        if loaded is not None and len(loaded) > mode.copies:
            raise RuntimeError("a loaded sparse weight was reported without a supported target copy")


class _Sparse(TorchDispatchMode):
    def __init__(self, targets: set[int]) -> None:
        super().__init__()
        self.targets = targets
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or args[0].untyped_storage()._cdata not in self.targets:
            return func(*args, **(kwargs or {}))
        self.copies += 1
        destination, source = args[0], args[1].expand_as(args[0])
        changed = ~torch.isnan(source)
        destination.masked_scatter_(changed, source.masked_select(changed).to(destination.dtype))
        return destination


def _marked(rig: Rig, wanted: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in read(rig.b, wanted):
        out = torch.full_like(tensor, float("nan")).reshape(-1)
        out[::7] = tensor.reshape(-1)[::7]
        yield name, out.reshape(tensor.shape)


# -- consequence 11: raising in the middle -------------------------------------------------------------------------


def _bad(rig: Rig) -> list[tuple[str, torch.Tensor]]:
    name = next(n for n in names(rig.b) if ".o_proj." in n and n.endswith(("weight", "qweight")))
    ((_, tensor),) = read(rig.b, [name])
    return [(name, tensor[:-1, :-1].clone())]


class TrainerGone(RuntimeError):
    """What a source raises when its other end dies."""


@scenario
def consequence_11_trl_raises_in_the_middle(rig: Rig) -> None:
    """A's source or shape fails in the middle: the error reaches the trainer, A serves, the next sync is exact."""
    from weightlife import errors

    order = names(rig.b)
    gone = TrainerGone("the trainer went away")

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from read(rig.b, order[8:10])
        raise gone

    send(rig, rig.b, order[:8])
    try:
        rig.model.load_weights(dying())
    except Exception as error:  # noqa: BLE001 - its type is checked
        rig.require(error is gone, f"the source's exception became {type(error).__name__}: {error}")
    else:
        rig.problems.append("a dead source was taken for a whole one")
    rig.equal(rig.a, "after the source died")
    send(rig, rig.b, order[: len(order) // 2])
    try:
        rig.model.load_weights(_bad(rig))
    except Exception as error:  # noqa: BLE001 - its type is checked
        named = isinstance(error, errors.ShapeMismatchError) and _bad(rig)[0][0] in str(error)
        rig.require(
            named or not isinstance(error, errors.WeightlifeError), f"raised {type(error).__name__}: {error}"
        )
    else:
        rig.problems.append("a tensor of the wrong shape was taken")
    rig.equal(rig.a, "after a failed sync")
    for _ in DRIVERS["trl_colocate"](rig, rig.b):
        pass
    rig.equal(rig.b, "the next sync")


@scenario
def consequence_11_the_error_is_swallowed(rig: Rig) -> None:
    """A client that swallows the error of one tensor and sends the rest never gets a mixture."""
    order = names(rig.b)
    for cut in (len(order) // 2, next(i for i, n in enumerate(order) if ".layers.1." in n)):
        send(rig, rig.b, order[:cut])
        rig.require(bool(raised_by(lambda: rig.model.load_weights(_bad(rig)))), "a wrong shape was taken")
        rig.facts[f"later_{cut}"] = [raised_by(lambda n=n: send(rig, rig.b, [n])) for n in order[cut:]]
        rig.answers(rig.a, f"after the tail of a failed sync ({cut} of {len(order)} tensors lost)")
        send(rig, rig.b, order)
        rig.equal(rig.b, "a full sync afterwards")
        rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.a)})


@scenario
def consequence_11_worker_methods_raise(rig: Rig) -> None:
    """verl's and NeMo-RL's worker methods fail inside: no hang, A exact, the next sync exact."""
    broken = _broken_folder(rig)
    largest = max(t.numel() * t.element_size() for _, t in read(rig.b, names(rig.b)))
    raised = raised_by(lambda: rig.rpc("update_weights_from_ipc", str(broken), largest + 4096))
    rig.require(bool(raised), "verl's method took a broken stream")
    rig.equal(rig.a, "after verl's method raised")
    for _ in DRIVERS["verl_ipc"](rig, rig.b):
        pass
    rig.equal(rig.b, "verl's next sync")
    rig.require(
        rig.rpc("update_weights_via_ipc_zmq", str(broken), names(broken)) is False, "NeMo-RL said True"
    )
    rig.equal(rig.b, "after NeMo-RL's method returned False")
    for _ in DRIVERS["nemo_ipc"](rig, rig.a):
        pass
    rig.equal(rig.a, "NeMo-RL's next sync")


@scenario
def consequence_11_brackets_raise(rig: Rig) -> None:
    """A chunk fails and nobody calls finish (TRL server, SkyRL), or somebody does: the next start is clean."""
    broken = _broken_folder(rig)
    rig.rpc("start_weight_update")
    rig.require(
        bool(raised_by(lambda: rig.rpc("update_weights", _info(broken)))), "a broken update was taken"
    )
    rig.equal(rig.a, "after an update failed and nobody finished")
    for _ in DRIVERS["trl_server"](rig, rig.b):
        pass
    rig.equal(rig.b, "the server's next sync")
    rig.rpc("start_weight_update")
    rig.require(
        bool(raised_by(lambda: rig.rpc("update_weights", _info(broken)))), "a broken update was taken"
    )
    rig.require(
        bool(raised_by(lambda: rig.rpc("finish_weight_update"))), "finish after a failure said nothing"
    )
    rig.equal(rig.b, "after finish of a failed update")
    rig.rpc("skyrl_start_weight_update")
    raised = raised_by(lambda: rig.rpc("update_weights_ipc", str(broken), names(broken)))
    rig.require(bool(raised), "SkyRL's chunk was taken")
    rig.equal(rig.b, "after SkyRL's chunk raised")
    for _ in DRIVERS["skyrl_ipc"](rig, rig.a):
        pass
    rig.equal(rig.a, "SkyRL's next sync")


def _info(folder: Path) -> dict[str, Any]:
    return {"folder": str(folder), "names": names(folder)}


def _broken_folder(rig: Rig) -> Path:
    """Checkpoint B with one tensor of a wrong shape."""
    bad = dict(_bad(rig))
    return variant(rig, "broken", lambda n, a, b: bad.get(n, b))


# -- clients with a lifecycle of their own -------------------------------------------------------------------------


def patch_quant_methods() -> None:
    """verl (FP8, QAT, ModelOpt): processing is replaced at class level before the engine is made.

    The first call of a layer remembers the checkpoint layout of its parameters; a later one processes and folds the
    result back into the tensors that serve.
    """
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQMarlinLinearMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # A native handle may hold the address of what processing made: the client keeps it, like its live tensors.
    made_by_layer: dict[int, Any] = {}
    for method in (AutoAWQMarlinLinearMethod, CompressedTensorsLinearMethod, UnquantizedEmbeddingMethod):
        original = method.process_weights_after_loading

        def replaced(self: Any, layer: Any, original: Callable[..., None] = original) -> None:
            if not hasattr(layer, "_client_layout"):
                layer._client_layout = {
                    name: (p.shape, p.dtype, type(p), dict(vars(p)))
                    for name, p in layer.named_parameters(recurse=False)
                }
                original(self, layer)
                return
            live = layer.__dict__.pop("_client_live", {})
            original(self, layer)
            made_by_layer[id(layer)] = dict(layer.named_parameters(recurse=False))
            for name, parameter in live.items():
                made = layer._parameters.get(name)
                if made is not None and made.shape == parameter.shape and made.dtype == parameter.dtype:
                    parameter.data.copy_(made.data)
                    layer._parameters[name] = parameter

        method.process_weights_after_loading = replaced


def _own_lifecycle(rig: Rig, folder: Path) -> None:
    from vllm.config import set_current_vllm_config

    layers = [m for m in rig.model.modules() if hasattr(m, "_client_layout")]
    for layer in layers:
        layer._client_live = {n: p for n, p in layer.named_parameters(recurse=False) if p.numel()}
        for name in layer._client_live.keys() - layer._client_layout.keys():
            del layer._parameters[name]
        for name, (shape, dtype, cls, attributes) in layer._client_layout.items():
            made = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            made.__class__ = cls
            made.__dict__.update(attributes)
            layer._parameters[name] = made
    for part in chunks(shuffled(folder), 5):
        rig.model.load_weights([(n, t.clone()) for n, t in read(folder, part)])
    with set_current_vllm_config(rig.worker.vllm_config), torch.no_grad():
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
    rig.llm.reset_prefix_cache()


@scenario
def own_lifecycle(rig: Rig) -> None:
    """Parameters re-created, loaded, processed layer by layer, folded back: followed, or stood aside from."""
    for folder in (rig.b, rig.a, rig.b):
        _own_lifecycle(rig, folder)
        rig.equal(folder, "after the client's own lifecycle")
    rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.a)})
    rig.equal(rig.a, "a reload by path afterwards")
    _own_lifecycle(rig, rig.b)
    rig.equal(rig.b, "the client's own lifecycle after a reload by path")


# -- level-2 sleep -------------------------------------------------------------------------------------------------


def real_sleep_on_a_cpu() -> None:
    """Let the CPU worker sleep like any other; what the backend drops is done by `_Dropping`."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    del CPUWorker.sleep, CPUWorker.wake_up
    torch.accelerator.get_memory_info = lambda *args: (0, 0)


def _dropping(model: Any) -> Any:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

    class Dropping(SleepModeBackend):
        """Level 2: every value that was allocated with the weights is gone; memory that native code uses stays."""

        def suspend(self, level: int = 1) -> None:
            if level == 2:
                for _, tensor in walk(model):
                    if tensor.layout is torch.strided and not tensor.is_meta:
                        tensor.untyped_storage().fill_(0xFF)

        def resume(self, tags: list[str] | None = None) -> None:
            """Memory comes back, values do not."""

    return Dropping()


@scenario
def level_2_sleep_serves_nothing_until_a_complete_reload(rig: Rig) -> None:
    """TRL colocate with sleep: asleep, woken, half pushed: refused. Complete: exact. Twice."""
    rig.worker.worker._sleep_mode_backend = _dropping(rig.model)
    for folder in (rig.b, rig.a):
        rig.llm.sleep(level=2)
        rig.llm.wake_up(tags=["weights"])
        order = names(folder)
        layer = next(n for n in order if ".layers.1." in n)
        rest = order[order.index(layer) :]
        send(rig, folder, order[: order.index(layer)])
        rig.llm.reset_prefix_cache()
        rig.llm.wake_up(tags=["kv_cache"])
        rig.llm.llm_engine.engine_core.engine_core.resume_scheduler()
        _refused(rig, "with half of the weights")
        send(rig, folder, rest)
        rig.llm.reset_prefix_cache()
        rig.equal(folder, "after a complete push")
    rig.llm.sleep(level=2)
    rig.llm.wake_up()
    rig.llm.llm_engine.engine_core.engine_core.resume_scheduler()
    _refused(rig, "with nothing")
    rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.b)})
    rig.equal(rig.b, "after a reload by path")


def _refused(rig: Rig, when: str) -> None:
    rig.add("one", 4)
    error, done = "", {}
    try:
        done = rig.steps()
    except Exception as raised:  # noqa: BLE001 - refused either way
        error = f"{type(raised).__name__}: {raised}"
        rig.llm.llm_engine.abort_request(["one-0", "one-1"])
    rig.facts[when] = error or {k: v[1] for k, v in done.items()}
    served = [k for k, v in done.items() if v[0] and v[1] != "error"]
    rig.require(not served, f"{when}: requests were served")
    rig.require(not any(v[0] for v in done.values()), f"{when}: tokens came out")
