# SPDX-License-Identifier: Apache-2.0
"""The lifecycle: who may enter, what "complete" demands, what a pass meets, and random programs of all of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from tests.strategies import specs
from tests.toyhost import (
    INPUT,
    KINDS,
    Boom,
    Layer,
    Served,
    Snapshot,
    ToyHost,
    ToyModel,
    chunks,
    cold,
    faults,
    parameter,
    pick,
    process_all,
    unchanged,
)
from weightlife import errors
from weightlife._engine import guard, lifecycle
from weightlife._engine.events import Event, bus
from weightlife._engine.guard import Pass
from weightlife._engine.lifecycle import Lifecycle, OpenSessions
from weightlife._engine.session import State
from weightlife.config import Settings

STORAGES = ("pinned", "adopted")
EVERYTHING = (*sorted(KINDS), ("packed", "tied"))


class TestFirstLoad:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_changes_nothing(self, kind: str) -> None:
        served = Served((kind,))
        plain = cold((kind,), served.weights)
        assert torch.equal(served.model(INPUT), plain(INPUT))
        assert [n for n, _ in served.model.named_parameters()] == [n for n, _ in plain.named_parameters()]

    def test_in_chunks(self) -> None:
        model = ToyModel(EVERYTHING)
        life = Lifecycle(model, ToyHost(model), Settings())
        weights = Served(EVERYTHING).weights
        for part in chunks(weights, 4):
            life.load_weights(model.load_weights, iter(part.items()))
        assert life.first is not None
        life.first.process(lambda: process_all(model))
        assert set(life.manifest.names) == set(weights)
        assert torch.equal(model(INPUT), cold(EVERYTHING, weights)(INPUT))

    def test_report(self) -> None:
        served = Served(("packed", "dense"))
        report = served.life.reports[-1]
        assert (report.operation, report.outcome, report.generation) == ("first_load", "committed", 0)
        assert (report.tensors_received, report.bytes_received) == (3, 4 * (16 + 16 + 4))
        assert [phase.name for phase in report.phases] == ["receive", "process"]

    def test_exceptions_come_out_as_they_are_and_a_retry_is_exact(self) -> None:
        model = ToyModel(("packed", "fused"))
        life = Lifecycle(model, ToyHost(model), Settings())
        weights = Served(("packed", "fused")).weights
        faults.arm("write", 2)
        with pytest.raises(Boom):
            life.load_weights(model.load_weights, iter(weights.items()))
        life.load_weights(model.load_weights, iter(weights.items()))
        assert life.first is not None
        life.first.process(lambda: process_all(model))
        assert torch.equal(model(INPUT), cold(("packed", "fused"), weights)(INPUT))

    def test_the_context_of_the_first_processing_is_entered_again(self) -> None:
        class Typed(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                assert not torch.is_inference_mode_enabled()
                self.table = torch.zeros(4)  # the default dtype of whoever calls
                self.grad = torch.is_grad_enabled()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight @ x

        class Model(ToyModel):
            def __init__(self) -> None:
                super().__init__(("norm",))
                self.typed = Typed()

        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad():
                served = Served(Model)
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            served.update(served.checkpoint(1))
        assert served.model.typed.table.dtype is torch.float64
        assert served.model.typed.grad is False
        assert torch.get_default_dtype() is torch.float32


class TestDummy:
    def test_the_first_real_load_becomes_the_manifest(self) -> None:
        served = Served(EVERYTHING, provisional=True)
        assert served.life.manifest.provisional
        checkpoint = served.checkpoint(1)
        served.update(checkpoint)
        assert not served.life.manifest.provisional
        assert torch.equal(served.run(), cold(EVERYTHING, checkpoint)(INPUT))
        assert any("dummy" in note for note in served.life.reports[-1].notes)
        for name in checkpoint:
            with unchanged(served.model), pytest.raises(errors.MissingTensorError) as caught:
                served.update({n: v for n, v in checkpoint.items() if n != name})
            assert caught.value.tensors == (name,)

    @pytest.mark.parametrize(
        "more", [{}, {"isolation": "in_place"}, {"isolation": "in_place", "undo_budget_bytes": 0}]
    )
    @pytest.mark.parametrize("kind", ["norm", "padded", "padded_plain", "attention"])
    def test_constants_that_the_dummy_wrote_over_are_the_constructors_again(
        self, kind: str, more: dict[str, Any]
    ) -> None:
        served = Served((kind,), provisional=True, **more)
        with torch.no_grad():
            for value in (*served.model.parameters(), *served.model.buffers()):
                value.fill_(0.25)  # a dummy load writes everything, sentinels too
        checkpoint = served.checkpoint(1)
        served.update(checkpoint)
        assert torch.equal(served.run(), cold((kind,), checkpoint)(INPUT))

    @pytest.mark.parametrize("budget", [None, 0, 1 << 20])
    def test_what_a_dummy_wrote_over_is_written_within_the_undo_budget(self, budget: int | None) -> None:
        """The constructor's values go into memory that serves: in place that is undone, or poisons."""
        served = Served(("norm", "packed"), provisional=True, isolation="in_place", undo_budget_bytes=budget)
        before = Snapshot(served.model)
        faults.arm("hook", 0)
        with pytest.raises(Boom):
            served.update(
                pick(served.checkpoint(1), ["body.inner.1.weight"]), "by_layer"
            )  # of the rebuilt layer
        assert bool(served.life.poisoned) is (budget == 0)
        if budget != 0:
            assert before.differences(Snapshot(served.model)) == []
        new = served.checkpoint(2)
        served.update(new)
        assert torch.equal(served.run(), cold(served.spec, new)(INPUT))

    def test_a_failed_first_real_load_leaves_the_dummy(self) -> None:
        served = Served(("packed", "fused"), provisional=True)
        faults.arm("hook", 0)
        with unchanged(served.model), pytest.raises(Boom):
            served.update(served.checkpoint(1))
        assert served.life.manifest.provisional
        served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())


