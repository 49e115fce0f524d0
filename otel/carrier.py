# SPDX-License-Identifier: Apache-2.0
"""One trace over several processes: the context of a caller, carried as plain text.

The propagators are those that OTEL_PROPAGATORS names (W3C trace context and baggage by default), so that what
the rest of a system understands is understood here, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from weightlife._version import __version__
from weightlife.otel import names
from weightlife.otel.ids import unseed
from weightlife.otel.recording import fail
from weightlife.otel.spans import SCOPE, suppressed
from weightlife.otel.values import failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.context import Context

__all__ = ["UPDATES", "Calls", "RequestContext", "attached", "inject"]

_STARTS = frozenset({"start_weight_update", "start_draft_weight_update"})
_ENDS = frozenset({"finish_weight_update"})
UPDATES = _STARTS | _ENDS | {"reload_weights", "update_weights"}
"""Methods of workers that get a span in the front end: the host's own that load weights."""


def inject() -> dict[str, str]:
    """The current context as headers; empty where there is no span to be a child of."""
    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid and not suppressed():
        propagate.inject(carrier)
    return carrier


@contextmanager
def attached(carrier: Mapping[str, str]) -> Iterator[None]:
    """The block runs in the context that a carrier tells, unless a span is current here already."""
    if not carrier or trace.get_current_span().get_span_context().is_valid:
        yield
        return
    token = contexts.attach(propagate.extract({str(key): str(value) for key, value in carrier.items()}))
    try:
        yield
    finally:
        contexts.detach(token)


class Calls:
    """The front end's calls of its workers, for any number of engines."""

    def __init__(self) -> None:
        self._open: weakref.WeakKeyDictionary[Any, Context] = weakref.WeakKeyDictionary()

    @contextmanager
    def calling(self, engine: Any, method: str) -> Iterator[dict[str, str]]:
        """The length of a call; gives the carrier to send along (empty: none).

        An update is several calls. Where the caller has no span of his own, the later ones hang under the first.
        """
        if method not in UPDATES or suppressed():
            yield inject()
            return
        parent = None
        if not trace.get_current_span().get_span_context().is_valid:
            parent = self._open.get(engine)
        unseed(trace.get_tracer_provider())
        tracer = trace.get_tracer(SCOPE, __version__)
        span = tracer.start_span(
            f"collective_rpc {method}", parent, SpanKind.INTERNAL, {names.RPC_METHOD: method}
        )
        real = span.get_span_context().is_valid  # an old API makes none where there is no SDK
        token = contexts.attach(trace.set_span_in_context(span) if real else contexts.get_current())
        try:
            if method in _STARTS and real:
                self._open[engine] = contexts.get_current()
            yield inject()
        except BaseException as error:
            if span.is_recording():
                # An error of a worker comes as text; its code tells which it is.
                fail(span, failure(str(error) if type(error) in (RuntimeError, Exception) else error))
            self._open.pop(engine, None)
            raise
        else:
            if method in _ENDS:
                self._open.pop(engine, None)
        finally:
            contexts.detach(token)
            span.end()


class RequestContext:
    """ASGI middleware: calls of `paths` run in the context that their request's headers tell.

    Where a web framework's own instrumentation has made a span already, that one stays.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], paths: frozenset[str]) -> None:
        self.app = app
        self.paths = paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope.get("type") != "http" or str(scope.get("path", "")).rstrip("/") not in self.paths:
            await self.app(scope, receive, send)
            return
        wanted = propagate.get_global_textmap().fields
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope.get("headers", ())
        }
        with attached({name: value for name, value in headers.items() if name in wanted}):
            await self.app(scope, receive, send)
