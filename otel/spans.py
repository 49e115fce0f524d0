# SPDX-License-Identifier: Apache-2.0
"""Spans of sessions: one root span a session and rank, a child a phase, violations as events.

The listener uses the OpenTelemetry API only. Without an SDK every span is a no-op and costs next to nothing;
a provider that is set up later (by the host, by auto-instrumentation) is picked up then, and none is ever
set here. Names come from the registry beside this file.

The root's parent is the span that is current when the session begins: the host's own, or the one that the front end
sent along. A first load that finds none takes the variable that the host passes to its workers. Any other session is
a root of its own: the variable stays in a worker's environment for ever, and names a span that ended long ago. Later
sessions are linked to the first load and to the one before.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.trace import Link, SpanContext, SpanKind

from weightlife import errors
from weightlife._engine import events
from weightlife._version import __version__
from weightlife.otel import names
from weightlife.otel.delivery import Delivery
from weightlife.otel.ids import unseed
from weightlife.otel.recording import MAX_LAYER_SPANS, MAX_SPANS, Recording, fail
from weightlife.otel.values import START, collect, failure, of_report, operation, outcome_of, text, value
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider
    from opentelemetry.util.types import Attributes, AttributeValue

    from weightlife._engine.events import Bus, Event

__all__ = ["MAX_LAYER_SPANS", "MAX_SPANS", "SpanListener", "suppressed"]

MAX_SPAN_EVENTS = 100
"""Events of a root span; the SDK drops the oldest beyond 128, and says so to nobody."""
MAX_OPEN_SESSIONS = 64
"""Sessions followed at once; a session whose end never comes is ended when this many newer ones began."""

SCOPE = "weightlife"
_ROOT = "load_weights"
_MODELS = 64  # models whose earlier sessions are remembered for links
_HEADERS = ("traceparent", "tracestate")
# The plain key is opentelemetry-instrumentation's, the other one the API's.
_SUPPRESSED = ("suppress_instrumentation", getattr(contexts, "_SUPPRESS_INSTRUMENTATION_KEY", ""))


def suppressed() -> bool:
    """Whether the caller asked for silence (`suppress_instrumentation()`), or the user for no SDK."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return True
    return any(key and contexts.get_value(key) for key in _SUPPRESSED)