class TestComplete:
    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_every_single_missing_tensor_is_named(self, kind: str, storage: str) -> None:
        served = Served((kind, "dense"), storage=storage)
        a = Snapshot(served.model)
        checkpoint = served.checkpoint(1)
        for name in checkpoint:
            with pytest.raises(errors.MissingTensorError) as caught:
                served.update({n: v for n, v in checkpoint.items() if n != name})
            assert caught.value.tensors == (name,)
            assert a.differences(Snapshot(served.model)) == []
        served.update(checkpoint)
        assert torch.equal(served.run(), served.expected())

    def test_order_and_bucket_size_do_not_matter(self) -> None:
        import random

        served = Served(EVERYTHING)
        for seed, count in ((1, 1), (2, 3), (3, 100)):
            checkpoint = list(served.checkpoint(seed).items())
            random.Random(seed).shuffle(checkpoint)
            served.open()
            for part in chunks(dict(checkpoint), count):
                served.send(part)
            served.finish()
            served.weights = dict(checkpoint)
            assert torch.equal(served.run(), served.expected())

    def test_a_sender_may_fuse(self) -> None:
        served = Served(("fused", "fused_packed"))
        checkpoint = served.checkpoint(1)
        fused = {
            f"body.inner.{i}.qkv": torch.cat([checkpoint[f"body.inner.{i}.{n}"] for n in "qkv"])
            for i in (0, 1)
        }
        served.open()
        served.send(fused)
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("kind", ["fused", "fused_packed", "dense", "experts"])
    def test_sent_twice_is_surplus(self, kind: str) -> None:
        served = Served((kind,))
        checkpoint = served.checkpoint(1)
        first = next(iter(checkpoint))
        served.open()
        served.send(checkpoint)
        served.send(pick(checkpoint, [first]))
        with unchanged_a(served), pytest.raises(errors.SurplusTensorError) as caught:
            served.finish()
        assert first in caught.value.tensors

    def test_surplus_may_be_allowed(self) -> None:
        served = Served(("packed",), surplus="warn")
        served.open()
        served.send(served.checkpoint(1))
        checkpoint = served.checkpoint(2)
        served.send(checkpoint)
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())
        assert [v.code for v in served.life.reports[-1].violations] == ["WL202"]

    @pytest.mark.parametrize("policy", ["strict", "off"])
    def test_an_empty_update(self, policy: str) -> None:
        served = Served(("packed", "dense"), empty=policy)
        want = served.run()
        served.open("by_layer")
        served.send({})
        if policy == "strict":
            with pytest.raises(errors.EmptyUpdateError):
                served.finish()
        else:
            served.finish()
        assert torch.equal(served.run(), want)

    @pytest.mark.parametrize("kind", ["fused_packed", "packed"])
    def test_a_half_touched_layer_is_refused_without_names(self, kind: str) -> None:
        """Start/finish without names: a layer that is processed arrives whole or not at all."""
        served = Served((kind, "norm"))
        checkpoint = served.checkpoint(1)
        first, *rest = [name for name in checkpoint if name.startswith("body.inner.0.")]
        if not rest:
            return
        with unchanged(served.model), pytest.raises(errors.HalfTouchedLayerError) as caught:
            served.update(pick(checkpoint, [first]), "by_layer")
        assert set(caught.value.tensors) == set(rest)

    @pytest.mark.parametrize("kind", ["fused", "dense"])
    def test_a_direct_layer_is_free_by_layer_and_not_in_a_complete_load(self, kind: str) -> None:
        """What processing leaves alone may be updated tensor by tensor; a complete load demands all of it."""
        served = Served((kind, "norm"))
        checkpoint = served.checkpoint(1)
        first, *rest = [name for name in checkpoint if name.startswith("body.inner.0.")]
        assert rest
        with unchanged(served.model), pytest.raises(errors.MissingTensorError):
            served.update(pick(checkpoint, [first]), "forbid")
        served.update(pick(checkpoint, [first]), "by_layer")
        assert torch.equal(served.run(), served.expected())

    def test_whole_layers_may_be_left_out_without_names(self) -> None:
        served = Served(("fused_packed", "packed", "norm"))
        checkpoint = served.checkpoint(1)
        served.update({n: v for n, v in checkpoint.items() if ".0." in n}, "by_layer")
        assert torch.equal(served.run(), served.expected())
        report = served.life.reports[-1]
        assert report.layers_untouched >= 2
        left_out = [name for name in checkpoint if ".0." not in name]
        assert report.tensors_not_sent == len(left_out)
        assert all(name in report.notes[0] for name in left_out)
        assert f"was not sent (tensors: {len(left_out)})" in str(report)
        assert f"({len(left_out)} not sent)" in report.summary_line()
        served.update(checkpoint, "by_layer")
        assert served.life.reports[-1].tensors_not_sent == 0
        assert "not sent" not in served.life.reports[-1].summary_line()

    def test_a_tensor_of_a_direct_layer_that_is_left_out_is_told(self) -> None:
        """It needs no refusal, and nobody meant it."""
        served = Served(("dense", "packed"))
        checkpoint = served.checkpoint(1)
        served.update(
            {name: value for name, value in checkpoint.items() if not name.endswith("0.bias")}, "by_layer"
        )
        report = served.life.reports[-1]
        assert report.tensors_not_sent == 1
        assert "body.inner.0.bias" in report.notes[0]

    def test_a_tied_layer_is_touched_with_its_partner(self) -> None:
        served = Served(("packed", "tied", "norm"))
        served.update(pick(served.checkpoint(1), ["body.inner.0.weight"]), "by_layer")
        assert torch.equal(served.run(), served.expected())
        touched = {layer.name for layer in served.life.reports[-1].layers if layer.touched}
        assert touched == {"body.inner.0", "body.inner.1"}

    def test_a_model_hook_that_processes_layers_and_a_partial_update(self) -> None:
        """The model's hook doubles every weight in place: an untouched layer must not be doubled again."""

        class Doubling(ToyModel):
            def process(self) -> None:
                super().process()
                for _, layer in self.layers():
                    layer.weight.data.mul_(2.0)

        served = Served(lambda: Doubling(("norm", "norm")))
        before = served.run()
        try:
            served.update(pick(served.checkpoint(1), ["body.inner.0.weight"]), "by_layer")
        except errors.WeightlifeError:
            assert torch.equal(served.run(), before)
        else:
            assert torch.equal(served.run(), served.expected())


