# SPDX-License-Identifier: Apache-2.0
"""The event bus: how the engine tells what it does, without knowing who listens.

Traces, metrics and tests subscribe here; the engine never imports them. Delivery is synchronous, in the
thread that does the work, and in the order of subscription, so that a listener sees the state that the
event describes. A listener that raises is counted and logged once: a load never fails because of an observer.

What the events carry (a listener expects any of it to be absent):

===============  ==========================================================================================
session.start    model, operation, source, opened_by, rank, world_size, generation, isolation, storage
phase.start      phase
phase.end        phase, tensors, bytes, error
violation        code, message, layer, tensors
note             message
layer.processed  layer, strategy, seconds
manifest         make (a function: the ``Manifest`` that this load taught; not called where nobody wants it)
session.end      outcome, error, report (a ``LoadReport``; its fields may also be given by their names)
===============  ==========================================================================================

``error`` is an exception or its text. Standard library only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "EVENT_NAMES",
    "LAYER_PROCESSED",
    "MANIFEST",
    "NOTE",
    "PHASE_END",
    "PHASE_START",
    "SESSION_END",
    "SESSION_START",
    "VIOLATION",
    "Bus",
    "Event",
    "Listener",
    "bus",
]

SESSION_START = "session.start"
SESSION_END = "session.end"
PHASE_START = "phase.start"
PHASE_END = "phase.end"
VIOLATION = "violation"
NOTE = "note"
LAYER_PROCESSED = "layer.processed"
MANIFEST = "manifest"

EVENT_NAMES: frozenset[str] = frozenset(
    {SESSION_START, SESSION_END, PHASE_START, PHASE_END, VIOLATION, NOTE, LAYER_PROCESSED, MANIFEST}
)

_log = logging.getLogger("weightlife")


@dataclass(frozen=True, eq=False)
class Event:
    """One fact about one session.

    ``time_ns`` is from ``time.perf_counter_ns`` (durations), ``wall_ns`` from ``time.time_ns`` (dates); both
    are read at the same moment. ``data`` is read-only plain data, never a tensor.
    """

    name: str
    session_id: str
    time_ns: int
    wall_ns: int
    data: Mapping[str, object]


Listener = Callable[[Event], object]


class _Subscription:
    """A listener and what became of it; one object a subscription, so the same function may subscribe twice."""

    __slots__ = ("errors", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.errors = 0


class Bus:
    """A synchronous, thread-safe bus. Without listeners ``emit`` returns before it builds anything."""

    def __init__(self) -> None:
        # A tuple that is replaced, never changed: emit() reads it without a lock, and a listener may
        # subscribe or unsubscribe from inside an event.
        self._subscriptions: tuple[_Subscription, ...] = ()
        self._lock = threading.Lock()
        self._errors = 0

    @property
    def active(self) -> bool:
        """True when somebody listens: callers check it before they compute costly data."""
        return bool(self._subscriptions)

    @property
    def listener_errors(self) -> int:
        """How many times a listener raised, over the life of this bus."""
        return self._errors

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener(event)`` for every event from now on; returns the function that ends it (idempotent)."""
        subscription = _Subscription(listener)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)

        def unsubscribe() -> None:
            with self._lock:
                self._subscriptions = tuple(s for s in self._subscriptions if s is not subscription)

        return unsubscribe

    def emit(self, name: str, session_id: str, /, **data: object) -> None:
        """Deliver one event. Never raises what a listener raised."""
        subscriptions = self._subscriptions
        if not subscriptions:
            return
        event = Event(name, session_id, time.perf_counter_ns(), time.time_ns(), MappingProxyType(data))
        for subscription in subscriptions:
            try:
                subscription.listener(event)
            except Exception as error:  # noqa: BLE001 - an observer must not fail the load
                self._count(subscription, event, error)

    def _count(self, subscription: _Subscription, event: Event, error: Exception) -> None:
        with self._lock:
            self._errors += 1
            subscription.errors += 1
            first = subscription.errors == 1
        if first:
            _log.warning(
                "weightlife: a listener failed on event %s and will not be reported again (%s)",
                event.name,
                type(error).__qualname__,
                exc_info=error,
            )


bus = Bus()
"""The bus of this process."""
