# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from weightlife import errors
from weightlife._engine import events
from weightlife._engine.events import Bus, Event
from weightlife.otel import generate_names, names
from weightlife.otel.spans import MAX_OPEN_SESSIONS, MAX_SPAN_EVENTS, MAX_SPANS, SpanListener
from weightlife.report import OPERATIONS, OUTCOMES, LoadReport

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = generate_names.load_registry()
ATTRIBUTES = {a["id"]: a for group in GROUPS for a in group["attributes"] if "id" in a}


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
    allowed = {g["id"]: {a["ref"] for a in g["attributes"] if "ref" in a} for g in GROUPS}
    kinds = {"string": str, "int": int, "double": float, "template[int]": int}
    for span in spans:
        group = (
            "span.weightlife.phase"
            if span.parent and span.name != "load_weights"
            else "span.weightlife.session"
        )
        holders = [(group, span.attributes or {})]
        holders += [(f"event.{e.name}", e.attributes or {}) for e in span.events if e.name != "exception"]
        for holder, attributes in holders:
            for name, value in attributes.items():
                declared = name if name in names.TYPES else name.rpartition(".")[0]
                assert declared in allowed[holder], (holder, name)
                kind = names.TYPES[declared]
                assert declared == name or kind.startswith("template")
                if kind == "string[]":
                    assert isinstance(value, tuple)
                    assert all(type(item) is str for item in value)
                else:
                    assert type(value) is kinds[kind], (name, value)


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
        "weightlife.layer.touched": 24,
        "weightlife.layer.untouched": 0,
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
    assert tracing.bus.listener_errors == 1
    assert not tracing.listener._sessions
    assert tracing.root.end_time is not None


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
SpanListener().subscribe()
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
assert [span.name for span in exporter.get_finished_spans()] == ["load_weights M"]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRegistry:
    def test_the_generated_names_are_those_of_the_registry(self) -> None:
        assert generate_names.TARGET.read_text(encoding="utf-8") == generate_names.generate(GROUPS)

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
        assert kinds == ["internal", "internal"]

    def test_enumerations_are_those_of_the_report(self) -> None:
        def values(name: str) -> set[str]:
            return {member["value"] for member in ATTRIBUTES[name]["type"]["members"]}

        assert values("weightlife.session.operation") == set(OPERATIONS)
        assert values("weightlife.session.outcome") == set(OUTCOMES)

    def test_events_that_are_emitted_are_declared(self) -> None:
        declared = {group["name"] for group in GROUPS if group["type"] == "event"}
        assert declared == {names.EVENT_VIOLATION, names.EVENT_NOTE}
