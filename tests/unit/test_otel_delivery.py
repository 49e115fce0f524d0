# SPDX-License-Identifier: Apache-2.0
"""A load never waits long for telemetry, whatever an exporter does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from weightlife._engine import events
from weightlife._engine.events import Bus
from weightlife.otel.delivery import PATIENCE, Delivery
from weightlife.otel.listening import Telemetry

# What waiting may take beyond the patience on a machine that is busy with other things.
SLACK = 0.1


@pytest.fixture(name="release")
def _release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class TestDelivery:
    def test_runs_jobs_in_order_in_a_daemon_thread(self) -> None:
        delivery, seen = Delivery(), []
        for index in range(20):
            delivery.submit(lambda i=index: seen.append((i, threading.current_thread())))
        assert delivery.drain(10)
        assert [i for i, _ in seen] == list(range(20))
        assert {thread.daemon for _, thread in seen} == {True}
        assert len({thread for _, thread in seen}) == 1
        assert delivery.pending == 0

    def test_waits_no_longer_than_its_patience(self, release: threading.Event) -> None:
        delivery = Delivery()
        delivery.submit(release.wait)
        took = seconds(delivery.wait)
        assert PATIENCE * 0.9 <= took < PATIENCE + SLACK
        assert delivery.pending == 1
        release.set()
        assert delivery.drain(10)

    def test_a_quick_job_is_not_waited_for_longer_than_it_takes(self) -> None:
        delivery = Delivery(patience=10.0)
        delivery.submit(lambda: None)
        assert seconds(delivery.wait) < 5

    def test_drops_are_counted_and_told_once(
        self, release: threading.Event, caplog: pytest.LogCaptureFixture
    ) -> None:
        delivery = Delivery(backlog=3)
        assert [delivery.submit(release.wait) for _ in range(6)] == [True] * 3 + [False] * 3
        assert delivery.dropped == 3
        assert len([r for r in caplog.records if "dropped" in r.message]) == 1
        release.set()
        assert delivery.drain(10)
        assert delivery.submit(lambda: None)

    def test_a_job_that_raises_ends_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        delivery, seen = Delivery(), []
        for _ in range(3):
            delivery.submit(lambda: 1 // 0)
        delivery.submit(lambda: seen.append(1))
        assert delivery.drain(10)
        assert (seen, delivery.failed) == ([1], 3)
        assert len(caplog.records) == 1

    def test_a_forked_child_has_a_thread_of_its_own(self) -> None:
        code = """
import os, threading
from weightlife.otel.delivery import Delivery
delivery, release = Delivery(), threading.Event()
delivery.submit(release.wait)
child = os.fork()
if child == 0:
    assert delivery.pending == 0
    done = []
    delivery.submit(lambda: done.append(1))
    os._exit(0 if delivery.drain(10) and done == [1] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
release.set()
assert delivery.drain(10)
"""
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)

    @pytest.mark.parametrize("hangs", [False, True])
    def test_the_end_of_a_process(self, hangs: bool) -> None:
        """What is on its way is finished at exit; what hangs does not keep the process."""
        code = f"""
import time
from weightlife.otel.delivery import Delivery
delivery = Delivery()
delivery.submit(lambda: time.sleep({60 if hangs else 0.1}))
delivery.submit(lambda: print("done", flush=True))
"""
        started = time.monotonic()
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert child.stdout == ("" if hangs else "done\n")
        assert time.monotonic() - started < 30


class Exporter(SpanExporter):
    """Refuses, hangs, is slow, or raises."""

    def __init__(self, how: str, release: threading.Event) -> None:
        self.how, self.release = how, release
        self.seen: list[str] = []

    def export(self, spans: Any) -> SpanExportResult:
        if self.how == "hangs":
            self.release.wait()
        elif self.how == "slow":
            time.sleep(0.1)
        elif self.how == "raises":
            raise ConnectionError("nobody there")
        self.seen += [span.name for span in spans]
        return SpanExportResult.FAILURE if self.how == "refuses" else SpanExportResult.SUCCESS


def session(bus: Bus, name: str = "s") -> None:
    bus.emit(events.SESSION_START, name, model="M", operation="reload")
    for phase in ("prepare", "receive", "commit"):
        bus.emit(events.PHASE_START, name, phase=phase)
        bus.emit(events.PHASE_END, name, phase=phase)
    bus.emit(events.SESSION_END, name, outcome="committed")


@pytest.mark.parametrize("how", ["works", "refuses", "raises", "slow", "hangs"])
@pytest.mark.parametrize("processor", [BatchSpanProcessor, SimpleSpanProcessor])
def test_no_exporter_costs_a_session_more_than_the_patience(
    how: str, processor: Any, release: threading.Event
) -> None:
    exporter = Exporter(how, release)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor(exporter))
    bus = Bus()
    telemetry = Telemetry(tracer_provider=provider, bus=bus)
    took = [seconds(lambda i=index: session(bus, f"s{i}")) for index in range(5)]
    assert max(took) < PATIENCE + SLACK
    if how == "hangs":
        # what hangs is waited for once, and the later sessions don't queue up for it
        assert sum(took[1:]) < PATIENCE + SLACK
        assert telemetry.delivery.pending
    release.set()
    assert telemetry.delivery.drain(30)
    assert bus.listener_errors == telemetry.delivery.dropped == 0
    if how in ("works", "slow", "refuses"):
        assert exporter.seen.count("load_weights M") == 5
    telemetry.close()
    assert not bus.active


def test_spans_are_exported_when_the_session_ends_without_waiting_for_a_batch(
    release: threading.Event,
) -> None:
    exporter = Exporter("works", release)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    bus = Bus()
    telemetry = Telemetry(tracer_provider=provider, bus=bus)
    session(bus)
    assert telemetry.delivery.drain(10)
    assert sorted(exporter.seen) == ["commit", "load_weights M", "prepare", "receive"]


def test_a_worker_that_is_killed_after_the_session_has_told_its_spans() -> None:
    """`os._exit` runs no exit handler, as SIGKILL would not."""
    code = """
import os, sys
sys.path.insert(0, os.getcwd())
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=lambda s: s.name + chr(10))))
trace.set_tracer_provider(provider)
from weightlife._engine import events
from weightlife.otel.listening import Telemetry
telemetry = Telemetry()
telemetry.delivery._patience = 10.0  # the machine that runs tests may be busy
events.bus.emit(events.SESSION_START, "s", model="M")
events.bus.emit(events.SESSION_END, "s", outcome="committed")
os._exit(0)
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert child.stdout == "load_weights M\n"


def test_without_providers_no_thread_is_made_and_nothing_waits() -> None:
    code = """
import threading
from weightlife._engine import events
from weightlife.otel.listening import Telemetry
telemetry = Telemetry()
for _ in range(3):
    events.bus.emit(events.SESSION_START, "s", model="M")
    events.bus.emit(events.SESSION_END, "s", outcome="committed")
assert threading.active_count() == 1
assert telemetry.delivery.pending == 0
"""
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=60,
        env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
    )


def test_metrics_are_flushed_with_the_spans() -> None:
    flushed: list[int] = []

    class Reader(InMemoryMetricReader):
        def force_flush(self, timeout_millis: float = 10_000) -> bool:
            flushed.append(1)
            return super().force_flush(timeout_millis)

    provider = MeterProvider(metric_readers=[Reader()], shutdown_on_exit=False)
    bus = Bus()
    telemetry = Telemetry(meter_provider=provider, bus=bus)
    session(bus)
    assert telemetry.delivery.drain(10)
    assert flushed == [1]