class SpanListener:
    """Makes spans of the events of a bus.

    Thread-safe. It raises nothing by itself; what a span processor raises at a span's start the bus counts and
    reports, what it raises at an end the delivery does.

    Args:
        tracer_provider: spans go there, else to the provider that is global at the time.
        delivery: finishes and flushes spans off the load's path.
        layers: "off", "slow" (those whose hook took `layer_seconds`, within the session's budget) or "all".
        layer_seconds: the threshold.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        delivery: Delivery | None = None,
        layers: str = "slow",
        layer_seconds: float = 0.1,
    ) -> None:
        self.layers = layers
        self.layer_seconds = layer_seconds
        self.delivery = delivery or Delivery()
        self._provider = tracer_provider
        self._tracer: Tracer | None = None
        self._sessions: OrderedDict[str, Recording] = OrderedDict()
        self._earlier: OrderedDict[str, dict[str, SpanContext]] = OrderedDict()
        self._lock = threading.Lock()
        self._handlers: dict[str, Callable[[Event, Recording], None]] = {
            events.SESSION_END: self._end,
            events.PHASE_START: lambda event, session: session.phase_start(event),
            events.PHASE_END: lambda event, session: session.phase_end(event),
            events.LAYER_PROCESSED: self._layer,
            events.VIOLATION: self._violation,
            events.NOTE: self._note,
        }

    def subscribe(self, bus: Bus = events.bus) -> Callable[[], None]:
        """Listen to ``bus``; returns the function that ends it."""
        return bus.subscribe(self)

    def provider(self) -> TracerProvider:
        """Where spans go now."""
        return self._provider or trace.get_tracer_provider()

    def tracer(self) -> Tracer:
        """The tracer of our scope. Its ids don't repeat where the host seeds Python's `random`."""
        unseed(self.provider())
        return trace.get_tracer(SCOPE, __version__, self._provider)

    def flush(self) -> None:
        """Export what has ended. Blocks as long as an exporter does: for the delivery's thread only."""
        flush = getattr(self.provider(), "force_flush", None)
        if flush is not None:
            flush()

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

    # -- the root ----------------------------------------------------------------------------------------------

    def _start(self, event: Event) -> None:
        stale = self._sessions.pop(event.session_id, None)
        if stale is None and len(self._sessions) >= MAX_OPEN_SESSIONS:
            _, stale = self._sessions.popitem(last=False)
        if stale is not None:
            stale.span.end(max(stale.wall_ns, stale.at(event)))
        if suppressed():
            return
        if self._tracer is None or self._provider is None:
            # taken anew: the global provider may have been set since
            self._tracer = self.tracer()
        model = text(value(event.data, "model"))
        first_load = operation(event.data) == "first_load"
        span = self._tracer.start_span(
            f"{_ROOT} {model}" if model else _ROOT,
            _parent(first_load),
            kind=SpanKind.INTERNAL,
            attributes={names.SESSION_ID: text(event.session_id), **collect(START, event.data)},
            links=[] if first_load else self._links(model),
            start_time=event.wall_ns,
        )
        # a span that was not sampled, or has no SDK, is not worth following
        if not span.is_recording():
            return
        self._sessions[event.session_id] = Recording(span, event.wall_ns, event.time_ns, model, first_load)
        report = event.data.get("report")
        if isinstance(report, LoadReport):
            found = span.get_span_context()
            report.trace_id, report.span_id = f"{found.trace_id:032x}", f"{found.span_id:016x}"

    def _links(self, model: str) -> list[Link]:
        earlier = self._earlier.get(model, {})
        chosen = {found.span_id: (found, kind) for kind, found in reversed(earlier.items())}
        return [Link(found, {names.LINK_KIND: kind}) for found, kind in chosen.values()]

    def _remember(self, session: Recording) -> None:
        earlier = self._earlier.setdefault(session.model, {})
        if session.first_load:
            earlier.clear()
            earlier["first_load"] = session.span.get_span_context()
        earlier["previous"] = session.span.get_span_context()
        if len(self._earlier) > _MODELS:
            self._earlier.popitem(last=False)

    def _end(self, event: Event, session: Recording) -> None:
        del self._sessions[event.session_id]
        self._remember(session)
        end, span, tracer = session.at(event), session.span, self._tracer
        assert tracer is not None
        outcome, error, failed = outcome_of(event.data)
        session.interrupt(end, (error if error is not None else outcome) if failed else None)
        span.set_attributes(of_report(event.data))
        span.set_attribute(names.VIOLATION_COUNT, session.violations)
        if session.suppressed:
            span.set_attribute(names.SESSION_SUPPRESSED_EVENT_COUNT, session.suppressed)
        if failed:
            fail(span, failure(error, outcome))
            _record_exception(span, error, end)
        every_layer, session_id = self.layers == "all", event.session_id

        def finish() -> None:
            try:
                session.children(tracer, session_id, every_layer)
            finally:
                span.end(end)

        self.delivery.submit(finish)

    # -- what happens in between -------------------------------------------------------------------------------

    def _layer(self, event: Event, session: Recording) -> None:
        if self.layers != "off":
            session.layer(event, 0.0 if self.layers == "all" else self.layer_seconds)

    def _violation(self, event: Event, session: Recording) -> None:
        session.violations += 1
        tensors = event.data.get("tensors")
        listed = [text(name) for name in tensors] if isinstance(tensors, list | tuple) else []
        attributes: dict[str, AttributeValue] = {
            names.VIOLATION_KIND: text(event.data.get("code")),
            names.MESSAGE: text(event.data.get("message")),
        }
        if event.data.get("layer"):
            attributes[names.VIOLATION_LAYER] = text(event.data["layer"])
        if listed:
            attributes[names.VIOLATION_TENSORS] = listed[: errors.TENSORS_SHOWN]
            attributes[names.VIOLATION_TENSOR_COUNT] = len(listed)
        _add_event(session, event, names.EVENT_VIOLATION, attributes)

    def _note(self, event: Event, session: Recording) -> None:
        _add_event(session, event, names.EVENT_NOTE, {names.MESSAGE: text(event.data.get("message"))})


def _parent(first_load: bool) -> Context | None:
    """None: the current context, with a span or without. A first load may hang under what the host passed on."""
    if not first_load or trace.get_current_span().get_span_context().is_valid:
        return None
    carrier = {}
    for name in _HEADERS:
        given = os.environ.get(name) or os.environ.get(name.upper())
        if given:
            carrier[name] = given
    return propagate.extract(carrier) if carrier else None


def _add_event(session: Recording, event: Event, name: str, attributes: Attributes) -> None:
    if session.span_events >= MAX_SPAN_EVENTS:
        session.suppressed += 1
        return
    session.span_events += 1
    session.span.add_event(name, attributes, session.at(event))


def _record_exception(span: Span, error: object, at: int) -> None:
    # exceptions as span events are on their way out; who has opted for logs only gets none
    wanted = os.environ.get("OTEL_SEMCONV_EXCEPTION_SIGNAL_OPT_IN", "").split(",")
    if isinstance(error, Exception) and "logs" not in (item.strip() for item in wanted):
        span.record_exception(error, timestamp=at)
