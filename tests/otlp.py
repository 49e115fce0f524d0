# SPDX-License-Identifier: Apache-2.0
"""A receiver of OTLP over HTTP and gRPC on the loopback address, that may refuse, hang or be slow.

It takes what exporters really send, protobuf on the wire, and keeps it as plain records.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass
class Span:
    """One received span, ids in hexadecimal."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    scope: str
    attributes: dict[str, Any]
    resource: dict[str, Any]
    failed: bool
    links: list[tuple[str, str, dict[str, Any]]]
    events: list[tuple[str, dict[str, Any]]]


@dataclass
class Metric:
    """One received metric with its points."""

    name: str
    unit: str
    scope: str
    resource: dict[str, Any]
    points: list[tuple[dict[str, Any], float]] = field(default_factory=list)


@dataclass
class Line:
    """One received log record; `trace` in hexadecimal, empty where it was written outside of any span."""

    text: str
    severity: str
    scope: str
    trace: str
    resource: dict[str, Any]


class Receiver:
    """`with Receiver() as receiver:` listens on two free ports, `receiver.http` and `receiver.grpc`.

    `mode` is "works", "refuses" (503, UNAVAILABLE), "hangs" (until closed) or "slow" (0.3 s an export). An HTTP
    request `POST /mode/MODE` sets it from another process.
    """

    def __init__(self) -> None:
        self.mode = "works"
        self.spans: list[Span] = []
        self.metrics: list[Metric] = []
        self.lines: list[Line] = []
        self.requests: list[str] = []
        self._arrived = threading.Condition()
        self._closed = threading.Event()

    def __enter__(self) -> Receiver:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.path.startswith("/mode/"):
                    receiver.mode = self.path.removeprefix("/mode/")
                    self._answer(200)
                    return
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                self._answer(503 if receiver.take(f"http{self.path}", self.path, body) else 200)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._grpc = grpc.server(ThreadPoolExecutor(8))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(self), self._grpc)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._grpc)
        port = self._grpc.add_insecure_port("127.0.0.1:0")
        self._grpc.start()
        self.http = f"http://127.0.0.1:{self._server.server_port}"
        self.grpc = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._grpc.stop(0)

    def take(self, request: str, path: str, body: bytes) -> bool:
        """Take a message. Returns whether it is refused."""
        with self._arrived:
            self.requests.append(request)
        if self.mode == "hangs":
            self._closed.wait(120)
        elif self.mode == "slow":
            time.sleep(0.3)
        if self.mode in ("refuses", "hangs"):
            return True
        spans: list[Span] = []
        metrics: list[Metric] = []
        lines: list[Line] = []
        if path.endswith("/traces"):
            spans = list(_spans(trace_service_pb2.ExportTraceServiceRequest.FromString(body)))
        elif path.endswith("/logs"):
            lines = list(_lines(logs_service_pb2.ExportLogsServiceRequest.FromString(body)))
        else:
            metrics = list(_metrics(metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)))
        with self._arrived:
            self.spans += spans
            self.metrics += metrics
            self.lines += lines
            self._arrived.notify_all()
        return False

    def wait(self, ready: Callable[[Receiver], bool], seconds: float = 30.0) -> bool:
        """Wait until what has arrived is enough."""
        with self._arrived:
            return self._arrived.wait_for(lambda: ready(self), seconds)

    def named(self, prefix: str) -> list[Span]:
        """Spans whose name begins so, by time."""
        with self._arrived:
            return sorted((s for s in self.spans if s.name.startswith(prefix)), key=lambda s: s.start)

    def above(self, span: Span) -> list[str]:
        """Names of the spans that a span hangs under, from below."""
        by_id = {s.id: s for s in self.spans}
        found = []
        while span.parent in by_id:
            span = by_id[span.parent]
            found.append(span.name)
        return found


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        if self.receiver.take("grpc/traces", "/v1/traces", request.SerializeToString()):
            context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:
        if self.receiver.take("grpc/metrics", "/v1/metrics", request.SerializeToString()):
            context.abort(grpc.StatusCode.UNAVAILABLE, "refused")
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _spans(message: Any) -> Iterable[Span]:
    for resource in message.resource_spans:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                    span.start_time_unix_nano, span.end_time_unix_nano, scope.scope.name,
                    _attributes(span.attributes), about, span.status.code == 2,
                    [(x.trace_id.hex(), x.span_id.hex(), _attributes(x.attributes)) for x in span.links],
                    [(x.name, _attributes(x.attributes)) for x in span.events],
                )  # fmt: skip


def _lines(message: Any) -> Iterable[Line]:
    for resource in message.resource_logs:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_logs:
            for record in scope.log_records:
                yield Line(
                    str(_value(record.body)),
                    record.severity_text,
                    scope.scope.name,
                    record.trace_id.hex(),
                    about,
                )


def _metrics(message: Any) -> Iterable[Metric]:
    for resource in message.resource_metrics:
        about = _attributes(resource.resource.attributes)
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                made = Metric(metric.name, metric.unit, scope.scope.name, about)
                for point in metric.histogram.data_points:
                    made.points.append((_attributes(point.attributes), float(point.count)))
                for point in metric.sum.data_points:
                    made.points.append(
                        (_attributes(point.attributes), float(point.as_double or point.as_int))
                    )
                yield made
