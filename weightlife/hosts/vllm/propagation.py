# SPDX-License-Identifier: Apache-2.0
"""A trainer's span, the front end and every rank are one trace: the caller's context travels with calls of workers.

vLLM passes no context through `collective_rpc`. Where a span is current in the front end (or an update makes one),
the call goes through the reserved method of the worker, which carries the context as text beside the method's name
and arguments. Only workers that answered the handshake with the same version are called that way.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from weightlife._version import __version__
from weightlife.hosts import runtime
from weightlife.hosts.vllm.calls import Args, Kwargs
from weightlife.hosts.vllm.remote import METHOD
from weightlife.otel.carrier import Calls, RequestContext

PATHS = frozenset(
    {"/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update",
     "/init_weight_transfer_engine", "/collective_rpc"}
)  # fmt: skip
"""HTTP endpoints of vLLM through which weights are updated."""

_calls = Calls()
_shaken: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_HELLO: Kwargs = {"args": ("hello", None)}


def _call(method: Any = None, timeout: Any = None, args: Any = (), kwargs: Any = None) -> tuple[Any, ...]:
    """The signature of every `collective_rpc`."""
    return method, timeout, tuple(args or ()), kwargs


def _traceable(method: Any) -> bool:
    """Whether a call may go through the reserved method: by name, and a method of the worker itself."""
    if not isinstance(method, str) or method.startswith("_") or not runtime.installed():
        return False
    base = sys.modules.get("vllm.v1.worker.worker_base")
    return method not in vars(getattr(base, "WorkerWrapperBase", object))


def _carried(call: tuple[Any, ...], carrier: dict[str, str]) -> tuple[Any, ...]:
    method, timeout, args, kwargs = call
    return METHOD, timeout, ("call", {"method": method, "carrier": carrier}, *args), kwargs


def _agrees(answers: Any) -> bool:
    return bool(answers) and all(isinstance(a, dict) and a.get("weightlife") == __version__ for a in answers)


def front_rpc(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """`LLMEngine.collective_rpc`."""
    call = _call(*args, **kwargs)
    if not _traceable(call[0]):
        return wrapped(*args, **kwargs)
    with _calls.calling(instance, call[0]) as carrier:
        if carrier and instance not in _shaken:
            try:
                _shaken[instance] = _agrees(wrapped(METHOD, **_HELLO))
            except Exception:  # noqa: BLE001 - whatever keeps a worker from answering: it is called as ever
                _shaken[instance] = False
        if not carrier or not _shaken[instance]:
            return wrapped(*args, **kwargs)
        return wrapped(*_carried(call, carrier))


async def front_rpc_async(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """`AsyncLLM.collective_rpc`."""
    call = _call(*args, **kwargs)
    if not _traceable(call[0]):
        return await wrapped(*args, **kwargs)
    with _calls.calling(instance, call[0]) as carrier:
        if carrier and instance not in _shaken:
            try:
                _shaken[instance] = _agrees(await wrapped(METHOD, **_HELLO))
            except Exception:  # noqa: BLE001 - as above
                _shaken[instance] = False
        if not carrier or not _shaken[instance]:
            return await wrapped(*args, **kwargs)
        return await wrapped(*_carried(call, carrier))


def build_app(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """The HTTP server: its update endpoints run in the context of their caller."""
    app = wrapped(*args, **kwargs)
    if not runtime.installed():
        return app
    if getattr(app, "middleware_stack", None) is None:
        app.add_middleware(RequestContext, paths=PATHS)
    else:  # vLLM's last step has put the stack together already, and nothing may be added to it: go round it
        app.middleware_stack = RequestContext(app.middleware_stack, PATHS)
    return app
