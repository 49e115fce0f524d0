# SPDX-License-Identifier: Apache-2.0
"""All listeners of a process, set up and taken back together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from weightlife._engine import events
from weightlife.otel.delivery import Delivery
from weightlife.otel.ids import unseed
from weightlife.otel.metrics import MetricListener
from weightlife.otel.spans import SpanListener

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from weightlife._engine.events import Bus, Event

__all__ = ["Telemetry"]


class Telemetry:
    """Spans and metrics of a bus, and their delivery.

    Args:
        tracer_provider, meter_provider: where they go, else to whatever is global at the time.
        bus: what to listen to.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        bus: Bus = events.bus,
    ) -> None:
        self.delivery = Delivery()
        self.spans = SpanListener(tracer_provider, self.delivery)
        self.metrics = MetricListener(meter_provider, self.delivery)
        # Now, so that the host's own spans of a worker differ from those of its siblings, too.
        unseed(tracer_provider or trace.get_tracer_provider())
        self._bus = bus
        self._stops: list[Callable[[], None]] = []
        self.open()

    def open(self) -> None:
        """Listen (again). Twice is once."""
        if not self._stops:
            # In this order: what is flushed at a session's end is all of that session.
            listeners = (self.metrics, self.spans, self._flush)
            self._stops = [self._bus.subscribe(listener) for listener in listeners]

    def configure(self, layers: str, layer_seconds: float) -> None:
        """Which layers get spans: see `SpanListener`."""
        self.spans.layers, self.spans.layer_seconds = layers, layer_seconds

    def close(self) -> None:
        """Stop listening, and wait a moment for what is on its way."""
        stops, self._stops = self._stops, []
        for stop in stops:
            stop()
        self.delivery.wait()

    def status(self) -> dict[str, Any]:
        """The classes of the providers ("none" where the API has nothing behind it), and what was dropped."""
        found = {"traces": self.spans.provider(), "metrics": self.metrics.provider()}
        shown: dict[str, Any] = {
            signal: type(provider).__name__ if hasattr(provider, "force_flush") else "none"
            for signal, provider in found.items()
        }
        return {**shown, "dropped": self.delivery.dropped}

    def _flush(self, event: Event) -> None:
        """A session ended: send what there is, and wait for it a little. What hangs is waited for once."""
        if event.name != events.SESSION_END or not self._has_provider():
            return
        stuck = self.delivery.pending > 1  # more than this session's own spans
        if self.delivery.submit(self._send) and not stuck:
            self.delivery.wait()

    def _send(self) -> None:
        self.spans.flush()
        self.metrics.flush()

    def _has_provider(self) -> bool:
        """Whether there is anything to flush: the API's own defaults have no such method."""
        return hasattr(self.spans.provider(), "force_flush") or hasattr(
            self.metrics.provider(), "force_flush"
        )
