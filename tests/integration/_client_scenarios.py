# SPDX-License-Identifier: Apache-2.0
"""What a client does to an engine and what must come of it: one function a scenario.

Each starts from an engine that serves A, notes every violation in `rig.problems`, and leaves the engine usable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _client_jobs import DRIVERS, Rig, shuffled
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from weightlife.testing import oracle
from weightlife.testing._source import names, read
from weightlife.testing._walk import digests, walk
from weightlife.testing.checkpoints import tensors
from weightlife.testing.worker_ext import spoil

Scenario = Callable[[Rig], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# -- every framework, idle and with requests in flight -------------------------------------------------------------


def _idle(driver: str) -> Scenario:
    def run(rig: Rig) -> None:
        for folder in (rig.b, rig.a):
            for _ in DRIVERS[driver](rig, folder):
                pass
            rig.equal(folder, "after a sync")

    return run


def _in_flight(driver: str) -> Scenario:
    def run(rig: Rig) -> None:
        added = rig.add("fly", 24)
        done = rig.steps(3)
        for index, _ in enumerate(DRIVERS[driver](rig, rig.b)):
            if index % 3 == 0:
                done |= rig.steps(1)
        done |= rig.steps()
        rig.require(len(done) == len(added), f"{len(done)} of {len(added)} requests in flight finished")
        for key, (token_ids, reason, logprobs) in done.items():
            rig.require(reason == "length" and len(token_ids) == 24, f"request {key} ended with {reason}")
            rig.require(not any(v == "nan" for p in logprobs for _, v in p), f"request {key} saw NaN")
        rig.equal(rig.b, "after a sync with requests in flight")

    return run


for _name in DRIVERS:
    SCENARIOS[f"idle_{_name}"] = _idle(_name)
    SCENARIOS[f"in_flight_{_name}"] = _in_flight(_name)


# -- the guard's table ---------------------------------------------------------------------------------------------


def _reference(rig: Rig, between: Callable[[], None] = lambda: None) -> Any:
    rig.llm.reset_prefix_cache()
    rig.add("ref")
    done = rig.steps(3)
    between()
    return done | rig.steps()


def _send(rig: Rig, folder: Path, wanted: list[str]) -> None:
    for name, tensor in read(folder, wanted):
        sent = tensor.clone()
        rig.model.load_weights([(name, sent)])
        spoil(sent)


def _halves(rig: Rig) -> tuple[list[str], list[str]]:
    """Names of a checkpoint in two parts that cut a fused layer in two."""
    order = names(rig.b)
    first = next(n for n in order if ".q_proj." in n)
    return [first], [n for n in order if n != first]


@scenario
def guard_half_touched_layer_runs_on_a(rig: Rig) -> None:
    """Requests that were running, and new ones, see A exactly while a layer is half touched; then B commits."""
    generation = rig.life().generation
    quiet = _reference(rig)
    first, rest = _halves(rig)
    disturbed = _reference(rig, lambda: _send(rig, rig.b, first))
    rig.require(disturbed == quiet, "a half-touched layer changed what running requests got")
    rig.answers(rig.a, "while a layer is half touched")
    rig.require(rig.life().session is not None, "the half-touched session was closed")
    rig.require(rig.life().generation == generation, "something was committed")
    _send(rig, rig.b, rest)
    rig.require(rig.life().session is not None, "the session ended before a batch came")
    rig.worker.execute_dummy_batch()
    rig.require(rig.life().session is not None, "a dummy batch ended the session")
    rig.add("one", 1)
    rig.steps()
    rig.require(rig.life().session is None, "a real batch did not end the whole session")
    rig.require(rig.life().generation == generation + 1, "not exactly one generation was committed")
    rig.require(rig.report().outcome == "committed", f"outcome {rig.report().outcome}")
    rig.equal(rig.b, "after the rest")


@scenario
def guard_explicit_session_runs_on_a(rig: Rig) -> None:
    """Between start and finish every pass sees A, however much has arrived."""
    quiet = _reference(rig)
    order = shuffled(rig.b)
    cut = len(order) // 2

    def begin() -> None:
        rig.rpc("skyrl_start_weight_update")
        rig.rpc("update_weights_ipc", str(rig.b), order[:cut])

    rig.require(_reference(rig, begin) == quiet, "an open explicit session changed what running requests got")
    rig.answers(rig.a, "in the middle of an explicit session")
    rig.rpc("update_weights_ipc", str(rig.b), order[cut:])
    rig.worker.execute_dummy_batch()
    rig.answers(rig.a, "before finish")
    rig.rpc("skyrl_finish_weight_update")
    rig.equal(rig.b, "after finish")


@scenario
def guard_patience_ends_a_stuck_update(rig: Rig) -> None:
    """An update that never gets whole is dropped after `implicit_patience` batches; the next call says so."""
    from weightlife import errors

    first, _ = _halves(rig)
    _send(rig, rig.b, first)
    for turn in range(6):
        rig.llm.reset_prefix_cache()
        rig.add("one", 20)
        rig.steps()
        if rig.life().session is None:
            break
        rig.require(turn < 5, "the session is still open")
    rig.equal(rig.a, "after the stuck update was dropped")
    try:
        _send(rig, rig.b, first)
    except errors.SessionFailedError as error:
        rig.require(first[0] not in error.tensors and bool(error.tensors), f"missing tensors named: {error.tensors}")
    else:
        rig.problems.append("the next call did not raise")
    _send(rig, rig.b, names(rig.b))
    rig.equal(rig.b, "after a full sync")


# -- the twelve consequences ---------------------------------------------------------------------------------------


@scenario
def consequence_01_no_begin_no_end(rig: Rig) -> None:
    """q, k, v and their biases one by one, in any order, and split over buckets."""
    _send(rig, rig.b, shuffled(rig.b))
    rig.equal(rig.b, "one tensor a call, shuffled")
    order = sorted(names(rig.a), key=lambda n: (n.rpartition(".")[2], n))  # all biases first, then all weights
    for start in range(0, len(order), 4):
        rig.model.load_weights(list(read(rig.a, order[start : start + 4])))
    rig.equal(rig.a, "buckets of four, biases apart from their weights")


@scenario
def consequence_02_lazy_end(rig: Rig) -> None:
    """The next generate completes; a cache reset before, in the middle or never is no mark."""
    from vllm import SamplingParams

    generation = rig.life().generation
    rig.llm.reset_prefix_cache()
    order = names(rig.b)
    _send(rig, rig.b, order[:-1])
    rig.llm.reset_prefix_cache()
    rig.require(rig.life().generation == generation, "a cache reset committed")
    _send(rig, rig.b, order[-1:])
    prompt = {"prompt_token_ids": [11, 12, 13]}
    rig.llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    rig.require(rig.life().generation == generation + 1, "the next generate did not complete the update")
    rig.equal(rig.b, "after generate")


@scenario
def consequence_03_processing_is_the_end_mark(rig: Rig) -> None:
    """Module-level processing, imported when called, commits at once; a second one changes nothing."""
    generation = rig.life().generation
    _send(rig, rig.b, shuffled(rig.b))
    rig.worker._nemo_process()
    rig.require(rig.life().session is None, "the session is still open after the end mark")
    rig.require(rig.report().outcome == "committed", f"outcome {rig.report().outcome}")
    rig.worker._nemo_process()
    rig.require(rig.life().generation == generation + 1, "not exactly one generation was committed")
    rig.equal(rig.b, "after the end mark")


@scenario
def consequence_03_the_end_mark_refuses_half_a_layer(rig: Rig) -> None:
    """An end mark on half a layer raises, and A serves exactly."""
    first, _ = _halves(rig)
    _send(rig, rig.b, first)
    try:
        rig.worker._nemo_process()
    except Exception as error:
        rig.facts["error"] = f"{type(error).__name__}: {error}"
        rig.require("HalfTouched" in type(error).__name__, f"raised {type(error).__name__}")
    else:
        rig.problems.append("half a layer was accepted")
    rig.equal(rig.a, "after the refusal")


@scenario
def consequence_04_layerwise_functions_called_directly(rig: Rig) -> None:
    """SkyRL's own counter in two modules stays theirs and does not matter."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    for _ in DRIVERS["skyrl_ipc"](rig, rig.b):
        pass
    rig.require(layerwise.get_numel_loaded is meta.get_numel_loaded, "the client's replacement is gone")
    rig.require(layerwise.get_numel_loaded.__name__ == "_skyrl_get_numel_loaded", "the client's replacement is gone")
    rig.equal(rig.b, "after the client's own bracket")


