# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from tests.telemetry import Registry, group_of
from weightlife import errors
from weightlife._engine import events
from weightlife._engine.events import Bus, Event
from weightlife.otel import generate_names, ids, names
from weightlife.otel.spans import (
    MAX_LAYER_SPANS,
    MAX_OPEN_SESSIONS,
    MAX_SPAN_EVENTS,
    MAX_SPANS,
    SpanListener,
)
from weightlife.report import ATTRIBUTED, OPERATIONS, OUTCOMES, LayerRecord, LoadReport, PhaseRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = generate_names.load_registry()
ATTRIBUTES = {a["id"]: a for group in GROUPS for a in group["attributes"] if "id" in a}
registry = Registry(GROUPS)


class Tracing:
    """A bus with a span listener, and what came out of it."""

    def __init__(self, **kwargs: Any) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**kwargs)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.bus = Bus()
        self.listener = SpanListener(self.provider)
        self.listener.subscribe(self.bus)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        assert self.listener.delivery.drain(10)
        return self.exporter.get_finished_spans()

    @property
    def root(self) -> ReadableSpan:
        (root,) = (span for span in self.spans if span.parent is None)
        return root

    @property
    def phases(self) -> list[ReadableSpan]:
        return sorted((span for span in self.spans if span.parent), key=lambda span: span.start_time or 0)

    def phase(self, name: str, **end: object) -> None:
        self.bus.emit(events.PHASE_START, "s1", phase=name)
        self.bus.emit(events.PHASE_END, "s1", phase=name, **end)


@pytest.fixture(name="tracing")
def _tracing() -> Iterator[Tracing]:
    tracing = Tracing()
    yield tracing
    assert tracing.bus.listener_errors == 0
    check_names_and_types(tracing.spans)


def check_names_and_types(spans: tuple[ReadableSpan, ...]) -> None:
    """Every emitted name is declared, on the right span or event, with a value of the declared type."""
    for span in spans:
        if span.instrumentation_scope is None or span.instrumentation_scope.name != "weightlife":
            continue
        registry.check(group_of(span.name), span.attributes or {})
        for event in span.events:
            if event.name != "exception":
                registry.check(f"event.{event.name}", event.attributes or {})
        for link in span.links:
            registry.check("link.weightlife.session", link.attributes or {})


def start(tracing: Tracing, session: str = "s1", **data: object) -> None:
    tracing.bus.emit(events.SESSION_START, session, **{"model": "Qwen3ForCausalLM", **data})


def end(tracing: Tracing, session: str = "s1", **data: object) -> None:
    tracing.bus.emit(events.SESSION_END, session, **{"outcome": "committed", **data})


