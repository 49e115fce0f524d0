# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import logging
import threading
import time

import pytest

from weightlife._engine import events
from weightlife._engine.events import Bus, Event


def test_an_event_carries_its_facts() -> None:
    bus = Bus()
    seen: list[Event] = []
    bus.subscribe(seen.append)
    before = (time.perf_counter_ns(), time.time_ns())
    # `name` and `session_id` are legal keys of the data as well
    bus.emit(events.PHASE_START, "s1", phase="receive", name="n", session_id="other")
    (event,) = seen
    assert (event.name, event.session_id) == ("phase.start", "s1")
    assert dict(event.data) == {"phase": "receive", "name": "n", "session_id": "other"}
    assert before[0] <= event.time_ns <= time.perf_counter_ns()
    assert before[1] <= event.wall_ns <= time.time_ns()


def test_an_event_is_read_only() -> None:
    bus = Bus()
    seen: list[Event] = []
    bus.subscribe(seen.append)
    bus.emit(events.NOTE, "s1", message="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen[0].name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        seen[0].data["message"] = "y"  # type: ignore[index]


def test_listeners_hear_in_the_order_of_subscription_and_in_the_same_thread() -> None:
    bus = Bus()
    heard: list[tuple[str, int]] = []
    bus.subscribe(lambda event: heard.append(("a", threading.get_ident())))
    bus.subscribe(lambda event: heard.append(("b", threading.get_ident())))
    bus.emit(events.NOTE, "s1")
    assert heard == [("a", threading.get_ident()), ("b", threading.get_ident())]


def test_unsubscribe_ends_one_subscription_and_may_be_called_twice() -> None:
    bus = Bus()
    seen: list[Event] = []
    first = bus.subscribe(seen.append)
    second = bus.subscribe(seen.append)
    first()
    first()
    bus.emit(events.NOTE, "s1")
    assert len(seen) == 1
    assert bus.active
    second()
    assert not bus.active
    bus.emit(events.NOTE, "s1")
    assert len(seen) == 1


def test_a_listener_may_unsubscribe_inside_an_event() -> None:
    bus = Bus()
    seen: list[str] = []

    def once(event: Event) -> None:
        seen.append("once")
        stop()

    stop = bus.subscribe(once)
    bus.subscribe(lambda event: seen.append("always"))
    bus.emit(events.NOTE, "s1")
    bus.emit(events.NOTE, "s1")
    assert seen == ["once", "always", "always"]


def test_a_listener_may_emit() -> None:
    bus = Bus()
    seen: list[str] = []

    def echo(event: Event) -> None:
        seen.append(event.name)
        if event.name == events.VIOLATION:
            bus.emit(events.NOTE, event.session_id)

    bus.subscribe(echo)
    bus.emit(events.VIOLATION, "s1")
    assert seen == ["violation", "note"]


def test_a_failing_listener_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    seen: list[Event] = []

    def broken(event: Event) -> None:
        raise RuntimeError("no")

    bus.subscribe(broken)
    bus.subscribe(seen.append)
    bus.subscribe(broken)
    with caplog.at_level(logging.WARNING, logger="weightlife"):
        for _ in range(3):
            bus.emit(events.NOTE, "s1")
    assert len(seen) == 3
    assert bus.listener_errors == 6
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.records[0].exc_info is not None


def test_an_interrupt_is_no_listener_error() -> None:
    bus = Bus()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(events.NOTE, "s1")


def test_without_listeners_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "Event", None)  # would fail if it were called
    bus = Bus()
    assert not bus.active
    bus.emit(events.NOTE, "s1", message="x")


def test_threads_may_subscribe_while_events_flow() -> None:
    bus = Bus()
    counted = [0] * 4
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            bus.subscribe(lambda event: None)()

    def speak(index: int) -> None:
        def count(event: Event) -> None:
            if event.session_id == str(index):
                counted[index] += 1

        unsubscribe = bus.subscribe(count)
        for _ in range(500):
            bus.emit(events.NOTE, str(index))
        unsubscribe()

    churner = threading.Thread(target=churn)
    speakers = [threading.Thread(target=speak, args=(i,)) for i in range(4)]
    churner.start()
    for thread in speakers:
        thread.start()
    for thread in speakers:
        thread.join()
    stop.set()
    churner.join()
    assert counted == [500] * 4
    assert not bus.active
    assert bus.listener_errors == 0


def test_the_names_are_known() -> None:
    assert {
        "session.start",
        "session.end",
        "phase.start",
        "phase.end",
        "violation",
        "note",
        "layer.processed",
        "manifest",
    } == events.EVENT_NAMES
    assert isinstance(events.bus, Bus)
