# SPDX-License-Identifier: Apache-2.0
"""Spans of sessions: one root span a session and rank, a child a phase, violations as events.

The listener uses the OpenTelemetry API only. Without an SDK every span is a no-op and costs next to nothing;
a provider that is set up later (by the host, by auto-instrumentation) is picked up then, and none is ever
set here. Names come from the registry beside this file.

Phases become spans when the session ends, from the times that the events carried: only then is it known
whether a phase ran once or once for each of 290 chunks, and a session stays within ``MAX_SPANS``.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from weightlife import errors
from weightlife._engine import events
from weightlife.otel import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.util.types import Attributes, AttributeValue

    from weightlife._engine.events import Bus, Event

__all__ = ["MAX_SPANS", "SpanListener"]

MAX_SPANS = 20
"""Spans a session, the root included."""
MAX_SPAN_EVENTS = 100
"""Events of a root span; the SDK drops the oldest beyond 128, and says so to nobody."""
MAX_OPEN_SESSIONS = 64
"""Sessions followed at once; a session whose end never comes is ended when this many newer ones began."""

_SCOPE = "weightlife"
_ROOT = "load_weights"
_FAILED = frozenset({"aborted", "refused", "poisoned"})
_TEXT = 1000

_START = {
    names.SESSION_OPERATION: "operation",
    names.SESSION_SOURCE: "source",
    names.SESSION_OPENED_BY: "opened_by",
    names.SESSION_ISOLATION: "isolation",
    names.SESSION_STORAGE: "storage",
    names.MODEL_CLASS: "model",
    names.WEIGHT_GENERATION: "generation",
    names.RANK: "rank",
    names.WORLD_SIZE: "world_size",
}
_END = {
    **_START,
    names.SESSION_OUTCOME: "outcome",
    names.TENSOR_COUNT: "tensors_received",
    names.TENSOR_SIZE: "bytes_received",
    names.LAYER_TOUCHED: "layers_touched",
    names.LAYER_UNTOUCHED: "layers_untouched",
    names.MEMORY_PEAK: "peak_bytes",
}


@dataclass
class _Run:
    """One run of a phase, or several folded into one; times in nanoseconds since the epoch."""

    start: int
    end: int = 0
    busy: int = 0
    calls: int = 1
    tensors: int = 0
    size: int = 0
    error: object = None


@dataclass
class _Phase:
    """All runs of one phase: the first few one by one, and their sum."""

    runs: list[_Run] = field(default_factory=list)
    total: _Run | None = None
    open: list[_Run] = field(default_factory=list)


@dataclass
class _Session:
    span: Span
    wall_ns: int
    time_ns: int
    phases: dict[str, _Phase] = field(default_factory=dict)
    span_events: int = 0
    suppressed: int = 0
    violations: int = 0

    def at(self, event: Event) -> int:
        """The event's date, counted from the session's start by the steady clock: a clock step can't reorder."""
        return self.wall_ns + event.time_ns - self.time_ns


