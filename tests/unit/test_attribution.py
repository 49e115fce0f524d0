# SPDX-License-Identifier: Apache-2.0
"""Where the time of a session went: each number is shown against a delay that a test put there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.toyhost import Served
from weightlife import errors
from weightlife._engine import events, lifecycle, memory
from weightlife._engine.events import Event
from weightlife.report import ATTRIBUTED, LoadReport

PAUSE = 0.02


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    Served.close_all()


@pytest.fixture(name="heard")
def _heard() -> Iterator[list[Event]]:
    heard: list[Event] = []
    stop = events.bus.subscribe(heard.append)
    yield heard
    stop()


def slowly(weights: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for item in weights.items():
        time.sleep(PAUSE)
        yield item


def last(served: Served) -> LoadReport:
    return served.life.reports[-1]


def test_time_in_the_source(heard: list[Event]) -> None:
    served = Served(("dense", "packed"))
    new = served.checkpoint(7)
    served.open()
    served.send(slowly(new))
    served.finish()
    spent = last(served).attributed
    assert set(spent) == set(ATTRIBUTED)
    assert PAUSE * len(new) <= spent["source"]
    assert spent["loaders"] + spent["between_calls"] < spent["source"]
    (receiving,) = (phase.seconds for phase in last(served).phases if phase.name == "receive")
    assert spent["source"] + spent["loaders"] + spent["between_calls"] == pytest.approx(receiving)
    receive = next(e for e in heard if e.name == events.PHASE_END and e.data["phase"] == "receive")
    assert receive.data["tensors"] == len(new)
    assert receive.data["bytes"] == sum(t.numel() * t.element_size() for t in new.values())


def test_time_in_the_source_of_a_first_load() -> None:
    from tests.toyhost import ToyHost, ToyModel, process_all
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife.config import Settings

    weights = Served(("dense", "packed")).weights
    model = ToyModel(("dense", "packed"))
    life = Lifecycle(model, ToyHost(model), Settings())
    life.load_weights(model.load_weights, slowly(weights))
    assert life.first is not None
    life.first.process(lambda: process_all(model))
    report = life.reports[-1]
    assert report.attributed["source"] >= PAUSE * len(weights)
    assert report.attributed["loaders"] < report.attributed["source"]
    assert [(p.name, p.calls) for p in report.phases] == [("receive", 1), ("process", 1)]
    assert 0 <= report.phases[0].start < report.phases[1].start <= report.seconds
    lifecycle.forget(model)


def test_time_in_loaders() -> None:
    served = Served(("dense", "packed"))
    inner = served.model.load_weights

    def slow(weights: Any) -> Any:
        time.sleep(PAUSE)
        return inner(weights)

    served.open()
    served.life.load_weights(slow, iter(served.checkpoint(3).items()))
    served.finish()
    spent = last(served).attributed
    assert spent["loaders"] >= PAUSE
    assert spent["source"] < spent["loaders"]


def test_time_between_the_calls_of_an_update() -> None:
    served = Served(("dense",))
    served.open()
    served.send(served.checkpoint(3))
    time.sleep(PAUSE)
    served.finish()
    assert last(served).attributed["between_calls"] >= PAUSE


def test_time_waiting_for_other_ranks() -> None:
    served = Served(("dense",))
    served.host.ranks = (0, 2)
    answer = served.host.exchange

    def late(words: list[int]) -> list[list[int]]:
        time.sleep(PAUSE)
        return answer(words)

    served.host.exchange = late  # type: ignore[method-assign]
    served.update(served.checkpoint(4))
    assert PAUSE <= last(served).attributed["ranks"] <= last(served).seconds


def test_time_of_hooks_by_class_and_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(("dense", "packed", "packed"))
    packed = [(path, layer) for path, layer in served.model.layers() if type(layer).__name__ == "Packed"]
    inner = type(packed[0][1]).process

    def process(self: Any) -> None:
        time.sleep(PAUSE * (10 if self is packed[1][1] else 1))
        inner(self)

    monkeypatch.setattr(type(packed[0][1]), "process", process)
    served.update(served.checkpoint(4))
    report = last(served)
    assert report.processing["Packed"] >= 11 * PAUSE
    seconds = {layer.name: layer.seconds for layer in report.layers}
    assert seconds[packed[1][0]] >= 10 * PAUSE
    assert seconds[packed[1][0]] > seconds[packed[0][0]] >= PAUSE
    text = str(report)
    assert f"slowest      {packed[1][0]} " in text
    assert "hooks        Packed " in text


def test_hooks_of_a_first_load_count_once_though_they_call_their_base() -> None:
    from tests.toyhost import ToyHost, ToyModel
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife.config import Settings

    model = ToyModel(("dense",))
    life = Lifecycle(model, ToyHost(model), Settings())
    first, (path, layer) = life.first, next(model.layers())
    assert first is not None

    def base() -> None:
        time.sleep(PAUSE)

    assert first.hook(layer, "Method", lambda: first.hook(layer, "Base", base)) is None
    assert set(first.report.processing) == {"Method"}
    assert first.report.processing["Method"] >= PAUSE
    assert first.account.layer_seconds == {path: first.report.processing["Method"]}
    with pytest.raises(ZeroDivisionError):
        first.hook(layer, "Method", lambda: 1 // 0)
    assert not first._hooked
    lifecycle.forget(model)


def test_what_was_copied(heard: list[Event]) -> None:
    served = Served(("packed", "packed"), storage="pinned")
    served.update(served.checkpoint(4))
    report = last(served)
    assert report.tensors_copied > 0
    assert report.bytes_copied >= 4 * report.tensors_copied
    copied = next(e for e in heard if e.name == events.PHASE_END and e.data["phase"] == "copy_back")
    assert (copied.data["tensors"], copied.data["bytes"]) == (report.tensors_copied, report.bytes_copied)


def test_hooks_that_run_while_receiving_are_no_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(("packed", "packed"), isolation="in_place", storage="pinned")
    (kind,) = {type(layer) for _, layer in served.model.layers()}
    inner = kind.process

    def process(self: Any) -> None:
        time.sleep(5 * PAUSE)
        inner(self)

    monkeypatch.setattr(kind, "process", process)
    served.update(served.checkpoint(4))
    report = last(served)
    (early,) = (phase for phase in report.phases if phase.name == "process_early")
    assert early.calls == 2
    assert early.seconds >= 10 * PAUSE
    assert report.attributed["loaders"] < early.seconds
    assert report.processing["Packed"] >= 10 * PAUSE
    assert report.bytes_copied > 0


def test_phases_say_when_they_began() -> None:
    served = Served(("packed",))
    served.update(served.checkpoint(4))
    starts = [phase.start for phase in last(served).phases]
    assert starts == sorted(starts)
    assert 0 <= starts[0] <= starts[-1] <= last(served).seconds


def test_a_failure_carries_the_exception_and_a_violation_its_tensors(heard: list[Event]) -> None:
    served = Served(("dense", "packed"))
    new = served.checkpoint(4)
    name = next(iter(new))
    del new[name]
    with pytest.raises(errors.MissingTensorError) as caught:
        served.update(new)
    (end,) = (e for e in heard if e.name == events.SESSION_END and e.data["outcome"] == "aborted")
    assert end.data["error"] is caught.value
    (violation,) = (e for e in heard if e.name == events.VIOLATION)
    assert name in violation.data["tensors"]  # type: ignore[operator]


class TestPeak:
    def test_known_only_if_the_session_set_the_mark(self) -> None:
        assert memory.peak(5, 9) == 9
        assert memory.peak(9, 9) is None
        assert memory.peak(None, 9) is None

    def test_a_session_that_needs_more_than_ever(self) -> None:
        import torch

        served = Served(("dense",))
        before = memory.high_water(served.model)
        assert before is not None
        assert before > 1 << 20
        size = 1 << 28
        served.open()

        def greedy(weights: Any) -> Any:
            lines = Path("/proc/self/status").read_text().splitlines()
            now = int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024
            hole = torch.ones((before - now + size,), dtype=torch.uint8)
            assert hole[-1] == 1
            return served.model.load_weights(weights)

        served.life.load_weights(greedy, iter(served.checkpoint(2).items()))
        served.finish()
        assert before + size // 2 < (last(served).peak_bytes or 0) < before + 2 * size