class unchanged_a:
    """Generation A, as passes see it, is exactly what it was before the open session."""

    def __init__(self, served: Served) -> None:
        self.served = served
        session = served.life.session
        assert session is not None
        assert session.stage is not None
        session.stage.show_a()
        self.a = Snapshot(served.model)
        session.stage.show_b()

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        assert self.served.life.session is None
        assert self.a.differences(Snapshot(self.served.model)) == []


class TestOnce:
    def test_every_hook_runs_once_and_in_order(self) -> None:
        served = Served(("attention", "packed", "scaled", ("attention", "native")))
        served.update(served.checkpoint(1))
        assert served.host.calls == [
            "before", "layer Packed", "layer Scaled", "layer Native", "deferred Attention", "deferred Attention", "model",
        ]  # fmt: skip

    def test_untouched_layers_are_not_processed_again(self) -> None:
        served = Served(("attention", "packed", "scaled", "dense"))
        served.update({n: v for n, v in served.checkpoint(1).items() if ".2." in n}, "by_layer")
        assert [call for call in served.host.calls if call.startswith(("layer", "deferred"))] == [
            "layer Scaled"
        ]

    def test_a_loader_that_calls_itself_through_super_counts_once(self) -> None:
        served = Served(("packed", "fused"))
        outer = served.model.load_weights

        def reentrant(stream: Any) -> Any:
            return served.life.load_weights(outer, stream)

        checkpoint = served.checkpoint(1)
        served.open()
        served.life.load_weights(reentrant, iter(checkpoint.items()))
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())
        assert served.life.reports[-1].tensors_received == len(checkpoint)