@scenario
def consequence_05_tied_heads(rig: Rig) -> None:
    """No client sends `lm_head.weight`: the head follows the embeddings."""
    rig.require("lm_head.weight" not in names(rig.b), "the checkpoint has a head of its own")
    for driver in ("trl_colocate", "nemo_ipc", "skyrl_ipc"):
        for folder in (rig.b, rig.a):
            for _ in DRIVERS[driver](rig, folder):
                pass
            rig.equal(folder, driver)
    _send(rig, rig.b, [n for n in names(rig.b) if "embed_tokens" in n])
    head, embedding = rig.model.lm_head.weight, rig.model.model.embed_tokens.weight
    rig.require(head.data_ptr() == embedding.data_ptr(), "the tie is broken while a session is open")
    _send(rig, rig.b, [n for n in names(rig.b) if "embed_tokens" not in n])
    rig.equal(rig.b, "embeddings first, then the rest")


@scenario
def consequence_06_tensors_do_not_live_on(rig: Rig) -> None:
    """One buffer for all tensors, overwritten after each call: nothing of it is used later."""
    largest = max(t.numel() * t.element_size() for _, t in read(rig.b, names(rig.b)))
    buffer = torch.empty(largest, dtype=torch.uint8)
    for name, tensor in read(rig.b, shuffled(rig.b)):
        view = buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        rig.model.load_weights([(name, view)])
        spoil(buffer)
    del buffer
    rig.equal(rig.b, "through one reused buffer")


