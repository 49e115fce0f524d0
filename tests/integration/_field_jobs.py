# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in the field, done to a real engine: one function a row of the table, run in a child process.

    python tests/integration/_field_jobs.py --job qwen2 --rows wrong_shape,empty
    python tests/integration/_field_jobs.py --job awq --weightlife off      # what stock does with the same

Every row ends with the engine serving one of its two checkpoints exactly, or it is reported as wrong. Before a
row the engine is exact, so "the old weights still serve" is measured against the cold load of the checkpoint
that served, and "the next update is exact" against the cold load of the other one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

from tests.integration import _hostile_rows  # noqa: E402 - found by the line above, however this is run

Weights = list[tuple[str, Any]]


class Interrupted(Exception):
    """Raised by a sender's iterator; must come back unchanged."""


class Listener(logging.Handler):
    """Collects what vLLM and weightlife log at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.name}: {record.getMessage()}")


@dataclass
class Bench:
    """An engine, its two checkpoints and what is known to be right for each."""

    llm: Any
    folders: Any
    want: dict[str, Any]
    served: str = "a"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    listener: Listener = field(default_factory=Listener)
    first_warnings: set[str] = field(default_factory=set)
    checks: int = 0

    # -- the engine --------------------------------------------------------------------------------------------

    @property
    def runner(self) -> Any:
        return self.llm.collective_rpc(lambda worker: worker.model_runner)[0]

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    @property
    def other(self) -> str:
        return "b" if self.served == "a" else "a"

    def folder(self, side: str) -> Path:
        return Path(getattr(self.folders, side))

    def tensors(self, side: str = "") -> Weights:
        """All tensors of a checkpoint (default: the one that does not serve), fresh objects in file order."""
        from weightlife.testing import checkpoints

        return list(checkpoints.tensors(self.folder(side or self.other)).items())

    def send(self, weights: Iterable[tuple[str, Any]], **more: Any) -> None:
        self.runner.reload_weights(weights_iterator=iter(weights), **more)

    def way(self, name: str) -> None:
        """The other checkpoint, by a way of `ways`."""
        from ways import WAYS

        WAYS[name].run(self.llm, self.folder(self.other), self.folder(self.served))

    def layerwise(self, *buckets: Weights) -> None:
        """The host's own begin and end round some buckets."""
        self.llm.collective_rpc("weightlife_test_layerwise_start")
        for bucket in buckets:
            self.model.load_weights(bucket)
        self.llm.collective_rpc("weightlife_test_layerwise_finish")

    # -- verdicts ----------------------------------------------------------------------------------------------

    def require(self, condition: object, message: str) -> None:
        if not condition:
            self.problems.append(message)

    def serves(self, side: str, context: str) -> bool:
        """Whether tokens, top-20 log-probabilities and every reachable tensor are those of a cold load."""
        from weightlife.testing import oracle

        self.checks += 1
        found = oracle.differences(oracle.fingerprint(self.llm), self.want[side])
        if found:
            self.problems.append(
                f"{context}: {len(found)} differences from a cold load: {'; '.join(found[:3])}"
            )
        return not found

    def answers(self, side: str, context: str, reset: bool = False) -> bool:
        """Whether tokens and log-probabilities are right, whatever the module tree holds.

        Without `reset` the prefix cache is left as it is.
        """
        from weightlife.testing import oracle

        self.checks += 1
        got = oracle.fingerprint(self.llm if reset else _KeepsCache(self.llm))
        found = oracle.differences({**got, "ranks": []}, {**self.want[side], "ranks": []})
        if found:
            self.notes.append(f"{context}: {'; '.join(found[:2])}")
        return not found

    def updated(self, change: Callable[[], None], context: str) -> None:
        """`change` must make the other checkpoint serve, exactly."""
        change()
        self.serves(self.other, context)
        self.served = self.other

    def update(self, context: str, way: str = "iterator") -> None:
        """A complete valid update."""
        self.updated(lambda: self.way(way), f"{context}, then a complete update ({way})")

    def refused(
        self, change: Callable[[], None], expected: Sequence[str], context: str, *tensors: str
    ) -> Any:
        """`change` must raise one of the named classes, name the tensors, and leave what served serving.

        `expected` holds names of classes in `weightlife.errors`, or of exceptions defined here (which must come
        back unchanged).
        """
        error: BaseException | None = None
        try:
            change()
        except Exception as caught:  # noqa: BLE001 - what was raised is the verdict
            error = caught
        if error is None:
            self.problems.append(f"{context}: accepted, nothing was raised")
        else:
            self.notes.append(f"{context}: {type(error).__name__}: {str(error)[:300]}")
            self.require(
                _is_one_of(error, expected), f"{context}: raised {_shown(error)}, expected {list(expected)}"
            )
            for name in tensors:
                named = name in getattr(error, "tensors", ()) or name in str(error)
                self.require(named, f"{context}: the error does not name {name}: {_shown(error)}")
        self.serves(self.served, f"{context}: old weights")
        return error


