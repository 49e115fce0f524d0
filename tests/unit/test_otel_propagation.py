# SPDX-License-Identifier: Apache-2.0
"""The context of a caller travels with calls of workers: shapes of calls, who gets them, what hangs under what."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.telemetry import Registry, group_of
from weightlife import errors
from weightlife._version import __version__
from weightlife.hosts.vllm import propagation, remote
from weightlife.hosts.vllm.table import _answer
from weightlife.otel import generate_names
from weightlife.otel.carrier import RequestContext, attached, inject

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
TRACE = 0x0AF7651916CD43DD8448EB211C80319C
registry = Registry(generate_names.load_registry())


class Worker:
    """A worker as `_weightlife_rpc` sees it."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        return {"args": args, "kwargs": kwargs, "trace": trace.get_current_span().get_span_context().trace_id,
                "span": trace.get_current_span().get_span_context().span_id}  # fmt: skip

    start_weight_update = update_weights = finish_weight_update = own_update = reload_weights

    def fails(self) -> None:
        raise errors.MissingTensorError("x")


class Engine:
    """Calls one worker; remembers what went over the wire. `workers` says what it is like."""

    def __init__(self, workers: str = "same") -> None:
        self.workers = workers
        self.wire: list[tuple[Any, ...]] = []

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        self.wire.append((method, timeout, args, kwargs))
        if method == remote.METHOD:
            if self.workers == "absent":
                raise RuntimeError(f"Worker has no attribute {method}")
            if args[0] == "hello":
                return [
                    {
                        "weightlife": __version__ if self.workers == "same" else "0.0.9",
                        "digest": "",
                        "rank": 0,
                    }
                ]
            # what vLLM's serialisation leaves of tuples
            args = [list(a) if isinstance(a, tuple) else a for a in args]
            try:
                return [_answer(Worker(), *args, **(kwargs or {}))]
            except errors.WeightlifeError as error:
                raise RuntimeError(f"Worker failed with error '{error}'") from None
        return [getattr(Worker(), method)(*args, **(kwargs or {}))]


class AsyncEngine(Engine):
    async def collective_rpc(self, *args: Any, **kwargs: Any) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().collective_rpc(*args, **kwargs)


@pytest.fixture(name="exporter")
def _exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(propagation.runtime, "installed", lambda: True)
    yield exporter
    for span in exporter.get_finished_spans():
        if span.instrumentation_scope is not None and span.instrumentation_scope.name == "weightlife":
            registry.check(group_of(span.name), span.attributes or {})
    assert not trace.get_current_span().get_span_context().is_valid  # nothing was left attached


def ask(engine: Engine, *args: Any, **kwargs: Any) -> Any:
    (answer,) = propagation.front_rpc(engine.collective_rpc, engine, args, kwargs)
    return answer


def ask_async(engine: AsyncEngine, *args: Any, **kwargs: Any) -> Any:
    (answer,) = asyncio.run(propagation.front_rpc_async(engine.collective_rpc, engine, args, kwargs))
    return answer


BOTH = pytest.mark.parametrize(("kind", "call"), [(Engine, ask), (AsyncEngine, ask_async)])