@scenario
def consequence_07_float32_into_bfloat16(rig: Rig) -> None:
    """A float32 trainer: the cast is the one of a cold load of a float32 checkpoint."""
    trained = _variant(rig, "float32", lambda name, a, b: b.float() * 1.0009765 + 1e-4)
    rig.want.setdefault(trained, oracle.cold(trained))
    rig.require(rig.want[trained]["logprobs"] != rig.want[rig.b]["logprobs"], "the variant is no other model")
    for name, tensor in read(trained, names(trained)):
        rig.require(tensor.dtype == torch.float32, f"{name} is {tensor.dtype}")
        rig.model.load_weights([(name, tensor)])
    rig.equal(trained, "float32 pushed into bfloat16")


@scenario
def consequence_08_identity(rig: Rig) -> None:
    """Cached Parameter objects, their storages, classes and loaders outlive a sync."""
    cached = dict(rig.model.named_parameters())
    facts = {n: (p.data_ptr(), p.__class__, tuple(p.shape), _owner(p)) for n, p in cached.items()}
    modules = {id(m) for m in rig.model.modules()}
    first, rest = _halves(rig)
    _send(rig, rig.b, first)
    for name, parameter in rig.model.named_parameters():
        loader = getattr(parameter, "weight_loader", None)
        if loader is not None and facts.get(name, (0, 0, 0, None))[3] is not None:
            rig.require(id(_owner(parameter)) in modules, f"{name}: weight_loader.__self__ is lost in a session")
    _send(rig, rig.b, rest)
    rig.equal(rig.b, "after a sync")
    now = dict(rig.model.named_parameters())
    rig.require(list(now) == list(cached), "named_parameters() lists something else")
    for name, parameter in now.items():
        pointer, cls, shape, owner = facts[name]
        rig.require(parameter is cached[name], f"{name} is another object")
        rig.require(parameter.data_ptr() == pointer and tuple(parameter.shape) == shape, f"{name} moved")
        rig.require(parameter.__class__ is cls, f"{name} became {parameter.__class__.__name__}")
        rig.require(_owner(parameter) is owner, f"{name}: weight_loader.__self__ changed")


def _owner(parameter: torch.nn.Parameter) -> Any:
    return getattr(getattr(parameter, "weight_loader", None), "__self__", None)


@scenario
def consequence_08_class_swapped_while_loading(rig: Rig) -> None:
    """verl marks parameters, changes `param.__class__` round each load and takes it back."""
    for part in _chunks(shuffled(rig.b), 5):
        for _, parameter in rig.model.named_parameters():
            if hasattr(parameter, "subclass_type"):
                parameter.orig_type = parameter.__class__
                parameter.__class__ = parameter.subclass_type
        rig.model.load_weights(list(read(rig.b, part)))
        for _, parameter in rig.model.named_parameters():
            if hasattr(parameter, "orig_type"):
                parameter.__class__ = parameter.orig_type
                del parameter.orig_type
        for _, parameter in rig.model.named_parameters():
            if parameter.__class__ is not torch.nn.Parameter:
                parameter.subclass_type = parameter.__class__
    rig.equal(rig.b, "after loads under swapped classes")


