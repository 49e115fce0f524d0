# SPDX-License-Identifier: Apache-2.0
"""The spans of one session as OTLP/JSON, from the events of the bus: a root, and a child for each run of a phase.

Apart from ``otel.spans`` on purpose: what is stored must depend neither on whether an SDK is set up nor on how it
samples, and must not take part in its export. Where a span was recorded there, its ids are taken over, so that a stored
session is found again in a tracing backend. Names come from the same registry.

The encoding is the specification's "JSON Protobuf Encoding": lower camel case, ids in hexadecimal, 64-bit integers as
text, enumerations as numbers; tests decode it with the official message types. One message is one line, which is what
OpenTelemetry's file exporters write and the collector's ``otlpjsonfile`` receiver reads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from weightlife._engine import events
from weightlife.errors import clean
from weightlife.otel import names, values

if TYPE_CHECKING:
    from weightlife._engine.events import Event
    from weightlife.report import LoadReport

__all__ = ["MAX_RUNS", "SessionTrace"]

MAX_RUNS = 64
"""Runs of one phase that are kept one by one; later ones lengthen the last, which counts how many it stands for."""
_MAX_FACTS = 100
_TEXT = 1000
_SPAN_KIND_INTERNAL = 1
_STATUS_ERROR = 2


@dataclass
class _Run:
    """One run of a phase, or several folded into one. Nanoseconds since the epoch; ``busy`` is time inside."""

    phase: str
    start: int
    end: int = 0
    busy: int = 0
    calls: int = 1


@dataclass
class SessionTrace:
    """What is remembered of one open session. Not thread-safe: the writer's listener holds a lock."""

    wall_ns: int
    time_ns: int
    parent: trace.SpanContext = trace.INVALID_SPAN_CONTEXT
    runs: list[_Run] = field(default_factory=list)
    running: list[_Run] = field(default_factory=list)
    facts: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    layer_seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begun(cls, event: Event) -> SessionTrace:
        """From ``session.start``. A span that is current then is the parent."""
        return cls(event.wall_ns, event.time_ns, trace.get_current_span().get_span_context())

    def take(self, event: Event) -> None:
        """Any event between start and end."""
        at, data = self._at(event), event.data
        if event.name == events.PHASE_START:
            self.running.append(_Run(str(data.get("phase") or "unknown"), at))
        elif event.name == events.PHASE_END:
            self._phase_end(str(data.get("phase") or "unknown"), at)
        elif event.name == events.LAYER_PROCESSED:
            layer, seconds = str(data.get("layer")), data.get("seconds")
            if isinstance(seconds, float):
                self.layer_seconds[layer] = self.layer_seconds.get(layer, 0.0) + seconds
        elif event.name in (events.VIOLATION, events.NOTE) and len(self.facts) < _MAX_FACTS:
            more = {names.MESSAGE: data.get("message")}
            if event.name == events.VIOLATION:
                more |= {
                    names.VIOLATION_KIND: data.get("code"),
                    names.VIOLATION_LAYER: data.get("layer") or None,
                }
            kind = names.EVENT_VIOLATION if event.name == events.VIOLATION else names.EVENT_NOTE
            self.facts.append((at, kind, more))

    def _at(self, event: Event) -> int:
        """The event's date, counted from the start by the steady clock: a clock step can't reorder."""
        return self.wall_ns + event.time_ns - self.time_ns

    def _phase_end(self, phase: str, at: int) -> None:
        run = next((run for run in reversed(self.running) if run.phase == phase), None)
        if run is None:
            return
        self.running.remove(run)
        run.end = max(at, run.start)
        run.busy = run.end - run.start
        same = [other for other in self.runs if other.phase == phase]
        if len(same) < MAX_RUNS:
            self.runs.append(run)
        else:
            last = same[-1]
            last.end, last.busy, last.calls = run.end, last.busy + run.busy, last.calls + 1

    def encode(
        self, event: Event, report: LoadReport, resource: Mapping[str, Any], version: str
    ) -> dict[str, Any]:
        """One ``TracesData`` message, at ``session.end``. A phase without an end is the one that a failure stopped."""
        end = max(self._at(event), self.wall_ns)
        failed = report.outcome in values.FAILED or bool(report.error)
        trace_id = _hex(getattr(report, "trace_id", ""), 32)
        root_id = _hex(getattr(report, "span_id", ""), 16) or os.urandom(8).hex()
        above = self.parent if self.parent.is_valid else None
        if above is not None and trace_id in ("", f"{above.trace_id:032x}"):
            trace_id = f"{above.trace_id:032x}"
        else:
            above, trace_id = None, trace_id or os.urandom(16).hex()
        root = {
            "traceId": trace_id,
            "spanId": root_id,
            "name": _text(f"load_weights {report.model}" if report.model else "load_weights"),
            **_common(self.wall_ns, end, {**{key: getattr(report, of, None) for key, of in values.END.items()},
                                          names.SESSION_ID: event.session_id,
                                          names.VIOLATION_COUNT: len(report.violations)}),
            "events": [
                {"timeUnixNano": str(max(0, at)), "name": name, "attributes": list(_attributes(more))}
                for at, name, more in self.facts
            ],
        }  # fmt: skip
        if above is not None:
            root["parentSpanId"] = f"{above.span_id:016x}"
        if failed:
            root["status"] = {"code": _STATUS_ERROR, "message": _text(report.error or report.outcome)}
        spans = [root]
        for run in sorted([*self.runs, *self.running], key=lambda run: run.start):
            stopped = not run.end
            if stopped:
                run.end, run.busy = max(end, run.start), max(end, run.start) - run.start
            more = {
                names.PHASE: run.phase,
                names.SESSION_ID: event.session_id,
                names.CALL_COUNT: run.calls,
                names.CALL_DURATION: run.busy / 1e9,
            }
            child = {
                "traceId": trace_id,
                "spanId": os.urandom(8).hex(),
                "parentSpanId": root_id,
                "name": _text(run.phase),
                **_common(run.start, run.end, more),
            }
            if stopped and failed:
                child["status"] = {"code": _STATUS_ERROR, "message": _text(report.error or report.outcome)}
            spans.append(child)
        scope = {"scope": {"name": "weightlife", "version": version}, "spans": spans}
        return {
            "resourceSpans": [
                {"resource": {"attributes": list(_attributes(resource))}, "scopeSpans": [scope]}
            ]
        }


def _common(start: int, end: int, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "flags": 1,  # sampled
        "kind": _SPAN_KIND_INTERNAL,
        "startTimeUnixNano": str(max(0, start)),
        "endTimeUnixNano": str(max(0, end)),
        "attributes": list(_attributes(attributes)),
    }


def _attributes(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Key and ``AnyValue`` of what attributes can hold; None and empty text are left out."""
    for key, value in values.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield {"key": key, "value": {"intValue": str(min(max(value, -(2**63)), 2**63 - 1))}}
        elif isinstance(value, float) and math.isfinite(value):
            yield {"key": key, "value": {"doubleValue": value}}
        elif isinstance(value, str) and value:
            yield {"key": key, "value": {"stringValue": _text(value)}}


def _hex(value: object, digits: int) -> str:
    """An id that somebody else gave, or nothing; all zeros is OpenTelemetry's word for none."""
    text = str(value)
    return text if re.fullmatch(f"[0-9a-f]{{{digits}}}", text) and text.strip("0") else ""


def _text(value: str) -> str:
    """Bounded and valid Unicode, as protobuf demands: a file's name may hold a lone surrogate."""
    return clean(value, _TEXT)
