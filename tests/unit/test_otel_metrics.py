# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import context as contexts
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tests.telemetry import Registry
from weightlife import errors
from weightlife._engine import events
from weightlife._engine.events import Bus
from weightlife.otel import generate_names, names
from weightlife.otel.delivery import Delivery
from weightlife.otel.metrics import BOUNDARIES, MetricListener
from weightlife.report import LoadReport, PhaseRecord

GROUPS = generate_names.load_registry()
METRICS = {group["metric_name"]: group for group in GROUPS if group["type"] == "metric"}
registry = Registry(GROUPS)


class Meters:
    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.provider = MeterProvider(metric_readers=[self.reader], shutdown_on_exit=False)
        self.bus = Bus()
        self.delivery = Delivery()
        self.listener = MetricListener(self.provider, self.delivery)
        self.listener.subscribe(self.bus)

    def read(self) -> dict[str, list[Any]]:
        """Metric -> data points, each held to the registry."""
        data = self.reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                assert scope.scope.name == "weightlife"
                for metric in scope.metrics:
                    group = METRICS[metric.name]
                    assert metric.unit == group["unit"], metric.name
                    kind = {"Histogram": "histogram", "Sum": "counter"}[type(metric.data).__name__]
                    assert kind == group["instrument"], metric.name
                    found[metric.name] = list(metric.data.data_points)
                    for point in metric.data.data_points:
                        registry.check(group["id"], point.attributes or {})
        return found


@pytest.fixture(name="meters")
def _meters() -> Meters:
    return Meters()


def report(**more: Any) -> LoadReport:
    return LoadReport(
        session_id="s",
        model="M",
        operation="reload",
        seconds=2.0,
        tensors_received=290,
        bytes_received=1 << 40,
        tensors_copied=64,
        bytes_copied=1 << 30,
        phases=[PhaseRecord("receive", 1.5), PhaseRecord("copy_back", 0.25)],
        attributed={"source": 1.0, "loaders": 0.5, "between_calls": 0.0, "ranks": 0.125},
        **more,
    )


def test_a_session(meters: Meters) -> None:
    meters.bus.emit(
        events.VIOLATION, "s", code="WL203", message="x", layer="secret.layer", tensors=["secret.weight"]
    )
    done = report(outcome="committed", source="/secret/path")
    meters.bus.emit(events.SESSION_END, "s", report=done, outcome="committed", error="")
    found = meters.read()
    assert set(found) == set(METRICS) - {names.METRIC_TELEMETRY_DROPPED}
    (duration,) = found[names.METRIC_SESSION_DURATION]
    assert (duration.count, duration.sum) == (1, 2.0)
    assert tuple(duration.explicit_bounds) == BOUNDARIES
    assert dict(duration.attributes) == {
        "weightlife.session.operation": "reload",
        "weightlife.session.outcome": "committed",
        "weightlife.model.class": "M",
    }
    phases = {point.attributes["weightlife.phase"]: point.sum for point in found[names.METRIC_PHASE_DURATION]}
    assert phases == {"receive": 1.5, "copy_back": 0.25}
    spent = {p.attributes["weightlife.activity.name"]: p.value for p in found[names.METRIC_ACTIVITY_TIME]}
    assert spent == {"source": 1.0, "loaders": 0.5, "ranks": 0.125}
    sums = {name: point.value for name, (point, *_) in found.items() if hasattr(point, "value")}
    assert sums[names.METRIC_TENSOR_RECEIVED] == 290
    assert sums[names.METRIC_RECEIVE_IO] == 1 << 40
    assert sums[names.METRIC_TENSOR_COPIED] == 64
    assert sums[names.METRIC_COPY_IO] == 1 << 30
    (violation,) = found[names.METRIC_VIOLATION]
    assert dict(violation.attributes) == {"weightlife.violation.kind": "WL203"}
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("x"), "KeyError"),
        (errors.ConfigError("x"), "weightlife.errors.ConfigError"),
        ("x", "_OTHER"),
    ],
)
def test_a_failure_has_the_type_that_the_span_has(meters: Meters, error: object, kind: str) -> None:
    meters.bus.emit(events.SESSION_END, "s", report=report(outcome="aborted"), error=error)
    (duration,) = meters.read()[names.METRIC_SESSION_DURATION]
    assert duration.attributes["error.type"] == kind
    assert duration.attributes["weightlife.session.outcome"] == "aborted"


def test_cardinality_does_not_grow_with_sessions_layers_or_tensors(meters: Meters) -> None:
    for index in range(50):
        meters.bus.emit(events.VIOLATION, f"s{index}", code="WL203", layer=f"l{index}", tensors=[f"t{index}"])
        meters.bus.emit(
            events.SESSION_END,
            f"s{index}",
            report=report(outcome="committed", generation=index, source=f"/p/{index}"),
        )
    found = meters.read()
    assert {name: len(points) for name, points in found.items()} == {
        **dict.fromkeys(set(METRICS) - {names.METRIC_TELEMETRY_DROPPED}, 1),
        names.METRIC_PHASE_DURATION: 2,
        names.METRIC_ACTIVITY_TIME: 3,
    }


def test_drops_of_the_delivery(meters: Meters) -> None:
    for dropped in (0, 2, 2, 5):
        meters.delivery.dropped = dropped
        meters.bus.emit(events.SESSION_END, "s", report=report(outcome="committed"))
    (point,) = meters.read()[names.METRIC_TELEMETRY_DROPPED]
    assert point.value == 5


def test_suppression(meters: Meters, monkeypatch: pytest.MonkeyPatch) -> None:
    token = contexts.attach(contexts.set_value("suppress_instrumentation", True))
    try:
        meters.bus.emit(events.SESSION_END, "s", report=report(outcome="committed"))
    finally:
        contexts.detach(token)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    meters.bus.emit(events.SESSION_END, "s", report=report(outcome="committed"))
    assert meters.read() == {}


def test_an_api_without_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.30 an instrument has a name, a unit and a description."""
    meters = Meters()
    from opentelemetry.sdk.metrics import Meter

    inner = Meter.create_histogram

    def old(self: Meter, name: str, unit: str = "", description: str = "") -> Any:
        return inner(self, name, unit, description)

    monkeypatch.setattr(Meter, "create_histogram", old)
    meters.bus.emit(events.SESSION_END, "s", report=report(outcome="committed"))
    assert names.METRIC_SESSION_DURATION in meters.read()


def test_events_with_nothing_in_them(meters: Meters) -> None:
    meters.bus.emit(events.SESSION_END, "s")
    meters.bus.emit(events.VIOLATION, "s")
    meters.bus.emit(events.NOTE, "s", message="x")
    assert meters.bus.listener_errors == 0


def test_every_metric_is_described_and_its_attributes_defined() -> None:
    for name, group in METRICS.items():
        assert group["id"] == f"metric.{name}"
        assert group["brief"].endswith(".")
        assert group["stability"] == "development"
        assert name.startswith("weightlife.")
        assert not any(word in name for word in ("total", "seconds", "bytes", "count"))
    assert {name: group["unit"] for name, group in METRICS.items()} == names.UNITS