def spans(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return list(exporter.get_finished_spans())


@BOTH
def test_the_workers_are_in_the_callers_trace(exporter: InMemorySpanExporter, kind: Any, call: Any) -> None:
    engine = kind()
    tracer = trace.get_tracer("trainer")
    with tracer.start_as_current_span("sync") as sync:
        got = call(
            engine, "reload_weights", 5.0, ("a", "b"), {"weights_path": "/p", "payload": 1, "question": 2}
        )
    assert got["args"] == ("a", "b")
    assert got["kwargs"] == {"weights_path": "/p", "payload": 1, "question": 2}
    rpc = next(span for span in spans(exporter) if span.name == "collective_rpc reload_weights")
    assert rpc.parent == sync.get_span_context()
    assert (got["trace"], got["span"]) == (sync.get_span_context().trace_id, rpc.context.span_id)
    method, timeout, args, _ = engine.wire[-1]
    assert (method, timeout) == ("_weightlife_rpc", 5.0)
    assert remote.method_of(method, args) == "reload_weights"
    call(engine, "reload_weights")
    assert [w[2][0] for w in engine.wire] == ["hello", "call", "call"]  # shaken once an engine


@BOTH
@pytest.mark.parametrize("workers", ["absent", "older"])
def test_workers_that_did_not_shake_hands_are_called_as_ever(
    exporter: InMemorySpanExporter, kind: Any, call: Any, workers: str
) -> None:
    engine = kind(workers)
    with trace.get_tracer("trainer").start_as_current_span("sync"):
        call(engine, "reload_weights", args=("a",))
        call(engine, "reload_weights", args=("a",))
    assert [wire[0] for wire in engine.wire] == ["_weightlife_rpc", "reload_weights", "reload_weights"]
    assert engine.wire[-1] == ("reload_weights", None, ("a",), None)


def test_an_update_in_calls_is_one_trace_without_a_span_of_the_callers(
    exporter: InMemorySpanExporter,
) -> None:
    engine, other = Engine(), Engine()
    for method in ("start_weight_update", "update_weights", "update_weights", "finish_weight_update"):
        ask(engine, method)
    ask(other, "update_weights")
    ask(engine, "update_weights")
    start, *rest, theirs, later = spans(exporter)
    assert start.parent is None
    assert [span.parent for span in rest] == [start.context] * 3
    assert theirs.parent is None
    assert later.parent is None
    assert len({span.context.trace_id for span in (start, theirs, later)}) == 3


def test_an_update_that_fails_is_over(exporter: InMemorySpanExporter) -> None:
    engine = Engine()
    ask(engine, "start_weight_update")
    Worker.update_weights, before = Worker.fails, Worker.update_weights  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(RuntimeError):
            ask(engine, "update_weights")
    finally:
        Worker.update_weights = before  # type: ignore[method-assign]
    failed = spans(exporter)[-1]
    assert failed.status.status_code is StatusCode.ERROR
    assert (failed.attributes or {})["error.type"] == "weightlife.errors.MissingTensorError"
    ask(engine, "update_weights")
    assert spans(exporter)[-1].parent is None


def test_a_method_of_the_users_own_has_the_callers_span_and_none_of_ours(
    exporter: InMemorySpanExporter,
) -> None:
    engine = Engine()
    ask(engine, "own_update")
    assert engine.wire == [("own_update", None, (), None)]
    with trace.get_tracer("trainer").start_as_current_span("sync") as sync:
        got = ask(engine, "own_update")
    assert got["span"] == sync.get_span_context().span_id
    assert [span.name for span in spans(exporter)] == ["sync"]


def test_what_is_no_method_of_the_worker_is_left_alone(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys
    import types

    class WorkerWrapperBase:
        def init_device(self) -> None: ...

    module = types.SimpleNamespace(WorkerWrapperBase=WorkerWrapperBase)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", module)  # type: ignore[arg-type]
    seen = []
    with trace.get_tracer("trainer").start_as_current_span("sync"):
        for method in ("init_device", "_weightlife_rpc", "__class__", len, b"x", None):
            propagation.front_rpc(lambda *a, **k: seen.append(a), object(), (method,), {})
    assert seen == [("init_device",), ("_weightlife_rpc",), ("__class__",), (len,), (b"x",), (None,)]


def test_nothing_is_carried_without_a_provider_or_under_suppression(exporter: InMemorySpanExporter) -> None:
    engine = Engine()
    with trace.get_tracer("trainer").start_as_current_span("sync"):
        token = contexts.attach(contexts.set_value("suppress_instrumentation", True))
        ask(engine, "reload_weights")
        contexts.detach(token)
    trace._TRACER_PROVIDER = None
    ask(engine, "reload_weights")
    assert [wire[0] for wire in engine.wire] == ["reload_weights"] * 2
    assert [span.name for span in spans(exporter)] == ["sync"]


def test_a_context_from_elsewhere_goes_through_a_front_end_without_a_provider(
    exporter: InMemorySpanExporter,
) -> None:
    trace._TRACER_PROVIDER = None
    engine = Engine()
    with attached(PARENT):
        assert ask(engine, "reload_weights")["trace"] == TRACE
    assert engine.wire[-1][2][1]["carrier"] == PARENT


def test_an_unknown_method_is_answered_in_the_hosts_words(exporter: InMemorySpanExporter) -> None:
    with (
        trace.get_tracer("t").start_as_current_span("sync"),
        pytest.raises(NotImplementedError, match="'nope'"),
    ):
        ask(Engine(), "nope")


def test_engines_are_not_kept_alive(exporter: InMemorySpanExporter) -> None:
    import weakref

    engine = Engine()
    gone = weakref.ref(engine)
    ask(engine, "start_weight_update")
    del engine
    gc.collect()
    assert gone() is None


def test_baggage_travels_too(exporter: InMemorySpanExporter) -> None:
    token = contexts.attach(baggage.set_baggage("step", "7"))
    try:
        with trace.get_tracer("t").start_as_current_span("sync"):
            carrier = inject()
    finally:
        contexts.detach(token)
    assert carrier["baggage"] == "step=7"
    with attached(carrier):
        assert baggage.get_baggage("step") == "7"
    assert baggage.get_baggage("step") is None


def test_a_carrier_from_elsewhere_may_hold_anything(exporter: InMemorySpanExporter) -> None:
    for carrier in ({"traceparent": "nonsense"}, {"traceparent": "00-0-0-01", "x": "y"}, {1: None}):
        with attached(carrier):  # type: ignore[arg-type]
            assert not trace.get_current_span().get_span_context().is_valid


class TestRequests:
    @staticmethod
    def request(path: str, headers: dict[str, str], kind: str = "http", span: bool = False) -> int:
        seen = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await asyncio.sleep(0)
            seen.append(trace.get_current_span().get_span_context().trace_id)

        async def call() -> None:
            scope = {
                "type": kind,
                "path": path,
                "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            }
            middleware = RequestContext(app, propagation.PATHS)
            if span:
                with trace.get_tracer("web").start_as_current_span("POST"):
                    await middleware(scope, None, None)
            else:
                await middleware(scope, None, None)

        asyncio.run(call())
        return seen[0]

    @pytest.mark.parametrize("path", sorted(propagation.PATHS))
    def test_update_endpoints(self, exporter: InMemorySpanExporter, path: str) -> None:
        assert self.request(path, PARENT) == TRACE
        assert self.request(f"{path}/", {"Traceparent": PARENT["traceparent"], "host": "x"}) == TRACE
        assert self.request(path, {"host": "x"}) == 0

    @pytest.mark.parametrize("started", [False, True])
    def test_a_real_application_whether_its_stack_was_put_together_or_not(
        self, exporter: InMemorySpanExporter, started: bool
    ) -> None:
        from fastapi import FastAPI
        from fastapi.testclient import TestClient

        app = FastAPI()

        @app.post("/update_weights")
        async def update() -> str:
            return f"{trace.get_current_span().get_span_context().trace_id:032x}"

        if started:
            app.middleware_stack = app.build_middleware_stack()
        assert propagation.build_app(lambda: app, None, (), {}) is app
        with TestClient(app) as client:
            assert client.post("/update_weights", headers=PARENT).json() == f"{TRACE:032x}"
            assert client.post("/update_weights").json() == "0" * 32

    def test_nothing_else(self, exporter: InMemorySpanExporter) -> None:
        assert self.request("/v1/completions", PARENT) == 0
        assert self.request("/update_weights", PARENT, kind="websocket") == 0

    def test_a_span_that_a_framework_made_stays(self, exporter: InMemorySpanExporter) -> None:
        assert self.request("/update_weights", PARENT, span=True) not in (0, TRACE)