@scenario
def consequence_09_no_public_name_on_the_worker(rig: Rig) -> None:
    """Nothing public was added to the worker or runner classes: a client's extension starts with its own names."""
    import subprocess
    import sys

    kinds = {type(rig.worker.worker), type(rig.worker.model_runner)}
    code = (
        "import json, vllm.v1.worker.cpu_worker as w, vllm.v1.worker.cpu_model_runner as r\n"
        "print(json.dumps([sorted(set(dir(w.CPUWorker))), sorted(set(dir(r.CPUModelRunner)))]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    stock = {n for part in json.loads(found.stdout.splitlines()[-1]) for n in part}
    extension = set(dir(rig.worker.worker.__class__.__bases__[-1]))
    for kind in kinds:
        added = {n for n in dir(kind) if not n.startswith("_")} - stock - extension
        rig.require(not added, f"{kind.__name__} has new public names {sorted(added)}")


@scenario
def consequence_10_all_nan_dry_pass(rig: Rig) -> None:
    """NeMo-RL learns names from a pass of NaN: raised or not, no NaN ever serves."""
    applier = SparseApplier(rig.model)
    marks = ((n, torch.full_like(t, float("nan"))) for n, t in read(rig.a, names(rig.a)))
    rig.facts["raised"] = _raised(lambda: applier.load(marks))
    rig.equal(rig.a, "after a dry pass of NaN")
    _send(rig, rig.b, names(rig.b))
    rig.equal(rig.b, "a full sync after the dry pass")


@scenario
def consequence_10_nan_marks_unchanged(rig: Rig) -> None:
    """A sparse delta is applied exactly or refused while A is whole."""
    mixed = _variant(rig, "sparse", _every_seventh)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    applier = SparseApplier(rig.model)
    raised = _raised(lambda: applier.load(_marked(rig, names(rig.a))))
    rig.facts["raised"] = raised
    rig.equal(rig.a if raised else mixed, "after a sparse delta" + (" that was refused" if raised else ""))


@scenario
def consequence_10_nan_marks_in_untouched_layouts(rig: Rig) -> None:
    """Where processing changes nothing a sparse delta needs no model format, and is exact."""
    wanted = [n for n in names(rig.a) if n.endswith(("norm.weight", "layernorm.weight"))]
    mixed = _variant(rig, "sparse_norms", lambda n, a, b: _every_seventh(n, a, b) if n in wanted else a)
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

    mixed = _variant(rig, "sparse", _every_seventh)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    patches = []
    for name, tensor in read(rig.b, names(rig.b)):
        indices = torch.arange(0, tensor.numel(), 7)
        values = tensor.reshape(-1)[indices].clone()
        patches.append(CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, indices))
    raised = _raised(lambda: load_checkpoint_weight_patches(rig.model, patches))
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