class SpanListener:
    """Makes spans of the events of a bus.

    Thread-safe. It raises nothing by itself; what a span processor raises, the bus counts and reports. With a
    ``tracer_provider`` spans go there, else to the provider that is global at the time.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._provider = tracer_provider
        self._tracer: Tracer | None = None
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[Event, _Session], None]] = {
            events.SESSION_END: self._end,
            events.PHASE_START: self._phase_start,
            events.PHASE_END: self._phase_end,
            events.VIOLATION: self._violation,
            events.NOTE: self._note,
        }

    def subscribe(self, bus: Bus = events.bus) -> Callable[[], None]:
        """Listen to ``bus``; returns the function that ends it."""
        return bus.subscribe(self)

    def __call__(self, event: Event) -> None:
        """Take one event of the bus."""
        with self._lock:
            if event.name == events.SESSION_START:
                self._start(event)
                return
            handler = self._handlers.get(event.name)
            session = self._sessions.get(event.session_id)
            if handler is None or session is None:
                return
            handler(event, session)

    def _start(self, event: Event) -> None:
        if self._tracer is None:
            # a proxy until a provider is set, and that provider's tracer from then on
            self._tracer = trace.get_tracer(_SCOPE, _version(), self._provider)
        stale = self._sessions.pop(event.session_id, None)
        if stale is None and len(self._sessions) >= MAX_OPEN_SESSIONS:
            _, stale = self._sessions.popitem(last=False)
        if stale is not None:
            stale.span.end(max(stale.wall_ns, stale.at(event)))
        model = _text(event.data.get("model"))
        span = self._tracer.start_span(
            f"{_ROOT} {model}" if model else _ROOT,
            kind=SpanKind.INTERNAL,
            attributes={names.SESSION_ID: _text(event.session_id), **_collect(_START, event.data)},
            start_time=event.wall_ns,
        )
        # a span that was not sampled, or has no SDK, is not worth following
        if span.is_recording():
            self._sessions[event.session_id] = _Session(span, event.wall_ns, event.time_ns)

    def _phase_start(self, event: Event, session: _Session) -> None:
        phase = session.phases.setdefault(_text(event.data.get("phase")) or "unknown", _Phase())
        phase.open.append(_Run(session.at(event)))

    def _phase_end(self, event: Event, session: _Session) -> None:
        phase = session.phases.get(_text(event.data.get("phase")) or "unknown")
        if phase is not None and phase.open:
            _close(phase, session.at(event), event.data)

    def _violation(self, event: Event, session: _Session) -> None:
        session.violations += 1
        tensors = event.data.get("tensors")
        listed = [_text(name) for name in tensors] if isinstance(tensors, list | tuple) else []
        attributes: dict[str, AttributeValue] = {
            names.VIOLATION_KIND: _text(event.data.get("code")),
            names.MESSAGE: _text(event.data.get("message")),
        }
        if event.data.get("layer"):
            attributes[names.VIOLATION_LAYER] = _text(event.data["layer"])
        if listed:
            attributes[names.VIOLATION_TENSORS] = listed[: errors.TENSORS_SHOWN]
            attributes[names.VIOLATION_TENSOR_COUNT] = len(listed)
        _add_event(session, event, names.EVENT_VIOLATION, attributes)

    def _note(self, event: Event, session: _Session) -> None:
        _add_event(session, event, names.EVENT_NOTE, {names.MESSAGE: _text(event.data.get("message"))})

    def _end(self, event: Event, session: _Session) -> None:
        del self._sessions[event.session_id]
        end = session.at(event)
        try:
            self._finish(event, session, end)
        finally:
            session.span.end(end)

    def _finish(self, event: Event, session: _Session, end: int) -> None:
        span, data = session.span, event.data
        outcome = _value(data, "outcome")
        error = _value(data, "error") or None
        failed = error is not None or outcome in _FAILED
        for phase in session.phases.values():
            while phase.open:
                # a phase without an end is the one that the failure interrupted
                _close(phase, end, {"error": error if error is not None or not failed else outcome})
        span.set_attributes(_collect(_END, data))
        for strategy, count in _strategies(data):
            span.set_attribute(f"{names.LAYER_STRATEGY}.{strategy}", count)
        span.set_attribute(names.VIOLATION_COUNT, session.violations)
        if session.suppressed:
            span.set_attribute(names.SESSION_SUPPRESSED_EVENT_COUNT, session.suppressed)
        if failed:
            _fail(span, error, _text(outcome))
            _record_exception(span, error, end)
        self._phase_spans(event.session_id, session)

    def _phase_spans(self, session_id: str, session: _Session) -> None:
        assert self._tracer is not None
        context = trace.set_span_in_context(session.span)
        for name, run in _within_budget(session.phases, MAX_SPANS - 1):
            attributes: dict[str, AttributeValue] = {
                names.PHASE: name,
                names.SESSION_ID: _text(session_id),
                names.CALL_COUNT: run.calls,
                names.CALL_DURATION: run.busy / 1e9,
            }
            if run.tensors or run.size:
                attributes[names.TENSOR_COUNT] = run.tensors
                attributes[names.TENSOR_SIZE] = run.size
            span = self._tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=run.start)
            try:
                if run.error is not None:
                    _fail(span, run.error, "")
            finally:
                span.end(run.end)


def _close(phase: _Phase, end: int, data: Mapping[str, object]) -> None:
    run = phase.open.pop()
    run.end = max(end, run.start)
    run.busy = run.end - run.start
    run.tensors = _count(data.get("tensors"))
    run.size = _count(data.get("bytes"))
    run.error = data.get("error")
    total = phase.total
    if total is None:
        phase.total = _Run(run.start, run.end, run.busy, 1, run.tensors, run.size, run.error)
    else:
        total.start = min(total.start, run.start)
        total.end = max(total.end, run.end)
        total.busy += run.busy
        total.calls += 1
        total.tensors += run.tensors
        total.size += run.size
        total.error = run.error if run.error is not None else total.error
    if len(phase.runs) < MAX_SPANS:
        phase.runs.append(run)


def _within_budget(phases: Mapping[str, _Phase], budget: int) -> Iterable[tuple[str, _Run]]:
    """At most ``budget`` runs: the phases with most runs are folded first, then the last phases left out."""
    totals = {name: phase.total for name, phase in phases.items() if phase.total is not None}
    folded: set[str] = set()
    for name in sorted(totals, key=lambda name: totals[name].calls, reverse=True):
        if sum(1 if other in folded else total.calls for other, total in totals.items()) <= budget:
            break
        folded.add(name)
    chosen = [
        (name, run)
        for name, total in totals.items()
        for run in ([total] if name in folded else phases[name].runs)
    ]
    return sorted(chosen, key=lambda item: item[1].start)[:budget]


def _add_event(session: _Session, event: Event, name: str, attributes: Attributes) -> None:
    if session.span_events >= MAX_SPAN_EVENTS:
        session.suppressed += 1
        return
    session.span_events += 1
    session.span.add_event(name, attributes, session.at(event))


def _fail(span: Span, error: object, fallback: str) -> None:
    span.set_attribute(names.ERROR_TYPE, _error_type(error))
    span.set_status(Status(StatusCode.ERROR, _text(error) if error is not None else fallback))


def _error_type(error: object) -> str:
    """Qualified class name; of an error that came as text, the class that its code tells."""
    if isinstance(error, str):
        error = errors.from_message(error)
    if not isinstance(error, BaseException):
        return "_OTHER"
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _record_exception(span: Span, error: object, at: int) -> None:
    # exceptions as span events are on their way out; who has opted for logs only gets none
    wanted = os.environ.get("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", "").split(",")
    if isinstance(error, Exception) and "logs" not in (item.strip() for item in wanted):
        span.record_exception(error, timestamp=at)


def _value(data: Mapping[str, object], key: str) -> object:
    if key in data:
        return data[key]
    return getattr(data.get("report"), key, None)


def _collect(table: Mapping[str, str], data: Mapping[str, object]) -> dict[str, AttributeValue]:
    """Attributes that ``data`` has a value for, each in the registry's type; what does not fit is left out."""
    found: dict[str, AttributeValue] = {}
    for name, key in table.items():
        value = _value(data, key)
        if names.TYPES[name] == "int":
            if isinstance(value, int) and not isinstance(value, bool):
                found[name] = value
        elif value is not None and value != "":
            found[name] = _text(value)
    return found


def _strategies(data: Mapping[str, object]) -> list[tuple[str, int]]:
    counts = _value(data, "layers_by_strategy")
    if not isinstance(counts, Mapping):
        return []
    return [(_text(name), _count(count)) for name, count in counts.items()]


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _text(value: object) -> str:
    return "" if value is None else errors.clean(value, _TEXT)


def _version() -> str:
    import weightlife

    package: Any = weightlife
    return str(getattr(package, "__version__", ""))