class _KeepsCache:
    """An engine whose prefix cache the oracle cannot reset."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def reset_prefix_cache(self) -> bool:
        return True


def _is_one_of(error: BaseException, expected: Sequence[str]) -> bool:
    from weightlife import errors

    classes = [getattr(errors, name, None) or globals()[name] for name in expected]
    return isinstance(error, tuple(classes))


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}({str(error)[:300]})"


def _split(weights: Weights, count: int) -> list[Weights]:
    size = -(-len(weights) // count)
    return [weights[i : i + size] for i in range(0, len(weights), size)]


def _raising(weights: Weights, after: int) -> Iterator[tuple[str, Any]]:
    yield from weights[:after]
    raise Interrupted("the trainer went away")


def _replace(weights: Weights, name: str, change: Callable[[Any], Any]) -> Weights:
    return [(n, change(t) if n == name else t) for n, t in weights]


def _named(weights: Weights, *parts: str) -> str:
    """The first tensor whose name has all parts."""
    return next(name for name, _ in weights if all(part in name for part in parts))


# -- rows ------------------------------------------------------------------------------------------------------


def by_path(bench: Bench) -> None:
    """A -> B -> A by path."""
    bench.updated(lambda: bench.way("path"), "by path")
    bench.updated(lambda: bench.way("path"), "back by path")


def by_iterator(bench: Bench) -> None:
    """A -> B -> A by iterator."""
    bench.updated(lambda: bench.way("iterator"), "by iterator")
    bench.updated(lambda: bench.way("iterator"), "back by iterator")


def transfer_session(bench: Bench) -> None:
    """A weight-transfer session in five shuffled buckets; one that fails half way; a correct one after it."""
    bench.updated(lambda: bench.way("transfer"), "five shuffled buckets")
    names = [name for name, _ in bench.tensors()]

    def fails() -> None:
        bench.llm.collective_rpc("start_weight_update")
        for bucket in (names[: len(names) // 2], ["no such tensor"]):
            info = {"folder": str(bench.folder(bench.other)), "names": bucket}
            bench.llm.collective_rpc("update_weights", kwargs={"update_info": info})

    raised = False
    try:
        fails()
    except Exception as error:  # noqa: BLE001 - the transfer engine's own exception
        raised = True
        bench.require(isinstance(error, KeyError), f"the engine's KeyError came back as {_shown(error)}")
    bench.require(raised, "a failing bucket raised nothing")
    bench.serves(bench.served, "after a failed bucket: old weights")
    bench.update("after a failed transfer session", "transfer")


def reload_per_bucket(bench: Bench) -> None:
    """One `reload_weights` per bucket, four buckets that split fused layers."""
    for number, bucket in enumerate(_split(bench.tensors(), 4)):
        bench.refused(lambda b=bucket: bench.send(b), ["MissingTensorError"], f"bucket {number}")
    bench.update("after four refused buckets")


def raw_load_weights(bench: Bench) -> None:
    """Bare `model.load_weights(...)` after the load: one tensor a call, then everything in one call."""
    bench.updated(lambda: bench.way("bare_one_by_one"), "one tensor a call")
    bench.updated(lambda: bench.model.load_weights(bench.tensors()), "one call")
    bench.updated(lambda: bench.way("bare_shuffled"), "five shuffled buckets")


def fails_then_valid(bench: Bench) -> None:
    """An update that fails, by each way, then a complete valid stream."""
    weights = bench.tensors()
    for after in (1, len(weights) // 2, len(weights)):
        context = f"reload that fails after {after} of {len(weights)} tensors"
        bench.refused(lambda n=after: bench.send(_raising(weights, n)), ["Interrupted"], context)
    bench.update("after failed reloads")
    weights = bench.tensors()
    half = len(weights) // 2

    def bare() -> None:
        bench.model.load_weights(weights[: half // 2])
        bench.model.load_weights(_raising(weights[half // 2 :], half))

    bench.refused(bare, ["Interrupted"], "bare load_weights that fails half way")
    bench.update("after a failed bare load", "bare_shuffled")
    weights = bench.tensors()

    def layerwise() -> None:
        bench.llm.collective_rpc("weightlife_test_layerwise_start")
        bench.model.load_weights(_raising(weights, half))

    bench.refused(layerwise, ["Interrupted"], "start, then a chunk that fails")
    bench.refused(
        lambda: bench.llm.collective_rpc("weightlife_test_layerwise_finish"),
        ["SessionStateError"],
        "a finish after the failure",
    )
    bench.update("after a failed start/finish update", "layerwise_direct")


def wrong_shape(bench: Bench) -> None:
    """A tensor of another shape in mid-stream, then a clean reload."""
    weights = bench.tensors()
    targets = (
        _named(weights, "layers.1.", "q_proj.", "weight"),
        _named(weights, "layers.1.", "down_proj.", "weight"),
        _named(weights, "layers.1.", "input_layernorm.weight"),
    )
    for name in targets:
        for what, change in (
            ("a row short", lambda t: t[:-1].clone()),
            ("one element", lambda t: t.flatten()[:1]),
        ):
            stream = _replace(weights, name, change)
            context = f"{name} {what}"
            bench.refused(lambda s=stream: bench.send(s), ["ShapeMismatchError"], context, name)
    bench.update("after wrong shapes", "path")
    weights = bench.tensors()
    stream = _replace(weights, targets[0], lambda t: t[:-1].clone())
    bench.refused(
        lambda: bench.model.load_weights(stream), ["ShapeMismatchError"], "bare load_weights", targets[0]
    )
    bench.update("after a wrong shape in a bare load", "bare_one_by_one")


def iterator_raises(bench: Bench) -> None:
    """The source raises while requests are in flight: they go on, and answer as if nothing had happened."""
    want = _in_flight(bench, lambda: None)
    half = len(bench.tensors()) // 2

    def fails() -> None:
        error = _caught(lambda: bench.send(_raising(bench.tensors(), half)))
        bench.require(isinstance(error, Interrupted), f"the source's exception came back as {error!r}")

    got = _in_flight(bench, fails)
    bench.require(got == want, "requests in flight answered otherwise than without the failed reload")
    bench.serves(bench.served, "old weights")
    bench.require(not bench.llm.llm_engine.has_unfinished_requests(), "the engine kept requests")
    bench.update("after a source that raised")


def _in_flight(bench: Bench, meanwhile: Callable[[], None]) -> list[Any]:
    """Tokens and log-probabilities of two requests, with `meanwhile` called after three of their steps."""
    from vllm import SamplingParams

    bench.llm.reset_prefix_cache()
    engine = bench.llm.llm_engine
    sampling = SamplingParams(temperature=0.0, max_tokens=10, logprobs=5, ignore_eos=True)
    for number, prompt in enumerate(([7, 8, 9, 10], list(range(20, 60)))):
        engine.add_request(f"in-flight-{number}", {"prompt_token_ids": prompt}, sampling)
    for _ in range(3):
        engine.step()
    meanwhile()
    done: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answer = output.outputs[0]
                values = [sorted((k, v.logprob) for k, v in place.items()) for place in answer.logprobs]
                done[output.request_id] = (list(answer.token_ids), values)
    return sorted(done.items())


def missing_member(bench: Bench) -> None:
    """A member of a fused layer is missing, by reload, by start/finish, and bare until the rest arrives."""
    weights = bench.tensors()
    for part in ("k_proj.", "up_proj."):
        name = _named(weights, "layers.0.", part, "weight")
        stream = [(n, t) for n, t in weights if n != name]
        bench.refused(lambda s=stream: bench.send(s), ["MissingTensorError"], f"without {name}", name)
    lone = [(n, t) for n, t in weights if "layers.0." in n and "q_proj." in n]
    bench.refused(
        lambda: bench.layerwise(lone),
        ["HalfTouchedLayerError", "MissingTensorError"],
        "q_proj alone, start/finish",
    )
    bench.update("after missing members", "layerwise_direct")
    lone = [(n, t) for n, t in bench.tensors() if "layers.0." in n and "q_proj." in n]
    sent = {n for n, _ in lone}
    bench.model.load_weights(lone)
    # The session stays open, so between batches the module tree shows what is being received: ask, don't look.
    old = bench.answers(bench.served, "q_proj alone, bare, and then a batch", reset=True)
    bench.require(old, "a batch did not run on the old weights while a layer was half received")
    bench.updated(
        lambda: bench.model.load_weights([(n, t) for n, t in bench.tensors() if n not in sent]),
        "the rest, bare",
    )


def duplicate_without_others(bench: Bench) -> None:
    """q_proj twice, k_proj and v_proj not at all: as many elements as expected, and not the right ones."""
    weights = bench.tensors()
    missing = [n for n, _ in weights if "layers.0." in n and ("k_proj." in n or "v_proj." in n)]
    stream: Weights = []
    for name, tensor in weights:
        if name in missing:
            continue
        stream.append((name, tensor))
        if "layers.0." in name and "q_proj." in name:
            stream.append((name, tensor.clone()))
    expected = ["MissingTensorError", "SurplusTensorError"]
    bench.refused(lambda: bench.send(stream), expected, "q_proj twice, k_proj and v_proj missing")
    expected = ["HalfTouchedLayerError", "MissingTensorError", "SurplusTensorError"]
    bench.refused(lambda: bench.layerwise(stream), expected, "the same by start/finish")
    bench.update("after a duplicate in place of others")


def duplicate_first(bench: Bench) -> None:
    """A tensor twice, the duplicate first and with other values, then everything."""
    weights = bench.tensors()
    name = _named(weights, "layers.0.", "q_proj.", "weight")
    stale = next(t for n, t in bench.tensors(bench.served) if n == name)
    stream = [(name, stale), *weights]
    bench.refused(lambda: bench.send(stream), ["SurplusTensorError"], "in one reload", name)
    bench.update("after a duplicate")

    def bare() -> None:
        values = bench.tensors()
        bench.model.load_weights([(name, next(t for n, t in bench.tensors(bench.served) if n == name))])
        bench.model.load_weights(values)

    bench.updated(bare, "bare: a repeat is a new epoch, and the later values win")


def wrong_dtype(bench: Bench) -> None:
    """8-bit floats and integers for a bfloat16 weight."""
    import torch

    weights = bench.tensors()
    name = next((n for n, _ in weights if n.endswith("down_proj.weight") and _floating(weights, n)), "")
    name = name or _named(weights, "layers.1.", "input_layernorm.weight")
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8):
        stream = _replace(weights, name, lambda t, d=dtype: t.to(d))
        bench.refused(lambda s=stream: bench.send(s), ["DtypeMismatchError"], f"{name} as {dtype}", name)
    stream = _replace(weights, name, lambda t: t.to(torch.int8))
    bench.refused(lambda: bench.model.load_weights(stream), ["DtypeMismatchError"], "int8, bare", name)
    bench.update("after wrong dtypes")
    stream = [(n, t.float() if t.dtype is torch.bfloat16 else t) for n, t in bench.tensors()]
    bench.updated(lambda: bench.send(stream), "float32 into bfloat16 is a sender's choice and legal")


def _floating(weights: Weights, name: str) -> bool:
    return bool(dict(weights)[name].is_floating_point())


def _with_nan(weights: Weights, place: int = 3) -> tuple[str, Weights]:
    import torch

    name = next((n for n, t in weights if "k_proj." in n and t.is_floating_point()), weights[0][0])

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.flatten()[place] = float("nan")
        return changed

    return name, _replace(weights, name, change)


def nan_refused(bench: Bench) -> None:
    """`nonfinite="strict"`: NaN or infinity in the stream is refused by name."""
    name, stream = _with_nan(bench.tensors())
    bench.refused(lambda: bench.send(stream), ["NonFiniteError"], "NaN by reload", name)
    bench.refused(lambda: bench.model.load_weights(stream), ["NonFiniteError"], "NaN, bare", name)
    stream = _replace(bench.tensors(), name, lambda t: t.clone().fill_(float("inf")))
    bench.refused(lambda: bench.send(stream), ["NonFiniteError"], "infinity by reload", name)
    bench.update("after non-finite values")


def nan_episode(bench: Bench) -> None:
    """NaN under the default settings: refused, or good weights after it are exact again at once.

    Without care the key-value cache keeps the NaN, and masked slots of a block that is used again spread it.
    """
    name, stream = _with_nan(bench.tensors())
    error = _caught(lambda: bench.send(stream))
    if error is None:
        _run_once(bench)
        bench.served = bench.other
    else:
        bench.require(_is_one_of(error, ["NonFiniteError"]), f"NaN by default: {_shown(error)}")
        bench.require(name in str(error), f"the error does not name {name}")
        bench.serves(bench.served, "NaN refused by default: old weights")
    bench.update("after a NaN episode", "path")
    bench.update("and once more", "bare_shuffled")


def _run_once(bench: Bench) -> None:
    from vllm import SamplingParams

    from weightlife.testing import oracle

    prompts = [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS]
    bench.llm.generate(
        prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False
    )


def empty(bench: Bench) -> None:
    """Nothing arrives: by reload, by start/finish, and bare (where the client's next call is told)."""
    bench.refused(lambda: bench.send([]), ["EmptyUpdateError"], "empty iterator")
    bench.refused(lambda: bench.layerwise(), ["EmptyUpdateError"], "start, finish")
    bench.refused(lambda: bench.layerwise([], []), ["EmptyUpdateError"], "start, two empty chunks, finish")
    bench.update("after empty updates")
    bench.model.load_weights([])
    bench.serves(bench.served, "an empty bare call and a batch: old weights")
    bench.refused(
        lambda: bench.model.load_weights(bench.tensors()),
        ["SessionFailedError"],
        "the next call after an empty one",
    )
    bench.update("after the client was told", "bare_one_by_one")


def two_threads(bench: Bench) -> None:
    """Two threads reload at once: one wins, the other is refused by name and changes nothing."""
    inside, release = threading.Event(), threading.Event()
    failure: list[BaseException] = []
    weights = bench.tensors()

    def slow() -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(weights):
            if number == len(weights) // 2:
                inside.set()
                release.wait(30)
            yield item

    def first() -> None:
        try:
            bench.send(slow())
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            failure.append(error)
            inside.set()

    config = bench.runner.vllm_config.model_config
    before = config.model
    thread = threading.Thread(target=first, name="first-owner")
    thread.start()
    try:
        bench.require(inside.wait(30), "the first reload never began")
        for what, second in (
            ("a reload by path", lambda: bench.way("path")),
            ("a reload by iterator", lambda: bench.send(bench.tensors(bench.served))),
            ("a bare load", lambda: bench.model.load_weights(bench.tensors(bench.served))),
            ("a start", lambda: bench.llm.collective_rpc("weightlife_test_layerwise_start")),
        ):
            error = _caught(second)
            bench.require(_is_conflict(error), f"{what} beside an open reload: {error and _shown(error)}")
            bench.notes.append(f"{what}: {error and _shown(error)}")
        bench.require(
            "first-owner" in str(_caught(lambda: bench.way("path"))), "the first owner is not named"
        )
        bench.require(
            config.model == before, f"a refused reload moved the configured model to {config.model}"
        )
    finally:
        release.set()
        thread.join(60)
    bench.require(not failure, f"the first reload failed: {failure and _shown(failure[0])}")
    bench.serves(bench.other, "the first reload")
    bench.served = bench.other
    bench.update("after a conflict", "path")


def reload_in_reload(bench: Bench) -> None:
    """A reload from inside a reload's iterator: refused, and the outer one goes on or fails as its sender likes."""
    half = len(bench.tensors()) // 2
    inner: list[BaseException | None] = []

    def nested(swallow: bool, how: Callable[[], None]) -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(bench.tensors()):
            if number == half:
                if not swallow:
                    how()
                inner.append(_caught(how))
            yield item

    ways: Mapping[str, Callable[[], None]] = {
        "by iterator": lambda: bench.send(bench.tensors(bench.served)),
        "by path": lambda: bench.runner.reload_weights(weights_path=str(bench.folder(bench.served))),
        "start": lambda: bench.llm.collective_rpc("weightlife_test_layerwise_start"),
    }
    for name, how in ways.items():
        context = f"an inner reload ({name}) that is not caught"
        bench.refused(lambda h=how: bench.send(nested(False, h)), ["SessionConflictError"], context)
    for name, how in ways.items():
        inner.clear()
        bench.updated(lambda h=how: bench.send(nested(True, h)), f"an inner reload ({name}) that is caught")
        bench.require(
            inner and _is_conflict(inner[0]),
            f"inner reload ({name}): {inner and inner[0] and _shown(inner[0])}",
        )
    bench.update("after inner reloads", "path")


def source_reads_model(bench: Bench) -> None:
    """A source that reads the parameters while they are being replaced: refused, or it sees what serves."""
    import torch

    before = {name: parameter.detach().clone() for name, parameter in bench.model.named_parameters()}
    wrong: list[str] = []

    def source() -> Iterator[tuple[str, Any]]:
        for number, item in enumerate(bench.tensors()):
            if number % 9 == 0:
                for name, parameter in bench.model.named_parameters():
                    old = before.get(name)
                    if old is None or old.shape != parameter.shape or not torch.equal(old, parameter):
                        wrong.append(name)
            yield item

    error = _caught(lambda: bench.send(source()))
    if error is None:
        bench.require(
            not wrong, f"{len(wrong)} reads saw something else than what serves: {sorted(set(wrong))[:3]}"
        )
        bench.served = bench.other
    else:
        bench.notes.append(_shown(error))
        bench.require(
            _is_one_of(error, ["SessionStateError"]), f"a source that reads the model: {_shown(error)}"
        )
    bench.serves(bench.served, "after a source that reads the model")
    bench.update("after it", "path")


def _caught(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what was raised is the verdict
        return error
    return None


def _is_conflict(error: BaseException | None) -> bool:
    from weightlife import errors

    return isinstance(error, errors.SessionConflictError)


def processing_twice(bench: Bench) -> None:
    """`process_weights_after_loading` on a model that is processed, twice; then an update, then once more."""
    for _ in range(2):
        bench.llm.collective_rpc("weightlife_test_process")
    bench.serves(bench.served, "after two more passes of processing")
    bench.update("after more passes of processing")
    bench.llm.collective_rpc("weightlife_test_process")
    bench.serves(bench.served, "processing once more after an update")
    bench.update("after all that", "bare_processed")
    bench.update("and back", "path")


def kernel_format(bench: Bench) -> None:
    """`is_checkpoint_format=False`: exact where a layer's parameters are all it has, else refused by layer."""
    bench.update("to see the other checkpoint's parameters")
    stream = [(n, p.detach().clone()) for n, p in bench.model.named_parameters()]
    bench.update("and back")
    rebuilt = _report(bench).layers_by_strategy.get("rebuild", 0)
    if rebuilt:
        change = lambda: bench.send(stream, is_checkpoint_format=False)  # noqa: E731
        error = bench.refused(change, ["RefusedLayerError"], f"kernel format with {rebuilt} rebuilt layers")
        bench.require(getattr(error, "layer", ""), "the refusal names no layer")
    else:
        bench.updated(lambda: bench.send(stream, is_checkpoint_format=False), "kernel format")
    bench.update("after kernel format")


def _report(bench: Bench) -> Any:
    import weightlife

    return weightlife.last_report(bench.model)


def prefix_cache(bench: Bench) -> None:
    """The same prompts after an update, by a client that forgets to reset the prefix cache.

    Right is: old key-value blocks do not answer for new weights, or the report says that caches were left.
    """
    for way in ("path", "layerwise_direct", "bare_shuffled"):
        bench.serves(bench.served, f"{way}: before")  # fills the cache with blocks of what serves
        bench.way(way)
        exact = bench.answers(bench.other, f"{way}, prefix cache not reset by the client")
        said = [note for note in _report(bench).notes if "cache" in note]
        bench.require(
            exact or said, f"{way}: old key-value blocks answered and the report does not mention caches"
        )
        bench.serves(bench.other, f"{way}: after a reset")
        bench.served = bench.other


def no_false_warning(bench: Bench) -> None:
    """Good updates by every way: no warning that the cold load did not give too, so that one is a signal."""
    for way in ("path", "iterator", "transfer", "bare_one_by_one", "layerwise_direct", "bare_processed"):
        bench.listener.lines.clear()
        bench.update("", way)
        lines = sorted(set(bench.listener.lines) - bench.first_warnings)
        bench.require(not lines, f"{way}: a good update logged {len(lines)} warnings: {lines[:2]}")


def dummy_by_iterator(bench: Bench) -> None:
    """`load_format="dummy"`, then a reload by iterator, how RL starts."""
    bench.served = "b"
    bench.updated(lambda: bench.way("iterator"), "first real weights by iterator")
    bench.updated(lambda: bench.way("iterator"), "the next update by iterator")
    bench.update("and then", "bare_shuffled")


def dummy_by_path(bench: Bench) -> None:
    """`load_format="dummy"`, then a reload by path: loaded, or refused in clear words with nothing touched."""
    from weightlife import errors
    from weightlife.testing import oracle

    before = oracle.fingerprint(bench.llm)
    bench.checks += 1
    try:
        bench.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(bench.folder("a"))})
    except Exception as error:  # noqa: BLE001 - what was raised is the verdict
        bench.notes.append(f"by path: {_shown(error)}")
        clear = isinstance(error, errors.WeightlifeError) or (
            isinstance(error, NotImplementedError) and "dummy" in str(error)
        )
        bench.require(clear, f"by path after a dummy load: {_shown(error)}")
        found = oracle.differences(oracle.fingerprint(bench.llm), before)
        bench.require(not found, f"a refused reload by path changed the engine: {found[:2]}")
        return
    bench.serves("a", "by path")


