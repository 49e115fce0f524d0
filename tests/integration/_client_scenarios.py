# SPDX-License-Identifier: Apache-2.0
"""What a client does to an engine that behaves, and what must come of it: one function a scenario."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from _client_drivers import DRIVERS, shuffled
from _client_rig import SCENARIOS, Rig, Scenario, chunks, halves, scenario, send, variant

from weightlife.testing import oracle
from weightlife.testing._source import names, read
from weightlife.testing._walk import digests
from weightlife.testing.worker_ext import spoil

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


@scenario
def guard_half_touched_layer_runs_on_a(rig: Rig) -> None:
    """Requests that were running, and new ones, see A exactly while a layer is half touched; then B commits."""
    generation = rig.life().generation
    quiet = _reference(rig)
    first, rest = halves(rig)
    disturbed = _reference(rig, lambda: send(rig, rig.b, first))
    rig.require(disturbed == quiet, "a half-touched layer changed what running requests got")
    rig.answers(rig.a, "while a layer is half touched")
    rig.require(rig.life().session is not None, "the half-touched session was closed")
    rig.require(rig.life().generation == generation, "something was committed")
    send(rig, rig.b, rest)
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

    first, _ = halves(rig)
    send(rig, rig.b, first)
    for turn in range(6):
        rig.llm.reset_prefix_cache()
        rig.add("one", 20)
        rig.steps()
        if rig.life().session is None:
            break
        rig.require(turn < 5, "the session is still open")
    rig.equal(rig.a, "after the stuck update was dropped")
    try:
        send(rig, rig.b, first)
    except errors.SessionFailedError as error:
        rig.require(
            first[0] not in error.tensors and bool(error.tensors), f"missing tensors named: {error.tensors}"
        )
    else:
        rig.problems.append("the next call did not raise")
    send(rig, rig.b, names(rig.b))
    rig.equal(rig.b, "after a full sync")


# -- the twelve consequences ---------------------------------------------------------------------------------------


@scenario
def consequence_01_no_begin_no_end(rig: Rig) -> None:
    """q, k, v and their biases one by one, in any order, and split over buckets."""
    send(rig, rig.b, shuffled(rig.b))
    rig.equal(rig.b, "one tensor a call, shuffled")
    order = sorted(
        names(rig.a), key=lambda n: (n.rpartition(".")[2], n)
    )  # all biases first, then all weights
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
    send(rig, rig.b, order[:-1])
    rig.llm.reset_prefix_cache()
    rig.require(rig.life().generation == generation, "a cache reset committed")
    send(rig, rig.b, order[-1:])
    prompt = {"prompt_token_ids": [11, 12, 13]}
    rig.llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    rig.require(rig.life().generation == generation + 1, "the next generate did not complete the update")
    rig.equal(rig.b, "after generate")


@scenario
def consequence_03_processing_is_the_end_mark(rig: Rig) -> None:
    """Module-level processing, imported when called, commits at once; a second one changes nothing."""
    generation = rig.life().generation
    send(rig, rig.b, shuffled(rig.b))
    rig.worker._nemo_process()
    rig.require(rig.life().session is None, "the session is still open after the end mark")
    rig.require(rig.report().outcome == "committed", f"outcome {rig.report().outcome}")
    rig.worker._nemo_process()
    rig.require(rig.life().generation == generation + 1, "not exactly one generation was committed")
    rig.equal(rig.b, "after the end mark")


@scenario
def consequence_03_the_end_mark_refuses_half_a_layer(rig: Rig) -> None:
    """An end mark on half a layer raises, and A serves exactly."""
    first, _ = halves(rig)
    send(rig, rig.b, first)
    try:
        rig.worker._nemo_process()
    except Exception as error:  # noqa: BLE001 - its type is checked
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
    rig.require(
        layerwise.get_numel_loaded.__name__ == "_skyrl_get_numel_loaded", "the client's replacement is gone"
    )
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
    send(rig, rig.b, [n for n in names(rig.b) if "embed_tokens" in n])
    head, embedding = rig.model.lm_head.weight, rig.model.model.embed_tokens.weight
    rig.require(head.data_ptr() == embedding.data_ptr(), "the tie is broken while a session is open")
    send(rig, rig.b, [n for n in names(rig.b) if "embed_tokens" not in n])
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
    trained = variant(rig, "float32", lambda name, a, b: b.float() * 1.0009765 + 1e-4)
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
    first, rest = halves(rig)
    send(rig, rig.b, first)
    for name, parameter in rig.model.named_parameters():
        loader = getattr(parameter, "weight_loader", None)
        if loader is not None and facts.get(name, (0, 0, 0, None))[3] is not None:
            rig.require(
                id(_owner(parameter)) in modules, f"{name}: weight_loader.__self__ is lost in a session"
            )
    send(rig, rig.b, rest)
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
    for part in chunks(shuffled(rig.b), 5):
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
def consequence_08_kernel_format_into_live_parameters(rig: Rig) -> None:
    """SkyRL, kernel format: `get_parameter(n).copy_` with neither begin nor end, where the live layout allows."""
    wanted = [n for n in names(rig.b) if n.endswith(("norm.weight", "layernorm.weight"))]
    mixed = variant(rig, "norms", lambda name, a, b: b if name in wanted else a)
    rig.want.setdefault(mixed, oracle.cold(mixed))
    with torch.no_grad():
        for name, tensor in read(rig.b, wanted):
            rig.model.get_parameter(name).copy_(tensor)
    rig.equal(mixed, "norms written into the live parameters")
    send(rig, rig.b, names(rig.b))
    rig.equal(rig.b, "a full sync afterwards")


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