class TestConflict:
    def test_two_owners(self) -> None:
        served = Served(("packed",))
        session = served.open()
        with pytest.raises(errors.SessionConflictError) as caught:
            served.life.open("other", "update", True, "forbid")
        assert "client" in caught.value.message
        assert "other" in caught.value.message
        assert caught.value.session == session.id
        assert served.life.session is session
        served.send(served.checkpoint(1))
        served.finish()

    def test_hand_over_between_threads_is_legal(self) -> None:
        served = Served(("packed", "fused"))
        checkpoint = served.checkpoint(1)
        failures: list[BaseException] = []

        def step(call: Callable[[], Any]) -> None:
            def run() -> None:
                try:
                    call()
                except BaseException as error:  # noqa: BLE001 - told below
                    failures.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        step(served.open)
        for part in chunks(checkpoint, 3):
            step(lambda part=part: served.send(part))
        step(served.finish)
        assert failures == []
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    def test_overlapping_calls_of_two_threads_name_both(self) -> None:
        served = Served(("packed",))
        served.open()
        inside, leave = threading.Event(), threading.Event()

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            inside.set()
            leave.wait(20)
            yield from served.checkpoint(1).items()

        thread = threading.Thread(target=lambda: served.send(slow()), name="first-sender")
        thread.start()
        inside.wait(20)
        try:
            with pytest.raises(errors.SessionConflictError) as caught:
                served.send({})
            assert "first-sender" in caught.value.message
            assert threading.current_thread().name in caught.value.message
        finally:
            leave.set()
            thread.join()
        served.finish()
        served.weights = served.checkpoint(1)
        assert torch.equal(served.run(), served.expected())

    def test_a_session_does_not_outlive_its_calls_in_the_context(self) -> None:
        served = Served(("packed",))
        served.open()
        served.send(served.checkpoint(1))
        assert lifecycle.current.get() is None
        served.finish()
        assert lifecycle.current.get() is None

    def test_two_models_do_not_meet(self) -> None:
        one, other = Served(("packed",)), Served(("packed",))
        one.open()
        other.update(other.checkpoint(1))
        one.send(one.checkpoint(2))
        one.finish()
        one.weights = one.checkpoint(2)
        assert torch.equal(one.run(), one.expected())
        assert torch.equal(other.run(), other.expected())


class TestStates:
    def test_they_follow_each_other(self) -> None:
        served = Served(("packed",))
        session = served.open()
        assert session.state is State.PREPARED
        served.send(served.checkpoint(1))
        assert session.state is State.RECEIVING
        served.finish()
        assert session.state is State.COMMITTED
        with pytest.raises(errors.SessionStateError):
            session.prepare()
        with pytest.raises(errors.SessionStateError):
            session.finish()
        session.abort()  # idempotent: nothing happens
        assert session.state is State.COMMITTED

    def test_finish_without_a_session(self) -> None:
        served = Served(("packed",))
        with pytest.raises(errors.SessionStateError, match="no session is open"):
            served.finish()

    def test_finish_after_a_failure_says_why(self) -> None:
        served = Served(("packed",))
        served.open()
        faults.arm("write", 0)
        with pytest.raises(Boom):
            served.send(served.checkpoint(1))
        with pytest.raises(errors.SessionStateError, match="Boom"):
            served.finish()

    def test_host_refuses(self) -> None:
        served = Served(("packed",))
        served.host.refuse = "asleep"
        with unchanged(served.model), pytest.raises(errors.RefusedLayerError, match="asleep"):
            served.open()
        assert served.life.session is None
        assert served.life.reports[-1].outcome == "refused"
        served.host.refuse = None
        served.update(served.checkpoint(1))

    def test_observed_models_run_the_hosts_own_path(self) -> None:
        model = ToyModel(("packed",))
        host = ToyHost(model)
        host.observe = "online quantisation"
        life = Lifecycle(model, host, Settings())
        weights = Served(("packed",)).weights
        life.load_weights(model.load_weights, iter(weights.items()))
        assert life.status == "observed"
        assert life.first is None
        assert model.body.inner[0].weight.tolist() == weights["body.inner.0.weight"].tolist()