ROWS: Final[Mapping[str, Callable[[Bench], None]]] = {
    row.__name__: row
    for row in (
        by_path, by_iterator, transfer_session, reload_per_bucket, raw_load_weights, fails_then_valid, wrong_shape,
        iterator_raises, missing_member, duplicate_without_others, duplicate_first, wrong_dtype, nan_refused,
        nan_episode, empty, two_threads, reload_in_reload, source_reads_model, processing_twice, kernel_format,
        prefix_cache, no_false_warning, dummy_by_path, dummy_by_iterator, *_hostile_rows.ROWS.values(),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One engine and the rows that are run on it.

    Attributes:
        family: of `weightlife.testing.checkpoints`.
        rows: in this order.
        start: "a", or "dummy".
        settings: of `weightlife.install`, beside `storage="pinned"`.
        engine: arguments of `LLM` that matter for the answer.
    """

    family: str
    rows: tuple[str, ...]
    start: str = "a"
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


_BOTH = ("by_path", "by_iterator")
_FAULTS = (
    "transfer_session", "reload_per_bucket", "raw_load_weights", "fails_then_valid", "wrong_shape", "iterator_raises",
    "missing_member", "duplicate_without_others", "duplicate_first", "wrong_dtype", "empty", "two_threads",
    "reload_in_reload", "source_reads_model", "processing_twice", "kernel_format", "prefix_cache", "no_false_warning",
)  # fmt: skip
_HOSTILE = tuple(_hostile_rows.ROWS)
_REST = ("processing_twice", "no_false_warning")

JOBS: Final[Mapping[str, Job]] = {
    "qwen2": Job("qwen2", (*_BOTH, *_FAULTS)),
    "awq": Job("awq", (*_BOTH, *_FAULTS)),
    "qwen2-nonfinite": Job("qwen2", ("nan_refused",), settings={"nonfinite": "strict"}),
    "qwen2-episode": Job("qwen2", ("nan_episode",)),
    "llama": Job("llama", (*_BOTH, *_REST)),
    "deepseek_dense": Job("deepseek_dense", (*_BOTH, *_REST)),
    "mamba2": Job("mamba2", (*_BOTH, *_REST)),
    "gptq": Job("gptq", (*_BOTH, *_REST)),
    "qwen2tied": Job("qwen2tied", (*_BOTH, "raw_load_weights", *_REST)),
    "qwen2tied-compiled": Job("qwen2tied", _BOTH, engine={"enforce_eager": False}),
    "mixtral": Job(
        "mixtral", (*_BOTH, "raw_load_weights", *_REST, *(r for r in _HOSTILE if r != "odd_tensors"))
    ),
    "gpt_oss": Job("gpt_oss", (*_BOTH, "raw_load_weights", *_REST)),
    "w8a8dyn": Job(
        "w8a8dyn", (*_BOTH, "raw_load_weights", *_REST, "odd_tensors", "changed_between", "hooks_that_load")
    ),
    "w8a8static": Job("w8a8static", (*_BOTH, "raw_load_weights", *_REST)),
    **{
        f"{family}-dummy": Job(family, ("dummy_by_path", "dummy_by_iterator"), start="dummy")
        for family in ("qwen2", "awq", "qwen2tied", "mixtral", "gpt_oss", "w8a8dyn", "w8a8static")
    },
}


# -- the child -------------------------------------------------------------------------------------------------


def execute(name: str, rows: list[str], root: str, weightlife: bool) -> dict[str, Any]:
    """Run rows in this process until one leaves the engine wrong; verdicts by row, plain data."""
    from weightlife.testing import checkpoints, oracle

    job = JOBS[name]
    folders = checkpoints.pair(job.family, Path(root))
    want = {side: oracle.cold(getattr(folders, side), **job.engine) for side in ("a", "b")}
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    if weightlife:
        import weightlife as product

        product.install(**{"storage": "pinned", **job.settings})
    bench = _start(job, folders, want)
    verdicts: dict[str, Any] = {}
    for row in rows:
        _progress(verdicts, row)
        began = time.monotonic()
        bench.problems, bench.notes, bench.checks = [], [], 0
        try:
            ROWS[row](bench)
        except Exception as error:  # noqa: BLE001 - a verdict like any other
            traceback.print_exc()
            bench.problems.append(f"raised {_shown(error)}")
        seconds = round(time.monotonic() - began, 2)
        problems = bench.problems
        verdicts[row] = {
            "problems": problems,
            "notes": bench.notes,
            "seconds": seconds,
            "checks": bench.checks,
        }
        if problems and not _recovered(bench):
            break
    _progress(verdicts, "")
    return {"rows": verdicts}


def _start(job: Job, folders: Any, want: dict[str, Any]) -> Bench:
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from weightlife.testing import _cold, oracle, transfer

    more: dict[str, Any] = dict(job.engine)
    if job.start == "dummy":
        more["load_format"] = "dummy"
    more["weight_transfer_config"] = WeightTransferConfig(backend=transfer.BACKEND)
    listener = Listener()
    for logger in ("vllm", "weightlife"):
        logging.getLogger(logger).addHandler(listener)
    llm = LLM(**oracle.engine_arguments(folders.a, **more))
    _cold.KEEP.append(llm)
    return Bench(llm, folders, want, listener=listener, first_warnings=set(listener.lines))


def _recovered(bench: Bench) -> bool:
    """Whether the engine serves A exactly after a plain reload: the next row may use it."""
    bench.problems = []
    try:
        bench.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(bench.folder("a"))})
        bench.served = "a"
        return bench.serves("a", "recovery")
    except Exception:  # noqa: BLE001 - the next row gets another process
        traceback.print_exc()
        return False


def _progress(verdicts: dict[str, Any], running: str) -> None:
    scratch = os.environ.get("WEIGHTLIFE_TEST_SCRATCH")
    if scratch:
        (Path(scratch) / "progress").write_text(json.dumps({"rows": verdicts, "running": running}))


# -- the parent ------------------------------------------------------------------------------------------------


def run(
    name: str,
    root: Path,
    cache: Path,
    *,
    rows: Sequence[str] = (),
    weightlife: bool = True,
    timeout: float = 240.0,
) -> dict[str, Any]:
    """Verdicts of a job's rows. A row that crashes its process, or leaves the engine wrong, fails alone: the rows
    after it run in another process."""
    from weightlife.testing import _cold, checkpoints, oracle

    job = JOBS[name]
    os.environ["WEIGHTLIFE_TESTING_CACHE"] = str(cache)
    # Two threads that spin at every barrier cost seconds a check when anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for folder in checkpoints.pair(job.family, root):
        oracle.cold(folder, **job.engine)
    left = list(rows or job.rows)
    verdicts: dict[str, Any] = {}
    while left:
        order = {
            "call": "_field_jobs:execute",
            "path": [str(HERE)],
            "arguments": {"name": name, "rows": left, "root": str(root), "weightlife": weightlife},
            "environment": {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "WEIGHTLIFE_TESTING_CACHE": str(cache),
                **({} if weightlife else {"WEIGHTLIFE": "0"}),
            },
        }
        try:
            answer = _cold.run(order, fresh=_cold.needs_fresh(dict(job.engine), {}), timeout=timeout)
        except _cold.JobError as error:
            answer = error.progress or {"rows": {}, "running": ""}
            row = answer["running"] or left[0]
            problem = f"the process ended with {error.how}\n{error.output[-3000:]}"
            answer["rows"][row] = {"problems": [problem], "notes": [], "seconds": 0.0, "checks": 0}
        verdicts.update(answer["rows"])
        left = [row for row in left if row not in verdicts]
    return verdicts


def main() -> int:
    """The command line; 1 when a row was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", default="all", help=f"names with commas, of {', '.join(JOBS)}")
    parser.add_argument("--rows", default="", help="names with commas; default: all rows of the job")
    parser.add_argument("--weightlife", choices=("on", "off"), default="on")
    parser.add_argument("--notes", action="store_true", help="show what was raised")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(
        ":"
    )
    wrong = 0
    for name in JOBS if options.job == "all" else options.job.split(","):
        began = time.monotonic()
        verdicts = run(
            name,
            REPOSITORY / ".artifacts" / "checkpoints",
            REPOSITORY / ".artifacts" / "oracle",
            rows=[row for row in options.rows.split(",") if row],
            weightlife=options.weightlife == "on",
        )
        print(f"{name} ({time.monotonic() - began:.1f} s)", flush=True)
        for row, verdict in verdicts.items():
            wrong += bool(verdict["problems"])
            state = "WRONG" if verdict["problems"] else "right"
            print(f"  {state} {row:<26} {verdict['seconds']:6.2f} s, {verdict['checks']} checks")
            for line in verdict["problems"][:6]:
                print(f"          - {line}")
            for line in verdict["notes"] if options.notes else ():
                print(f"          . {line}")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
