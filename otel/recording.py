# SPDX-License-Identifier: Apache-2.0
"""What is remembered of a session until its end, and the spans that are made of it then.

Phases become spans at the end: only then is it known whether a phase ran once or once for each of 290 chunks, and a
session stays within `MAX_SPANS`. All times are nanoseconds since the epoch, counted from the session's start by the
steady clock: a step of the wall clock can't reorder them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from weightlife.otel import names
from weightlife.otel.values import count, failure, text

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from weightlife._engine.events import Event

__all__ = ["MAX_LAYER_SPANS", "MAX_SPANS", "Recording", "fail"]

MAX_SPANS = 20
"""Spans a session, the root included, unless every layer was asked for."""
MAX_LAYER_SPANS = 512
"""Layer spans a session where every layer was asked for; the slowest stay."""
_LAYER = "process_layer"


@dataclass(eq=False, repr=False)
class _Run:
    """One run of a phase, or several folded into one."""

    start: int
    end: int = 0
    busy: int = 0
    calls: int = 1
    tensors: int = 0
    size: int = 0
    error: tuple[str, str] | None = None


@dataclass(eq=False, repr=False)
class _Phase:
    """All runs of one phase: the first few one by one, and their sum."""

    runs: list[_Run] = field(default_factory=list)
    total: _Run | None = None
    open: list[_Run] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class _Layer:
    path: str
    hook: str
    start: int
    end: int


@dataclass
class Recording:
    """One session that is being followed."""

    span: Span
    wall_ns: int
    time_ns: int
    model: str = ""
    first_load: bool = False
    phases: dict[str, _Phase] = field(default_factory=dict)
    layers: list[_Layer] = field(default_factory=list)
    span_events: int = 0
    suppressed: int = 0
    violations: int = 0

    def at(self, event: Event) -> int:
        """The event's date."""
        return self.wall_ns + event.time_ns - self.time_ns

    def phase_start(self, event: Event) -> None:
        """A phase begins."""
        phase = self.phases.setdefault(text(event.data.get("phase")) or "unknown", _Phase())
        phase.open.append(_Run(self.at(event)))

    def phase_end(self, event: Event) -> None:
        """A phase ends; one that never began is ignored."""
        phase = self.phases.get(text(event.data.get("phase")) or "unknown")
        if phase is not None and phase.open:
            _close(phase, self.at(event), event.data)

    def layer(self, event: Event, at_least: float) -> None:
        """A layer was processed in `event.data["seconds"]`, just now."""
        seconds = event.data.get("seconds")
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds < at_least:
            return
        end = self.at(event)
        self.layers.append(
            _Layer(text(event.data.get("layer")), text(event.data.get("hook")), end - int(seconds * 1e9), end)
        )

    def interrupt(self, end: int, error: object) -> None:
        """A phase without an end is the one that the failure interrupted."""
        for phase in self.phases.values():
            while phase.open:
                _close(phase, end, {"error": error})

    def children(self, tracer: Tracer, session_id: str, every_layer: bool) -> None:
        """Make the spans of phases and layers."""
        made = list(self._phase_spans(tracer, session_id))
        budget = MAX_LAYER_SPANS if every_layer else MAX_SPANS - 1 - len(made)
        slowest = sorted(self.layers, key=lambda layer: layer.start - layer.end)[: max(0, budget)]
        for layer in sorted(slowest, key=lambda layer: layer.start):
            inside = [
                (run.end - run.start, span)
                for span, run in made
                if run.start <= layer.start and layer.end <= run.end
            ]
            parent = min(inside, key=lambda item: item[0])[1] if inside else self.span
            attributes: dict[str, AttributeValue] = {
                names.LAYER_NAME: layer.path,
                names.SESSION_ID: text(session_id),
            }
            if layer.hook:
                attributes[names.LAYER_HOOK] = layer.hook
            tracer.start_span(
                f"{_LAYER} {layer.hook}" if layer.hook else _LAYER,
                trace.set_span_in_context(parent), SpanKind.INTERNAL, attributes, start_time=layer.start,
            ).end(layer.end)  # fmt: skip

    def _phase_spans(self, tracer: Tracer, session_id: str) -> Iterable[tuple[Span, _Run]]:
        context = trace.set_span_in_context(self.span)
        for name, run in _within_budget(self.phases, MAX_SPANS - 1):
            attributes: dict[str, AttributeValue] = {
                names.PHASE: name,
                names.SESSION_ID: text(session_id),
                names.CALL_COUNT: run.calls,
                names.CALL_DURATION: run.busy / 1e9,
            }
            if run.tensors or run.size:
                attributes[names.TENSOR_COUNT] = run.tensors
                attributes[names.TENSOR_SIZE] = run.size
            span = tracer.start_span(name, context, SpanKind.INTERNAL, attributes, start_time=run.start)
            if run.error is not None:
                fail(span, run.error)
            span.end(run.end)
            yield span, run


def fail(span: Span, error: tuple[str, str]) -> None:
    """Mark a span as failed, with what `values.failure` made of the error."""
    span.set_attribute(names.ERROR_TYPE, error[0])
    span.set_status(Status(StatusCode.ERROR, error[1]))


def _close(phase: _Phase, end: int, data: Mapping[str, object]) -> None:
    run = phase.open.pop()
    run.end = max(end, run.start)
    run.busy = run.end - run.start
    run.tensors = count(data.get("tensors"))
    run.size = count(data.get("bytes"))
    error = data.get("error")
    run.error = None if error is None else failure(error)
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