class TestFailures:
    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("kind", ["write", "hook", "model_hook"])
    def test_the_hosts_exception_is_unchanged_a_serves_and_the_next_update_is_exact(
        self, kind, storage
    ) -> None:
        served = Served(EVERYTHING, storage=storage)
        for after in (0, 3) if kind != "model_hook" else (0,):
            faults.arm(kind, after)
            with unchanged(served.model), pytest.raises(Boom) as caught:
                served.update(served.checkpoint(after))
            assert type(caught.value) is Boom
            assert caught.value.__cause__ is None
            assert served.life.reports[-1].outcome == "aborted"
            assert "Boom" in (served.life.reports[-1].error or "")
            assert torch.equal(served.run(), served.expected())
        served.update(served.checkpoint(9))
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
    def test_any_exception_at_all(self, error: type[BaseException]) -> None:
        served = Served(("packed", "fused"))

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(served.checkpoint(1).items())[:2]
            raise error

        served.open()
        with unchanged_a(served), pytest.raises(error):
            served.send(source())
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())

    def test_unknown_names_are_the_loaders_business(self) -> None:
        served = Served(("packed",))
        with unchanged(served.model), pytest.raises(AttributeError):
            served.update({"nowhere.weight": torch.ones(1)})

    def test_host_notes_that_fail_do_not_wedge_the_model(self) -> None:
        """After the commit point: B serves, whatever a bystander raises, and the next update is possible."""
        served = Served(("packed",))
        checkpoint = served.checkpoint(1)
        faults.arm("commit_notes", 0)
        try:
            served.update(checkpoint)
        except Boom:
            served.weights = checkpoint
        assert served.life.session is None
        assert OpenSessions.count == 0
        assert torch.equal(served.run(), served.expected())
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())

    def test_a_listener_that_fails_does_not_matter(self) -> None:
        served = Served(("packed",))

        def listener(event: Event) -> None:
            raise Boom("listener")

        stop = bus.subscribe(listener)
        try:
            served.update(served.checkpoint(1))
        finally:
            stop()
        assert torch.equal(served.run(), served.expected())

    def test_repeated_failures_leave_nothing_behind(self) -> None:
        served = Served(("packed", "native", "fused"))
        served.run()
        gc.collect()
        counts = []
        for _ in range(3):
            faults.arm("model_hook", 0)
            with pytest.raises(Boom):
                served.update(served.checkpoint(1))
            gc.collect()
            counts.append(sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects()))
        assert counts[-1] <= counts[0]


class TestPoison:
    SPEC = ("dense", "fused", "packed")

    def poisoned(self) -> Served:
        served = Served(self.SPEC, isolation="in_place", undo_budget_bytes=0)
        faults.arm("write", 3)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        assert served.life.poisoned
        assert served.life.reports[-1].outcome == "poisoned"
        return served

    def test_a_poisoned_model_refuses_to_run_until_a_complete_update(self) -> None:
        served = self.poisoned()
        for _ in range(2):
            with pytest.raises(errors.PoisonedModelError):
                served.run()
        served.update(served.checkpoint(2))
        assert not served.life.poisoned
        assert torch.equal(served.run(), served.expected())
        assert OpenSessions.count == 0

    @pytest.mark.parametrize("partial", ["by_layer", "allow"])
    def test_a_partial_update_does_not_heal(self, partial: str) -> None:
        served = self.poisoned()
        part = {n: v for n, v in served.checkpoint(2).items() if n.startswith("body.inner.2")}
        with contextlib.suppress(errors.WeightlifeError):
            served.update(part, partial)
        assert served.life.poisoned
        with pytest.raises(errors.PoisonedModelError):
            served.run()

    def test_a_bare_load_does_not_heal_either(self) -> None:
        served = self.poisoned()
        served.send({n: v for n, v in served.checkpoint(2).items() if n.startswith("body.inner.2")})
        with pytest.raises(errors.WeightlifeError):
            served.run()

    def test_a_failed_retry_keeps_it_poisoned_and_the_count_right(self) -> None:
        served = self.poisoned()
        for _ in range(2):
            faults.arm("write", 2)
            with pytest.raises(Boom):
                served.update(served.checkpoint(2))
            with pytest.raises(errors.PoisonedModelError):
                served.run()
        assert OpenSessions.count == 1
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())
        assert OpenSessions.count == 0

    def test_dummy_batches_run_on_a_poisoned_model_without_an_answer(self) -> None:
        served = self.poisoned()
        served.run(Pass.DUMMY)


