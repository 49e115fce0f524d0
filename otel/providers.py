# SPDX-License-Identifier: Apache-2.0
"""Providers for who has none: the SDK with OTLP exporters, in this process and, by the environment, in its workers.

Nothing here runs unless it is asked for, by `weightlife.configure_otel()` or by the variable that it leaves for
workers. A provider that is there already is kept: the second one that is set would be refused, and its spans lost.
"""

from __future__ import annotations

import logging
import threading
import uuid
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry import metrics, trace

from weightlife import errors

if TYPE_CHECKING:
    from collections.abc import MutableMapping

__all__ = ["VARIABLE", "configure", "configure_worker"]

VARIABLE = "WEIGHTLIFE_OTEL"
"""Set to 1: a worker sets up providers from OTEL_* variables where it finds none."""

HTTP, GRPC = "http/protobuf", "grpc"
_PORTS = {HTTP: 4318, GRPC: 4317}
_SIGNALS = ("traces", "metrics")
_PREFIX = "OTEL_EXPORTER_OTLP"
_log = logging.getLogger("weightlife")
_lock = threading.Lock()


def configure(
    endpoint: str | None, protocol: str | None, service_name: str | None, environ: MutableMapping[str, str]
) -> dict[str, str]:
    """Set up providers here and leave variables for workers. See `weightlife.configure_otel`."""
    if disabled(environ):
        return {"traces": "disabled", "metrics": "disabled"}
    _require()
    wanted = _protocol(
        protocol or environ.get(f"{_PREFIX}_TRACES_PROTOCOL") or environ.get(f"{_PREFIX}_PROTOCOL")
    )
    general = endpoint or environ.get(f"{_PREFIX}_ENDPOINT") or f"http://127.0.0.1:{_PORTS[wanted]}"
    _check(general)
    for signal in _SIGNALS:
        # One variable a signal: vLLM reads the one for traces, and takes it as it stands.
        own = f"{_PREFIX}_{signal.upper()}"
        if endpoint is not None or not environ.get(f"{own}_ENDPOINT"):
            environ[f"{own}_ENDPOINT"] = _address(general, wanted, signal)
        if protocol is not None or not environ.get(f"{own}_PROTOCOL"):
            environ[f"{own}_PROTOCOL"] = wanted
    if service_name is not None or not environ.get("OTEL_SERVICE_NAME"):
        environ["OTEL_SERVICE_NAME"] = service_name or "vllm"
    environ[VARIABLE] = "1"
    return _set_up(environ)


def configure_worker(environ: MutableMapping[str, str]) -> None:
    """What `configure` left for this process. Never raises: a worker without telemetry is better than none."""
    if environ.get(VARIABLE) != "1" or disabled(environ):
        return
    try:
        _require()
        _set_up(environ)
    except Exception:  # noqa: BLE001 - the worker runs all the same; the user reads why it is not traced
        _log.exception("telemetry could not be set up in this process")


def disabled(environ: MutableMapping[str, str]) -> bool:
    """Whether the user wants no SDK at all."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _set_up(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Set what is missing. Returns signal -> where it goes, or "kept" for a provider that was there."""
    done = {}
    with _lock:
        for signal in _SIGNALS:
            own = f"{_PREFIX}_{signal.upper()}"
            general = environ.get(f"{_PREFIX}_PROTOCOL")
            protocol = _protocol(environ.get(f"{own}_PROTOCOL") or general)
            if _is_set(signal):
                done[signal] = "kept"
                continue
            if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
                done[signal] = "none"
                continue
            _traces(protocol) if signal == "traces" else _metrics(protocol)
            address = environ.get(f"{own}_ENDPOINT") or environ.get(f"{_PREFIX}_ENDPOINT")
            done[signal] = address or "the exporter's default"
    return done


def _is_set(signal: str) -> bool:
    current = trace.get_tracer_provider() if signal == "traces" else metrics.get_meter_provider()
    return hasattr(current, "force_flush")  # the API's own have no such method


def _traces(protocol: str) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter: Any
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Exporter

        exporter = Exporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def _metrics(protocol: str) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    exporter: Any
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Exporter

        exporter = Exporter()
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter()
    resource = Resource.create()
    if "service.instance.id" not in resource.attributes:
        # Without it the counters of two workers would be taken for one that jumps.
        resource = resource.merge(Resource({"service.instance.id": str(uuid.uuid4())}))
    metrics.set_meter_provider(MeterProvider([PeriodicExportingMetricReader(exporter)], resource))


def _require() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk  # noqa: F401
    except ImportError as error:
        raise errors.ConfigError(
            f"the OpenTelemetry SDK or its OTLP exporter is not installed ({error.name})",
            hint="pip install 'weightlife[otel]'",
        ) from error


def _protocol(given: str | None) -> str:
    wanted = (given or HTTP).strip().lower()
    wanted = {"http": HTTP}.get(wanted, wanted)
    if wanted not in _PORTS:
        raise errors.ConfigError(f"protocol={errors.clean(given)!r} is not legal", hint=f"{HTTP} or {GRPC}")
    return wanted


def _check(endpoint: str) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.ConfigError(
            f"endpoint={errors.clean(endpoint)!r} is no address of a receiver",
            hint="an URL such as http://127.0.0.1:4318 (OTLP over HTTP) or http://127.0.0.1:4317 (gRPC)",
        )


def _address(endpoint: str, protocol: str, signal: str) -> str:
    """The address for one signal: over HTTP each has a path of its own."""
    if protocol == GRPC:
        return endpoint
    base = endpoint.rstrip("/")
    for other in _SIGNALS:
        base = base.removesuffix(f"/v1/{other}")
    return f"{base}/v1/{signal}"