def test_a_session_that_commits(tracing: Tracing) -> None:
    start(
        tracing, operation="reload", source="/checkpoints/b", opened_by="reload_weights", rank=1, world_size=2
    )
    tracing.phase("prepare")
    tracing.phase("receive", tensors=290, bytes=5 << 40)
    tracing.phase("commit")
    report = LoadReport(
        outcome="committed",
        isolation="staged",
        storage="pinned",
        operation="reload",
        model="Qwen3ForCausalLM",
        source="/checkpoints/b",
        opened_by="reload_weights",
        rank=1,
        world_size=2,
        generation=4,
        tensors_received=290,
        bytes_received=5 << 40,
        layers_touched=24,
        layers_by_strategy={"direct": 22, "rebuild": 2},
        peak_bytes=7,
        tensors_copied=64,
        bytes_copied=1 << 30,
        phases=[PhaseRecord("receive", 4.5), PhaseRecord("copy_back", 0.5)],
        attributed={"source": 1.0, "loaders": 3.0, "ranks": 0.25},
        processing={"Method": 0.75},
        versions={"torch": "2"},
        layers=[LayerRecord("a", seconds=0.25), LayerRecord("b", seconds=0.5), LayerRecord("c")],
    )
    tracing.bus.emit(events.SESSION_END, "s1", report=report)
    root = tracing.root
    assert root.name == "load_weights Qwen3ForCausalLM"
    assert root.kind is SpanKind.INTERNAL
    assert root.status.status_code is StatusCode.UNSET
    assert dict(root.attributes or {}) == {
        "weightlife.session.id": "s1",
        "weightlife.session.operation": "reload",
        "weightlife.session.outcome": "committed",
        "weightlife.session.source": "/checkpoints/b",
        "weightlife.session.opened_by": "reload_weights",
        "weightlife.session.isolation": "staged",
        "weightlife.session.storage": "pinned",
        "weightlife.model.class": "Qwen3ForCausalLM",
        "weightlife.weight.generation": 4,
        "weightlife.rank": 1,
        "weightlife.world_size": 2,
        "weightlife.tensor.count": 290,
        "weightlife.tensor.size": 5 << 40,
        "weightlife.copy.tensor.count": 64,
        "weightlife.copy.size": 1 << 30,
        "weightlife.copy.rate": (1 << 30) / 0.5 / 1e9,
        "weightlife.receive.rate": (5 << 40) / 4 / 1e9,
        "weightlife.activity.duration.source": 1.0,
        "weightlife.activity.duration.loaders": 3.0,
        "weightlife.activity.duration.ranks": 0.25,
        "weightlife.processing.duration.Method": 0.75,
        "weightlife.version.torch": "2",
        "weightlife.layer.slowest.names": ("b", "a"),
        "weightlife.layer.slowest.durations": (0.5, 0.25),
        "weightlife.layer.touched": 24,
        "weightlife.layer.untouched": 0,
        "weightlife.tensor.not_sent": 0,
        "weightlife.layer.strategy.direct": 22,
        "weightlife.layer.strategy.rebuild": 2,
        "weightlife.memory.peak": 7,
        "weightlife.violation.count": 0,
    }
    assert [span.name for span in tracing.phases] == ["prepare", "receive", "commit"]
    receive = tracing.phases[1]
    duration = (receive.attributes or {})["weightlife.call.duration"]
    assert dict(receive.attributes or {}) == {
        "weightlife.phase": "receive",
        "weightlife.session.id": "s1",
        "weightlife.call.count": 1,
        "weightlife.call.duration": duration,
        "weightlife.tensor.count": 290,
        "weightlife.tensor.size": 5 << 40,
    }
    for span in tracing.phases:
        assert span.parent == root.context
        assert span.kind is SpanKind.INTERNAL
        assert span.status.status_code is StatusCode.UNSET
        assert root.start_time <= span.start_time <= span.end_time <= root.end_time  # type: ignore[operator]


def test_times_are_those_of_the_events_and_a_clock_step_does_not_reorder_them(tracing: Tracing) -> None:
    def send(name: str, steady: int, wall: int, **data: object) -> None:
        tracing.listener(Event(name, "s1", steady, wall, data))

    send(events.SESSION_START, 1_000, 5_000_000)
    send(events.PHASE_START, 1_100, 5_000_100, phase="receive")
    send(events.PHASE_END, 1_400, 3_000_000, phase="receive")  # the wall clock was set back
    send(events.SESSION_END, 1_500, 3_000_100, outcome="committed")
    assert (tracing.root.start_time, tracing.root.end_time) == (5_000_000, 5_000_500)
    (phase,) = tracing.phases
    assert (phase.start_time, phase.end_time) == (5_000_100, 5_000_400)
    assert (phase.attributes or {})["weightlife.call.duration"] == pytest.approx(300e-9)


def test_scope(tracing: Tracing) -> None:
    start(tracing)
    end(tracing)
    scope = tracing.root.instrumentation_scope
    assert scope is not None
    assert scope.name == "weightlife"
    assert not scope.schema_url


def test_a_session_without_a_model_name(tracing: Tracing) -> None:
    start(tracing, model="")
    end(tracing)
    assert tracing.root.name == "load_weights"


def test_a_failure_in_a_phase(tracing: Tracing) -> None:
    error = errors.MissingTensorError("2 tensors did not arrive", layer="layers.0")
    start(tracing)
    tracing.phase("prepare")
    tracing.bus.emit(events.PHASE_START, "s1", phase="receive")  # interrupted: no end
    end(tracing, outcome="aborted", error=error)
    root, (prepare, receive) = tracing.root, tracing.phases
    for span in (root, receive):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == str(error)
        assert (span.attributes or {})["error.type"] == "weightlife.errors.MissingTensorError"
    assert prepare.status.status_code is StatusCode.UNSET
    assert "error.type" not in (prepare.attributes or {})
    assert receive.end_time == root.end_time
    assert [event.name for event in root.events] == ["exception"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), "KeyError"),
        (errors.ConfigError("x"), "weightlife.errors.ConfigError"),
        (f"Worker failed with error '{errors.BudgetError('x')}'", "weightlife.errors.BudgetError"),
        ("something", "_OTHER"),
        (None, "_OTHER"),
    ],
)
def test_error_type(tracing: Tracing, error: object, kind: str) -> None:
    start(tracing)
    end(tracing, outcome="refused", error=error)
    assert tracing.root.status.status_code is StatusCode.ERROR
    assert (tracing.root.attributes or {})["error.type"] == kind