class TestGuard:
    """The table in DESIGN, section 3."""

    def test_idle_it_runs(self) -> None:
        served = Served(("packed",))
        assert OpenSessions.count == 0
        assert torch.equal(served.run(), served.expected())

    def test_another_models_session_does_not_matter(self) -> None:
        served, other = Served(("packed",)), Served(("packed",))
        other.open()
        assert torch.equal(served.run(), served.expected())
        other.life.abort()

    @pytest.mark.parametrize("storage", STORAGES)
    def test_an_explicit_session_staged_runs_on_a(self, storage: str) -> None:
        served = Served(EVERYTHING, storage=storage)
        served.open()
        served.send(served.checkpoint(1))
        for kind in Pass:
            assert torch.equal(served.run(kind), served.expected())
        assert served.life.session is not None
        served.finish()

    def test_an_explicit_session_in_place_is_refused(self) -> None:
        served = Served(("packed", "dense"), isolation="in_place")
        served.open()
        with pytest.raises(errors.EngineNotPausedError):
            served.run()
        served.run(Pass.DUMMY)
        checkpoint = served.checkpoint(1)
        served.send(checkpoint)
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("isolation", ["staged", "in_place"])
    @pytest.mark.parametrize("storage", STORAGES)
    def test_an_implicit_session_whose_layers_are_whole_is_committed_by_the_next_batch(
        self, storage, isolation
    ):
        served = Served(EVERYTHING, storage=storage, isolation=isolation)
        checkpoint = served.checkpoint(1)
        for item in checkpoint.items():
            served.send(dict([item]))
        served.run(Pass.DUMMY)
        assert served.life.session is not None
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())
        assert served.life.session is None
        assert served.life.reports[-1].operation == "implicit"

    def test_an_implicit_session_half_touched_staged_runs_on_a_and_stays_open(self, caplog) -> None:
        served = Served(("fused_packed", "dense"))
        checkpoint = served.checkpoint(1)
        served.send(pick(checkpoint, ["body.inner.0.q"]))
        with caplog.at_level("WARNING", "weightlife"):
            for _ in range(3):
                assert torch.equal(served.run(), served.expected())
        assert served.life.session is not None
        assert len([r for r in caplog.records if "not complete" in r.message]) == 1
        served.send({n: v for n, v in checkpoint.items() if n != "body.inner.0.q"})
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())
        assert served.life.session is None
        report = served.life.reports[-1]
        assert report.outcome == "committed"
        (note,) = (note for note in report.notes if "ran on the old weights" in note)
        assert "body.inner.0.k" in note  # what it waited for

    def test_past_its_patience_it_is_dropped_and_the_clients_next_call_raises(self) -> None:
        served = Served(("fused_packed", "dense"), implicit_patience=2)
        a = Snapshot(served.model)
        served.send(pick(served.checkpoint(1), ["body.inner.0.q"]))
        for _ in range(4):
            assert torch.equal(served.run(), served.expected())
        assert served.life.session is None
        assert a.differences(Snapshot(served.model)) == []
        with pytest.raises(errors.SessionFailedError) as caught:
            served.send(served.checkpoint(2))
        assert set(caught.value.tensors) == {"body.inner.0.k", "body.inner.0.v"}
        checkpoint = served.checkpoint(3)
        served.send(checkpoint)
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    def test_an_implicit_session_half_touched_in_place_is_refused(self) -> None:
        served = Served(("fused_packed", "dense"), isolation="in_place")
        checkpoint = served.checkpoint(1)
        served.send(pick(checkpoint, ["body.inner.0.q"]))
        with pytest.raises(errors.WeightlifeError):
            served.run()
        served.send({n: v for n, v in checkpoint.items() if n != "body.inner.0.q"})
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    def test_an_implicit_session_that_cannot_be_committed_does_not_kill_the_pass(self) -> None:
        served = Served(("packed", "dense"))
        served.send(served.checkpoint(1))
        faults.arm("hook", 0)
        assert torch.equal(served.run(), served.expected())
        assert served.life.session is None
        with pytest.raises(errors.SessionFailedError, match="Boom"):
            served.send(served.checkpoint(2))

    @pytest.mark.parametrize("kind", ["fused", "fused_packed", "experts"])
    def test_a_repeat_starts_a_new_epoch(self, kind: str) -> None:
        served = Served((kind,))
        served.send(served.checkpoint(1))
        checkpoint = served.checkpoint(2)
        served.send(checkpoint)
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())
        assert any("sent anew" in note for note in served.life.reports[-1].notes)

    @pytest.mark.parametrize("kind", ["fused_packed", "experts"])
    def test_a_new_epoch_must_cover_its_layers_anew(self, kind: str) -> None:
        served = Served((kind,))
        served.send(served.checkpoint(1))
        second = served.checkpoint(2)
        names = list(second)
        served.send(pick(second, names[:1]))
        assert torch.equal(served.run(), served.expected())  # A, not a mixture of two syncs
        served.send(pick(second, names[1:]))
        served.weights = second
        assert torch.equal(served.run(), served.expected())

    def test_a_pass_from_another_thread_waits_for_a_load_call(self) -> None:
        served = Served(("packed", "dense"))
        served.open()
        inside, answers = threading.Event(), []

        def slow() -> Iterator[tuple[str, torch.Tensor]]:
            for item in served.checkpoint(1).items():
                inside.set()
                yield item

        def passing() -> None:
            inside.wait(20)
            answers.append(served.run())

        thread = threading.Thread(target=passing)
        thread.start()
        served.send(slow())
        thread.join(20)
        assert torch.equal(answers[0], served.expected())
        served.finish()


