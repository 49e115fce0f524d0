# SPDX-License-Identifier: Apache-2.0
"""Spans as OTLP/JSON without an SDK: a small tracer provider that hands over each finished tree of spans.

Stored runs must not depend on whether an SDK is set up, nor take part in the user's sampling and export. So the
listener of ``spans`` gets this provider beside the one of the process. It implements what the API declares, keeps the
spans of a root until the root ends, and encodes them as one ``TracesData`` message.

The encoding is the one of the OTLP specification ("JSON Protobuf Encoding"): lower camel case, ids in hexadecimal,
64-bit integers as text, enumerations as numbers. Tests decode it with the official message types.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.trace import Link
    from opentelemetry.util.types import Attributes

__all__ = ["MAX_CHILDREN", "RecordingProvider", "traces_data"]

MAX_CHILDREN = 1000
"""Spans kept for one root; a listener that makes more loses the later ones, counted in ``droppedChildren``."""

Finished = Callable[[list["_Span"]], None]


class RecordingProvider(trace.TracerProvider):
    """Calls ``finished(spans)`` with a root span and its children, in the thread that ends the root."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
        *args: Any,
        **kwargs: Any,
    ) -> trace.Tracer:
        """A tracer of this scope."""
        return _Tracer(self._finished, instrumenting_module_name, instrumenting_library_version or "")


class _Tracer(trace.Tracer):
    def __init__(self, finished: Finished, name: str, version: str) -> None:
        self._finished, self._scope = finished, (name, version)

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> trace.Span:
        parent = trace.get_current_span(context)
        return _Span(name, parent, kind, attributes, links or (), start_time, self._scope, self._finished)

    def start_as_current_span(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return trace.use_span(self.start_span(name, *args, **kwargs), end_on_exit=True)


class _Span(trace.Span):
    """One span: plain data until it is encoded."""

    def __init__(
        self,
        name: str,
        parent: trace.Span,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link],
        start_time: int | None,
        scope: tuple[str, str],
        finished: Finished,
    ) -> None:
        above = parent.get_span_context()
        self.name, self.kind, self.scope = str(name), kind, scope
        self.parent_id = above.span_id if above.is_valid else 0
        self.root: _Span = parent.root if isinstance(parent, _Span) else self
        self.children: list[_Span] = []
        self.attributes: dict[str, Any] = dict(attributes or {})
        self.events: list[tuple[int, str, dict[str, Any]]] = []
        self.links: list[tuple[SpanContext, dict[str, Any]]] = [
            (link.context, dict(link.attributes or {})) for link in links
        ]
        self.start = time.time_ns() if start_time is None else start_time
        self.end_time = 0
        self.status = Status()
        self._finished = finished
        self._context = SpanContext(
            above.trace_id if above.is_valid else int.from_bytes(os.urandom(16), "big") or 1,
            int.from_bytes(os.urandom(8), "big") or 1,
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        if self.root is not self and len(self.root.children) < MAX_CHILDREN:
            self.root.children.append(self)

    def get_span_context(self) -> SpanContext:
        return self._context

    def is_recording(self) -> bool:
        return not self.end_time

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        if self.is_recording():
            self.attributes.update(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self.set_attributes({key: value})

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        if self.is_recording():
            at = time.time_ns() if timestamp is None else timestamp
            self.events.append((at, str(name), dict(attributes or {})))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        if self.is_recording():
            self.links.append((context, dict(attributes or {})))

    def update_name(self, name: str) -> None:
        self.name = str(name)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        if self.is_recording():
            self.status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        # neither a stack trace, which may quote a user's code, nor the text, which the status has
        kind = type(exception)
        named = {"exception.type": f"{kind.__module__}.{kind.__qualname__}", **dict(attributes or {})}
        self.add_event("exception", named, timestamp)

    def end(self, end_time: int | None = None) -> None:
        if self.end_time:
            return
        self.end_time = max(time.time_ns() if end_time is None else end_time, self.start)
        if self.root is self:
            children, self.children = self.children, []
            self._finished([self, *children])


def traces_data(spans: Sequence[Any], resource: Mapping[str, Any]) -> dict[str, Any]:
    """One ``TracesData`` message: spans as ``RecordingProvider`` hands them over, under one resource."""
    scopes: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for span in spans:
        scopes.setdefault(span.scope, []).append(_encode(span))
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": list(_attributes(resource))},
                "scopeSpans": [
                    {"scope": {"name": name, "version": version}, "spans": found}
                    for (name, version), found in scopes.items()
                ],
            }
        ]
    }


def _encode(span: _Span) -> dict[str, Any]:
    context = span.get_span_context()
    out: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "flags": int(context.trace_flags),
        "name": _text(span.name),
        "kind": span.kind.value + 1,  # the API counts from 0 (INTERNAL), OTLP from 1: 0 is UNSPECIFIED there
        "startTimeUnixNano": str(max(0, span.start)),
        "endTimeUnixNano": str(max(0, span.end_time or span.start)),
        "attributes": list(_attributes(span.attributes)),
    }
    if span.parent_id:
        out["parentSpanId"] = f"{span.parent_id:016x}"
    if span.events:
        out["events"] = [
            {"timeUnixNano": str(max(0, at)), "name": _text(name), "attributes": list(_attributes(more))}
            for at, name, more in span.events
        ]
    if span.links:
        out["links"] = [
            {
                "traceId": f"{to.trace_id:032x}",
                "spanId": f"{to.span_id:016x}",
                "attributes": list(_attributes(more)),
            }
            for to, more in span.links
        ]
    if span.status.status_code is not StatusCode.UNSET:
        out["status"] = {"code": span.status.status_code.value}  # 1 is OK and 2 is ERROR in both
        if span.status.description:
            out["status"]["message"] = _text(span.status.description)
    return out


def _attributes(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key, value in values.items():
        encoded = _value(value)
        if encoded is not None:
            yield {"key": _text(key), "value": encoded}


def _value(value: object) -> dict[str, Any] | None:
    """An ``AnyValue``; None for what attributes can't hold."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(min(max(value, -(2**63)), 2**63 - 1))}
    if isinstance(value, float):
        return {
            "doubleValue": value
            if math.isfinite(value)
            else str(value).replace("inf", "Infinity").replace("nan", "NaN")
        }
    if isinstance(value, str):
        return {"stringValue": _text(value)}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return {"arrayValue": {"values": [x for x in map(_value, value) if x is not None]}}
    return None


def _text(value: str) -> str:
    """Protobuf text is valid Unicode: a lone surrogate, which a file's name may hold, is escaped."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
