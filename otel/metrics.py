# SPDX-License-Identifier: Apache-2.0
"""Metrics of sessions: recorded once, at a session's end, whether a trace is sampled or not.

The OpenTelemetry API only: without a meter provider nothing is kept. Attributes are of low cardinality: operations,
outcomes, phases, classes of models and errors, codes. Never a layer, a tensor, a path or a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics

from weightlife._engine import events
from weightlife._version import __version__
from weightlife.otel import names
from weightlife.otel.spans import SCOPE, suppressed
from weightlife.otel.values import count, error_type, operation, outcome_of, text, value
from weightlife.report import ATTRIBUTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider
    from opentelemetry.util.types import AttributeValue

    from weightlife._engine.events import Bus, Event
    from weightlife.otel.delivery import Delivery

__all__ = ["BOUNDARIES", "MetricListener"]

BOUNDARIES = tuple(2.0**power for power in range(-10, 7))
"""Boundaries of durations that an SDK is advised to use: powers of two from 1 ms to 64 s."""


class MetricListener:
    """Records metrics of the sessions on a bus.

    Args:
        meter_provider: where they go, else to the provider that is global at the time.
        delivery: whose dropped sessions are counted.
    """

    def __init__(self, meter_provider: MeterProvider | None = None, delivery: Delivery | None = None) -> None:
        self._provider = meter_provider
        self._delivery = delivery
        self._dropped = 0
        self._instruments: _Instruments | None = None

    def subscribe(self, bus: Bus = events.bus) -> Callable[[], None]:
        """Listen to ``bus``; returns the function that ends it."""
        return bus.subscribe(self)

    def provider(self) -> MeterProvider:
        """Where metrics go now."""
        return self._provider or metrics.get_meter_provider()

    def flush(self) -> None:
        """Export what was recorded. May block: for the delivery's thread only."""
        flush = getattr(self.provider(), "force_flush", None)
        if flush is not None:
            flush()

    def __call__(self, event: Event) -> None:
        """Take one event of the bus."""
        if event.name not in (events.SESSION_END, events.VIOLATION) or suppressed():
            return
        if self._instruments is None:
            # proxies until a provider is set, and that provider's instruments from then on
            self._instruments = _Instruments(metrics.get_meter(SCOPE, __version__, self._provider))
        if event.name == events.VIOLATION:
            self._instruments.violation.add(1, {names.VIOLATION_KIND: text(event.data.get("code"))})
        else:
            self._end(event.data, self._instruments)

    def _end(self, data: Mapping[str, object], to: _Instruments) -> None:
        kind: dict[str, AttributeValue] = {names.SESSION_OPERATION: operation(data)}
        outcome, error, failed = outcome_of(data)
        attributes = {**kind, names.SESSION_OUTCOME: outcome, names.MODEL_CLASS: text(value(data, "model"))}
        if failed:
            attributes[names.ERROR_TYPE] = error_type(error)
        to.session.record(_seconds(value(data, "seconds")), attributes)
        phases = value(data, "phases")
        for phase in phases if isinstance(phases, list) else ():
            to.phase.record(_seconds(phase.seconds), {**kind, names.PHASE: text(phase.name)})
        attributed = value(data, "attributed")
        for key in ATTRIBUTED:
            spent = _seconds(attributed.get(key)) if isinstance(attributed, Mapping) else 0.0
            if spent > 0:
                to.activity.add(spent, {**kind, names.ACTIVITY_NAME: key})
        for counter, key in (
            (to.received, "tensors_received"), (to.received_bytes, "bytes_received"),
            (to.copied, "tensors_copied"), (to.copied_bytes, "bytes_copied"),
        ):  # fmt: skip
            amount = count(value(data, key))
            if amount:
                counter.add(amount, kind)
        if self._delivery is not None and self._delivery.dropped > self._dropped:
            to.dropped.add(self._delivery.dropped - self._dropped)
            self._dropped = self._delivery.dropped


class _Instruments:
    def __init__(self, meter: Meter) -> None:
        def counter(name: str) -> Counter:
            return meter.create_counter(name, names.UNITS[name])

        self.session = _histogram(meter, names.METRIC_SESSION_DURATION)
        self.phase = _histogram(meter, names.METRIC_PHASE_DURATION)
        self.activity = counter(names.METRIC_ACTIVITY_TIME)
        self.received = counter(names.METRIC_TENSOR_RECEIVED)
        self.received_bytes = counter(names.METRIC_RECEIVE_IO)
        self.copied = counter(names.METRIC_TENSOR_COPIED)
        self.copied_bytes = counter(names.METRIC_COPY_IO)
        self.violation = counter(names.METRIC_VIOLATION)
        self.dropped = counter(names.METRIC_TELEMETRY_DROPPED)


def _histogram(meter: Meter, name: str) -> Histogram:
    create: Any = meter.create_histogram
    try:
        made: Histogram = create(name, names.UNITS[name], explicit_bucket_boundaries_advisory=BOUNDARIES)
    except TypeError:  # an API older than 1.30 has no advice to give
        made = create(name, names.UNITS[name])
    return made


def _seconds(given: object) -> float:
    return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else 0.0