class TestRanks:
    def test_a_rank_that_fails_keeps_the_others_from_committing(self) -> None:
        served = Served(("packed",))
        served.host.ranks, served.host.others = (0, 2), [[0, 0]]
        with unchanged(served.model), pytest.raises(errors.RankMismatchError, match=r"ranks \[1\] failed"):
            served.update(served.checkpoint(1))

    def test_ranks_that_received_other_tensors(self) -> None:
        served = Served(("packed",))
        served.host.ranks, served.host.others = (0, 2), [[1, 12345]]
        with unchanged(served.model), pytest.raises(errors.RankMismatchError, match="other tensors"):
            served.update(served.checkpoint(1))

    def test_ranks_that_agree(self) -> None:
        served = Served(("packed",))
        served.host.ranks = (0, 3)
        served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())


class TestLife:
    def test_it_dies_with_its_model(self) -> None:
        model = ToyModel(("packed",))
        life = weakref.ref(Lifecycle(model, ToyHost(model), Settings()))
        assert lifecycle.of(model) is life()
        del model
        gc.collect()
        assert life() is None

    def test_a_copied_model_has_none(self) -> None:
        served = Served(("dense",))
        twin = copy.deepcopy(served.model)
        assert lifecycle.of(twin) is None
        assert lifecycle.of(served.model) is served.life
        assert torch.equal(twin(INPUT), served.model(INPUT))

    def test_state_dict_and_module_tree_do_not_show_it(self) -> None:
        served = Served(("dense",))
        plain = cold(("dense",), served.weights)
        assert list(served.model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in served.model.named_modules()] == [
            name for name, _ in plain.named_modules()
        ]
        assert repr(served.model) == repr(plain)

    def test_forget(self) -> None:
        served = Served(("dense",))
        lifecycle.forget(served.model)
        assert lifecycle.of(served.model) is None
        assert served.life not in lifecycle.all_lifecycles()
        assert "_weightlife" not in vars(served.model)

    def test_reports_are_numbered_and_dated(self) -> None:
        served = Served(("packed",))
        served.update(served.checkpoint(1))
        faults.arm("write", 0)
        with pytest.raises(Boom):
            served.update(served.checkpoint(2))
        served.update(served.checkpoint(3))
        assert [report.generation for report in served.life.reports] == [0, 1, 1, 2]
        assert all(report.started_at.endswith("+00:00") for report in served.life.reports)
        assert len({report.session_id for report in served.life.reports}) == 4

    def test_one_log_line_a_session(self, caplog) -> None:
        with caplog.at_level("INFO", "weightlife"):
            served = Served(("packed",))
            served.update(served.checkpoint(1))
        assert len([r for r in caplog.records if r.levelname == "INFO"]) == 2

    def test_events_of_a_session(self) -> None:
        seen: list[tuple[str, Any]] = []
        stop = bus.subscribe(lambda event: seen.append((event.name, event.data.get("phase"))))
        try:
            served = Served(("packed",))
            seen.clear()
            served.update(served.checkpoint(1))
        finally:
            stop()
        names = [name for name, _ in seen]
        assert names[0] == "session.start"
        assert names[-1] == "session.end"
        starts = [phase for name, phase in seen if name == "phase.start"]
        ends = [phase for name, phase in seen if name == "phase.end"]
        assert starts == ends
        assert starts[:2] == ["prepare", "receive"]
        assert [p for p in starts if p.startswith("process")] == [
            "process_quant", "process_attention", "process_model",
        ]  # fmt: skip


# -- random programs -------------------------------------------------------------------------------------------