def test_a_phase_that_fails_and_is_handled(tracing: Tracing) -> None:
    start(tracing)
    tracing.phase("stage", error=MemoryError("device"))
    tracing.phase("stage")
    end(tracing)
    assert [span.status.status_code for span in tracing.phases] == [StatusCode.ERROR, StatusCode.UNSET]
    assert tracing.root.status.status_code is StatusCode.UNSET


def test_exceptions_as_logs_only(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", "logs")
    start(tracing)
    end(tracing, outcome="aborted", error=KeyError("x"))
    assert tracing.root.events == ()
    assert tracing.root.status.status_code is StatusCode.ERROR


def test_an_observed_session_is_no_error(tracing: Tracing) -> None:
    start(tracing)
    tracing.bus.emit(events.VIOLATION, "s1", code="WL201", message="x")
    end(tracing, outcome="observed")
    assert tracing.root.status.status_code is StatusCode.UNSET
    assert (tracing.root.attributes or {})["weightlife.violation.count"] == 1


def test_violations_and_notes_are_events(tracing: Tracing) -> None:
    start(tracing)
    tensors = [f"layers.{i}.weight\x1b" for i in range(20)]
    tracing.bus.emit(
        events.VIOLATION, "s1", code="WL201", message="20 are missing", layer="layers.0", tensors=tensors
    )
    tracing.bus.emit(events.NOTE, "s1", message="stepped down to host")
    end(tracing)
    violation, note = tracing.root.events
    assert violation.name == "weightlife.violation"
    assert dict(violation.attributes or {}) == {
        "weightlife.violation.kind": "WL201",
        "weightlife.message": "20 are missing",
        "weightlife.violation.layer": "layers.0",
        "weightlife.violation.tensors": tuple(f"layers.{i}.weight\\x1b" for i in range(8)),
        "weightlife.violation.tensor.count": 20,
    }
    assert note.name == "weightlife.note"
    assert dict(note.attributes or {}) == {"weightlife.message": "stepped down to host"}


def test_events_of_a_span_are_capped_and_the_rest_counted(tracing: Tracing) -> None:
    start(tracing)
    for _ in range(MAX_SPAN_EVENTS + 30):
        tracing.bus.emit(events.VIOLATION, "s1", code="WL203", message="x")
    end(tracing, outcome="aborted", error=ValueError("x"))
    assert len(tracing.root.events) == MAX_SPAN_EVENTS + 1  # the exception
    attributes = tracing.root.attributes or {}
    assert attributes["weightlife.violation.count"] == MAX_SPAN_EVENTS + 30
    assert attributes["weightlife.session.suppressed_event.count"] == 30


def test_a_phase_that_runs_often_is_one_span_and_the_others_keep_theirs(tracing: Tracing) -> None:
    start(tracing)
    tracing.phase("prepare")
    for index in range(290):
        tracing.phase("receive", tensors=1, bytes=10, error=KeyError("x") if index == 5 else None)
    for _ in range(3):
        tracing.phase("process")
    tracing.phase("commit")
    end(tracing)
    assert len(tracing.spans) <= MAX_SPANS
    assert [span.name for span in tracing.phases] == ["prepare", "receive", *["process"] * 3, "commit"]
    receive = tracing.phases[1]
    attributes = dict(receive.attributes or {})
    assert attributes["weightlife.call.count"] == 290
    assert attributes["weightlife.tensor.count"] == 290
    assert attributes["weightlife.tensor.size"] == 2900
    assert attributes["error.type"] == "KeyError"
    wall = (receive.end_time or 0) - (receive.start_time or 0)
    assert 0 < attributes["weightlife.call.duration"] * 1e9 <= wall  # type: ignore[operator]


def test_a_session_never_has_more_spans_than_it_may(tracing: Tracing) -> None:
    start(tracing)
    for index in range(100):
        for _ in range(index % 7 + 1):
            tracing.phase(f"phase {index}")
    end(tracing)
    assert len(tracing.spans) == MAX_SPANS


def test_phases_may_nest(tracing: Tracing) -> None:
    start(tracing)
    tracing.bus.emit(events.PHASE_START, "s1", phase="receive")
    tracing.phase("process")
    tracing.bus.emit(events.PHASE_END, "s1", phase="receive")
    end(tracing)
    receive, process = tracing.phases
    assert (receive.name, process.name) == ("receive", "process")
    assert (receive.end_time or 0) >= (process.end_time or 0)


def test_the_root_hangs_under_the_span_that_is_current(tracing: Tracing) -> None:
    tracer = tracing.provider.get_tracer("vllm")
    with tracer.start_as_current_span("Load model") as host:
        start(tracing)
        end(tracing)
        assert trace.get_current_span() is host  # nothing was left attached
    ours = next(span for span in tracing.spans if span.name.startswith("load_weights"))
    assert ours.parent == host.get_span_context()
    tracing.exporter.clear()


def test_sessions_do_not_mix(tracing: Tracing) -> None:
    start(tracing, "s1")
    start(tracing, "s2", model="Draft")
    tracing.phase("receive")
    end(tracing, "s2")
    end(tracing, "s1")
    roots = {span.name: span for span in tracing.spans if span.parent is None}
    (phase,) = tracing.phases
    assert phase.parent == roots["load_weights Qwen3ForCausalLM"].context


def test_threads(tracing: Tracing) -> None:
    def load(session: str) -> None:
        start(tracing, session)
        for _ in range(50):
            tracing.bus.emit(events.PHASE_START, session, phase="receive")
            tracing.bus.emit(events.PHASE_END, session, phase="receive", tensors=1, bytes=1)
        end(tracing, session)

    threads = [threading.Thread(target=load, args=(f"s{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tracing.spans) == 16
    assert all((span.attributes or {})["weightlife.tensor.count"] == 50 for span in tracing.phases)


def test_sessions_that_never_end_do_not_pile_up(tracing: Tracing) -> None:
    for index in range(MAX_OPEN_SESSIONS + 5):
        start(tracing, f"s{index}")
    assert len(tracing.spans) == 5
    start(tracing, "s20")  # the same id again ends the old one
    assert len(tracing.spans) == 6


def test_layers_that_are_slow_get_spans_within_the_budget(tracing: Tracing) -> None:
    start(tracing)
    tracing.phase("prepare")
    tracing.bus.emit(events.PHASE_START, "s1", phase="process_quant")
    time.sleep(0.01)
    for threshold in (0.5, 1e-4):
        tracing.listener.layer_seconds = threshold
        for index in range(40):
            tracing.bus.emit(
                events.LAYER_PROCESSED, "s1", layer=f"layers.{index}", hook="Method", seconds=1e-4 * index
            )
    tracing.bus.emit(events.PHASE_END, "s1", phase="process_quant")
    end(tracing)
    assert len(tracing.spans) == MAX_SPANS
    layers = [span for span in tracing.spans if span.name == "process_layer Method"]
    assert sorted((x.attributes or {})["weightlife.layer.name"] for x in layers) == [
        f"layers.{i}" for i in range(23, 40)
    ]
    (phase,) = (span for span in tracing.spans if span.name == "process_quant")
    assert all(span.parent == phase.context for span in layers)
    assert max((x.end_time or 0) - (x.start_time or 0) for x in layers) == 3_900_000


def test_every_layer_or_none(tracing: Tracing) -> None:
    for setting, count, want in (("all", 30, 30), ("off", 30, 0), ("all", 600, MAX_LAYER_SPANS)):
        tracing.exporter.clear()
        tracing.listener.layers = setting
        start(tracing)
        for index in range(count):
            tracing.bus.emit(events.LAYER_PROCESSED, "s1", layer=f"layers.{index}", seconds=0.0)
        end(tracing)
        assert sum(span.name == "process_layer" for span in tracing.spans) == want


def test_later_sessions_are_roots_with_links_to_the_first_load_and_the_one_before(tracing: Tracing) -> None:
    for session, operation in (("s1", "first_load"), ("s2", "reload"), ("s3", "update")):
        start(tracing, session, operation=operation)
        end(tracing, session)
    start(tracing, "s4", model="Other", operation="reload")
    end(tracing, "s4")
    first, reload, update, other = tracing.spans
    assert all(span.parent is None for span in tracing.spans)

    def links(span: ReadableSpan) -> dict[int, Any]:
        return {link.context.span_id: (link.attributes or {})["weightlife.link.kind"] for link in span.links}

    assert links(first) == {}
    assert links(reload) == {first.context.span_id: "first_load"}
    assert links(update) == {first.context.span_id: "first_load", reload.context.span_id: "previous"}
    assert links(other) == {}


@pytest.mark.parametrize("name", ["traceparent", "TRACEPARENT"])
def test_a_first_load_hangs_under_what_the_host_passed_on_and_nothing_else_does(
    tracing: Tracing, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    start(tracing, operation="first_load")
    end(tracing)
    start(tracing, "s2", operation="reload")
    end(tracing, "s2")
    first, reload = tracing.spans
    assert first.parent is not None
    assert first.parent.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert first.parent.span_id == 0xB7AD6B7169203331
    assert reload.parent is None
    assert reload.context.trace_id != first.context.trace_id


def test_the_report_knows_its_trace(tracing: Tracing) -> None:
    report = LoadReport(session_id="s1", model="M", operation="reload")
    tracing.bus.emit(events.SESSION_START, "s1", report=report)
    tracing.bus.emit(events.SESSION_END, "s1", report=report, outcome="committed")
    root = tracing.root
    assert root.name == "load_weights M"
    assert (int(report.trace_id, 16), int(report.span_id, 16)) == (
        root.context.trace_id,
        root.context.span_id,
    )


@pytest.mark.parametrize(
    "key", ["suppress_instrumentation", contexts._SUPPRESS_INSTRUMENTATION_KEY], ids=["named", "internal"]
)
def test_suppression_is_honoured(tracing: Tracing, key: str) -> None:
    token = contexts.attach(contexts.set_value(key, True))
    try:
        start(tracing)
        end(tracing)
    finally:
        contexts.detach(token)
    assert tracing.spans == ()


def test_a_disabled_sdk_is_honoured(tracing: Tracing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    start(tracing)
    tracing.phase("receive")
    end(tracing)
    assert tracing.spans == ()


def test_a_seed_repeats_no_id_and_the_hosts_random_stream_is_not_drawn_from(tracing: Tracing) -> None:
    for session in ("s1", "s2"):
        random.seed(0)
        start(tracing, session)
        tracing.phase("receive")
        end(tracing, session)
    assert len({span.context.span_id for span in tracing.spans}) == len(tracing.spans) == 3
    assert len({span.context.trace_id for span in tracing.spans}) == 2
    drawn = random.random()
    random.seed(0)
    assert random.random() == drawn
    mine = type("Mine", (RandomIdGenerator,), {})()
    provider = TracerProvider(id_generator=mine, shutdown_on_exit=False)
    ids.unseed(provider)
    assert provider.id_generator is mine  # somebody's own choice
    ids.unseed(object())


def test_no_exception_is_kept_for_the_delivery() -> None:
    """Its frames hold tensors, and an exporter may hang."""

    class Broken(ValueError):
        pass

    tracing = Tracing()
    release = threading.Event()
    tracing.listener.delivery.submit(release.wait)
    error = Broken("x")
    gone = weakref.ref(error)
    start(tracing)
    tracing.phase("receive", error=error)
    end(tracing, outcome="aborted", error=error)
    del error
    gc.collect()
    assert gone() is None
    release.set()
    assert len(tracing.spans) == 2


def test_events_of_an_unknown_session_are_ignored(tracing: Tracing) -> None:
    tracing.phase("receive")
    end(tracing)
    start(tracing)
    tracing.bus.emit(events.PHASE_END, "s1", phase="never started")
    tracing.bus.emit(events.LAYER_PROCESSED, "s1", layer="layers.0")
    tracing.bus.emit("some.later.event", "s1")
    end(tracing)
    end(tracing)
    assert len(tracing.spans) == 1


def test_values_of_the_wrong_type_are_left_out(tracing: Tracing) -> None:
    start(tracing, model=type("M", (), {}), rank="0", world_size=True, generation=1.5, source=None)
    tracing.bus.emit(events.VIOLATION, "s1", code=None, message=3, layer=None, tensors="abc")
    tracing.phase("receive", tensors="x", bytes=None)
    end(tracing, layers_by_strategy=3, peak_bytes=None, report=object())
    attributes = tracing.root.attributes or {}
    assert not {"weightlife.rank", "weightlife.world_size", "weightlife.weight.generation"} & set(attributes)


def test_no_tensor_value_or_name_reaches_a_span_name(tracing: Tracing) -> None:
    start(tracing)
    tracing.phase("receive", tensors=1, bytes=4)
    tracing.bus.emit(events.LAYER_PROCESSED, "s1", layer="secret.layer", seconds=1.0)
    tracing.bus.emit(events.VIOLATION, "s1", code="WL203", message="x", tensors=["secret.weight"])
    end(tracing)
    assert not any("secret" in span.name for span in tracing.spans)


def test_a_session_that_is_not_sampled_costs_nothing() -> None:
    tracing = Tracing(sampler=ALWAYS_OFF)
    start(tracing)
    tracing.phase("receive")
    assert not tracing.listener._sessions
    end(tracing)
    assert tracing.spans == ()
    assert tracing.bus.listener_errors == 0


def test_a_broken_processor_neither_fails_the_load_nor_leaks() -> None:
    class Broken(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            raise RuntimeError("exporter")

    tracing = Tracing()
    tracing.provider.add_span_processor(Broken())
    start(tracing)
    tracing.phase("receive")
    end(tracing)
    assert tracing.root.end_time is not None
    assert tracing.bus.listener_errors == 0
    assert tracing.listener.delivery.failed == 1
    assert not tracing.listener._sessions


def test_without_an_sdk() -> None:
    """In a process of its own: the API without a provider, and without the SDK being importable."""
    code = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
from weightlife._engine import events
from weightlife.otel.spans import SpanListener
listener = SpanListener()
stop = listener.subscribe()
for _ in range(3):
    events.bus.emit(events.SESSION_START, "s1", model="M")
    events.bus.emit(events.PHASE_START, "s1", phase="receive")
    events.bus.emit(events.VIOLATION, "s1", code="WL201", message="x")
    events.bus.emit(events.PHASE_END, "s1", phase="receive")
    events.bus.emit(events.SESSION_END, "s1", outcome="aborted", error=ValueError("x"))
stop()
assert events.bus.listener_errors == 0
assert not events.bus.active
assert not listener._sessions
assert "opentelemetry.sdk" not in sys.modules and "yaml" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_provider_that_comes_later_is_picked_up() -> None:
    code = """
from weightlife._engine import events
from weightlife.otel.spans import SpanListener
listener = SpanListener()
listener.subscribe()
def session():
    events.bus.emit(events.SESSION_START, "s1", model="M")
    events.bus.emit(events.SESSION_END, "s1", outcome="committed")
session()
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
assert trace.get_tracer_provider() is provider  # nobody had set one
session()
assert listener.delivery.drain(10)
assert [span.name for span in exporter.get_finished_spans()] == ["load_weights M"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRegistry:
    def test_the_generated_names_are_those_of_the_registry(self) -> None:
        assert generate_names.TARGET.read_text(encoding="utf-8") == generate_names.generate(GROUPS)

    def test_the_reference_in_the_documentation_is_generated_from_it(self) -> None:
        page = generate_names.PAGE.read_text(encoding="utf-8")
        assert page == generate_names.with_reference(page, GROUPS)
        for name in [*ATTRIBUTES, *names.UNITS]:
            assert f"`{name}" in page

    def test_names_follow_the_conventions(self) -> None:
        for name in ATTRIBUTES:
            assert re.fullmatch(r"weightlife(\.[a-z][a-z0-9]*(_[a-z0-9]+)*)+", name), name
            assert "total" not in name
        for name in ATTRIBUTES:
            assert not any(other.startswith(f"{name}.") for other in ATTRIBUTES), (
                f"{name} is also a namespace"
            )

    def test_every_attribute_is_described(self) -> None:
        for attribute in ATTRIBUTES.values():
            assert attribute["stability"] == "development"
            assert attribute["brief"].endswith(".")
            assert isinstance(attribute["type"], dict) or attribute["examples"]

    def test_every_reference_is_defined_and_every_attribute_used(self) -> None:
        referred = {a["ref"] for group in GROUPS for a in group["attributes"] if "ref" in a}
        assert referred - {"error.type"} == set(ATTRIBUTES)
        assert set(names.TYPES) == referred

    def test_spans_are_internal(self) -> None:
        kinds = [group["span_kind"] for group in GROUPS if group["type"] == "span"]
        assert set(kinds) == {"internal"}

    def test_enumerations_are_those_of_the_report(self) -> None:
        def values(name: str) -> set[str]:
            return {member["value"] for member in ATTRIBUTES[name]["type"]["members"]}

        assert values("weightlife.session.operation") == set(OPERATIONS)
        assert values("weightlife.session.outcome") == set(OUTCOMES)
        assert values("weightlife.activity.name") == set(ATTRIBUTED)

    def test_events_that_are_emitted_are_declared(self) -> None:
        declared = {group["name"] for group in GROUPS if group["type"] == "event"}
        assert declared == {names.EVENT_VIOLATION, names.EVENT_NOTE}