def _every_seventh(name: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.clone().reshape(-1)
    out[::7] = b.reshape(-1)[::7]
    return out.reshape(a.shape)


def _marked(rig: Rig, wanted: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in read(rig.b, wanted):
        out = torch.full_like(tensor, float("nan")).reshape(-1)
        out[::7] = tensor.reshape(-1)[::7]
        yield name, out.reshape(tensor.shape)


def _variant(rig: Rig, name: str, make: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]) -> Path:
    """A third checkpoint, computed from A and B, beside them."""
    folder = rig.a.parent / f"client_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(rig.a, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    a, b = tensors(rig.a), tensors(rig.b)
    content = {n: make(n, a[n], b[n]).contiguous() for n in a}
    save_file(content, folder / "model.safetensors", {"format": "pt"})
    return folder


def _raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def _chunks(order: list[str], count: int) -> Iterator[list[str]]:
    size = -(-len(order) // count)
    for start in range(0, len(order), size):
        yield order[start : start + size]


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

    _send(rig, rig.b, order[:8])
    try:
        rig.model.load_weights(dying())
    except Exception as error:
        rig.require(error is gone, f"the source's exception became {type(error).__name__}: {error}")
    else:
        rig.problems.append("a dead source was taken for a whole one")
    rig.equal(rig.a, "after the source died")
    _send(rig, rig.b, order[: len(order) // 2])
    try:
        rig.model.load_weights(_bad(rig))
    except Exception as error:
        named = isinstance(error, errors.ShapeMismatchError) and _bad(rig)[0][0] in str(error)
        rig.require(named or not isinstance(error, errors.WeightlifeError), f"raised {type(error).__name__}: {error}")
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
        _send(rig, rig.b, order[:cut])
        rig.require(bool(_raised(lambda: rig.model.load_weights(_bad(rig)))), "a wrong shape was taken")
        rig.facts[f"later_{cut}"] = [_raised(lambda n=n: _send(rig, rig.b, [n])) for n in order[cut:]]
        rig.answers(rig.a, f"after the tail of a failed sync ({cut} of {len(order)} tensors lost)")
        _send(rig, rig.b, order)
        rig.equal(rig.b, "a full sync afterwards")
        rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.a)})


@scenario
def consequence_11_worker_methods_raise(rig: Rig) -> None:
    """verl's and NeMo-RL's worker methods fail inside: no hang, A exact, the next sync exact."""
    broken = _broken_folder(rig)
    largest = max(t.numel() * t.element_size() for _, t in read(rig.b, names(rig.b)))
    raised = _raised(lambda: rig.rpc("update_weights_from_ipc", str(broken), largest + 4096))
    rig.require(bool(raised), "verl's method took a broken stream")
    rig.equal(rig.a, "after verl's method raised")
    for _ in DRIVERS["verl_ipc"](rig, rig.b):
        pass
    rig.equal(rig.b, "verl's next sync")
    rig.require(rig.rpc("update_weights_via_ipc_zmq", str(broken), names(broken)) is False, "NeMo-RL said True")
    rig.equal(rig.b, "after NeMo-RL's method returned False")
    for _ in DRIVERS["nemo_ipc"](rig, rig.a):
        pass
    rig.equal(rig.a, "NeMo-RL's next sync")


@scenario
def consequence_11_brackets_raise(rig: Rig) -> None:
    """A chunk fails and nobody calls finish (TRL server, SkyRL), or somebody does: the next start is clean."""
    broken = _broken_folder(rig)
    rig.rpc("start_weight_update")
    rig.require(bool(_raised(lambda: rig.rpc("update_weights", _info(broken)))), "a broken update was taken")
    rig.equal(rig.a, "after an update failed and nobody finished")
    for _ in DRIVERS["trl_server"](rig, rig.b):
        pass
    rig.equal(rig.b, "the server's next sync")
    rig.rpc("start_weight_update")
    rig.require(bool(_raised(lambda: rig.rpc("update_weights", _info(broken)))), "a broken update was taken")
    rig.require(bool(_raised(lambda: rig.rpc("finish_weight_update"))), "finish after a failure said nothing")
    rig.equal(rig.b, "after finish of a failed update")
    rig.rpc("skyrl_start_weight_update")
    raised = _raised(lambda: rig.rpc("update_weights_ipc", str(broken), names(broken)))
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
    return _variant(rig, "broken", lambda n, a, b: bad.get(n, b))


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

    for method in (AutoAWQMarlinLinearMethod, CompressedTensorsLinearMethod, UnquantizedEmbeddingMethod):
        original = method.process_weights_after_loading

        def replaced(self: Any, layer: Any, original: Callable[..., None] = original) -> None:
            if not hasattr(layer, "_client_layout"):
                layer._client_layout = {
                    name: (p.shape, p.dtype, type(p), dict(vars(p))) for name, p in layer.named_parameters(recurse=False)
                }
                original(self, layer)
                return
            live = layer.__dict__.pop("_client_live", {})
            original(self, layer)
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
    for part in _chunks(shuffled(folder), 5):
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
        _send(rig, folder, order[: order.index(layer)])
        rig.llm.reset_prefix_cache()
        rig.llm.wake_up(tags=["kv_cache"])
        rig.llm.llm_engine.engine_core.engine_core.resume_scheduler()
        _refused(rig, "with half of the weights")
        _send(rig, folder, rest)
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
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
        rig.llm.llm_engine.abort_request(["one-0", "one-1"])
    rig.facts[when] = error or {k: v[1] for k, v in done.items()}
    served = [k for k, v in done.items() if v[0] and v[1] != "error"]
    rig.require(not served, f"{when}: requests were served")
    rig.require(not any(v[0] for v in done.values()), f"{when}: tokens came out")


# -- consequence 12: the drafter -----------------------------------------------------------------------------------


@scenario
def drafter_digests(rig: Rig) -> None:
    """Reference: what a cold drafter holds."""
    rig.facts["drafter"] = digests(rig.worker.model_runner.drafter.model)
    rig.facts["fingerprint"] = oracle.fingerprint(rig.llm)


def _drafter_scenario(driver: str) -> Scenario:
    def run(rig: Rig) -> None:
        runner = rig.worker.model_runner
        for folder in (rig.b, rig.a):
            for _ in DRIVERS[driver](rig, folder):
                pass
            rig.facts[f"fingerprint_{folder.name}"] = oracle.fingerprint(rig.llm)
            rig.facts[f"drafter_{folder.name}"] = digests(runner.drafter.model)

    return run


for _name in ("verl_ipc", "nemo_ipc", "nemo_checkpoint_engine"):
    SCENARIOS[f"consequence_12_drafter_{_name}"] = _drafter_scenario(_name)