class Programs(RuleBasedStateMachine):
    """Any order of opening, sending, failing, passing and finishing over any tree.

    What serves is always generation A or the complete B: `self.served.weights` is A, `self.pending` what the open
    session received since. After every step a pass answers what a cold load of one of the two answers.
    """

    served: Served

    @initialize(spec=specs(4), storage=st.sampled_from(STORAGES), patience=st.sampled_from([1, 64]))
    def start(self, spec: Any, storage: str, patience: int) -> None:
        faults.clear()
        self.served = Served(spec, storage=storage, implicit_patience=patience)
        self.names = list(self.served.weights)
        self.pending: dict[str, torch.Tensor] = {}
        self.seed = 1
        self.explicit: str | None = None

    # -- helpers

    @property
    def session(self) -> Any:
        return self.served.life.session

    def fresh(self, names: list[str]) -> dict[str, torch.Tensor]:
        self.seed += 1
        return pick(self.served.checkpoint(self.seed), names)

    def committed(self) -> None:
        self.served.weights = {**self.served.weights, **self.pending}
        self.dropped()

    def dropped(self) -> None:
        self.pending, self.explicit = {}, None

    # -- rules

    @precondition(lambda self: self.session is None and not self.served.life.failed)
    @rule(partial=st.sampled_from(["forbid", "by_layer"]))
    def open(self, partial: str) -> None:
        self.dropped()
        self.served.open(partial)
        self.explicit = partial

    @precondition(lambda self: self.names and not self.served.life.failed)
    @rule(data=st.data(), fault=st.sampled_from([None, None, None, "write", "source"]))
    def send(self, data: Any, fault: str | None) -> None:
        left = [name for name in self.names if name not in self.pending]
        # Mostly what is still missing; an implicit session may repeat itself.
        pool = left if left and (self.explicit or data.draw(st.booleans())) else self.names
        if self.explicit and not left:
            return
        chosen = data.draw(st.lists(st.sampled_from(pool), unique=True, min_size=1), label="names")
        part = self.fresh(chosen)

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for i, item in enumerate(part.items()):
                if fault == "source" and i == len(part) // 2:
                    raise Boom("source")
                yield item

        if fault == "write":
            faults.arm("write", len(part) // 2)
        try:
            self.served.send(source())
        except Boom:
            assert self.session is None
            self.dropped()
        else:
            self.pending.update(part)
        faults.clear()

    @precondition(lambda self: self.session is not None and self.explicit)
    @rule(fault=st.sampled_from([None, None, "hook", "model_hook"]), after=st.integers(0, 2))
    def finish(self, fault: str | None, after: int) -> None:
        if fault:
            faults.arm(fault, after if fault == "hook" else 0)
        complete = set(self.pending) == set(self.names)
        partial = self.explicit
        try:
            self.served.finish()
        except (Boom, errors.CompletenessError):
            assert fault or not complete
            self.dropped()
        else:
            assert complete or partial == "by_layer"
            self.committed()
        faults.clear()
        assert self.session is None

    @precondition(lambda self: self.session is not None)
    @rule()
    def abort(self) -> None:
        self.served.life.abort()
        self.dropped()

    @precondition(lambda self: self.served.life.failed)
    @rule()
    def learn_of_a_failure(self) -> None:
        with pytest.raises(errors.SessionFailedError):
            self.served.send({})
        self.dropped()

    @rule()
    def dummy(self) -> None:
        before = self.session
        self.served.run(Pass.DUMMY)
        assert self.session is before

    @rule(fault=st.sampled_from([None, None, None, "hook", "model_hook"]))
    def batch(self, fault: str | None) -> None:
        implicit = self.session is not None and not self.explicit
        a = self.served.expected()
        b = self.served.expected(self.pending)
        if fault and implicit:
            faults.arm(fault, 0)
        answer = self.served.run()
        faults.clear()
        if not implicit:
            assert torch.equal(answer, a)
        elif self.session is None and not self.served.life.failed:
            assert torch.equal(answer, b)
            self.committed()
        else:
            assert torch.equal(answer, a)
            if self.session is None:
                self.dropped()

    @invariant()
    def what_serves_is_a(self) -> None:
        if hasattr(self, "served"):
            assert torch.equal(self.served.run(Pass.DUMMY), self.served.expected())
            held = (self.session is not None) + bool(self.served.life.poisoned)
            assert OpenSessions.count == held
            assert lifecycle.current.get() is None

    def teardown(self) -> None:
        faults.clear()
        Served.close_all()


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    settings.get_profile("ci"), max_examples=200, stateful_step_count=20, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_guarded_over_several_models_shows_each_its_own_a() -> None:
    one, other = Served(("packed",)), Served(("scaled",))
    one.open()
    other.open()
    one.send(one.checkpoint(1))
    other.send(other.checkpoint(1))
    answers = guard.guarded([one.life, other.life], Pass.REAL, lambda: (one.model(INPUT), other.model(INPUT)))
    assert torch.equal(answers[0], one.expected())
    assert torch.equal(answers[1], other.expected())
    one.life.abort()
    other.finish()


def test_modules_without_weights_are_no_trouble() -> None:
    class Empty(ToyModel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.body = nn.Identity()
            self.gain = 0.0

        def process(self) -> None: ...

    served = Served(Empty)
    with pytest.raises(errors.EmptyUpdateError):
        served.update({})
