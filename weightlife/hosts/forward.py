# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a plain module, guarded by hooks: both are part of no graph that serves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch

from weightlife import errors
from weightlife._engine import guard as engine_guard
from weightlife._engine import lifecycle, processing
from weightlife._engine.lifecycle import Lifecycle


def _enter(model: torch.nn.Module, *_: Any) -> None:
    """Before a forward pass. A function of the module, not of this model: copies and pickles of a model carry it."""
    _untraced(_begin_pass)(model)


def _leave(model: torch.nn.Module, *_: Any) -> None:
    """After a forward pass, also one that raised."""
    _untraced(_end_pass)(model)


# `torch.compile` breaks its graph at them. Its decorator for that would import the compiler, which takes seconds.
for _hook in (_enter, _leave):
    vars(_hook)["_torchdynamo_disable"] = True


def _untraced(call: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """A call that `torch.compile`, if it is in use, does not look into: it would compile the engine's own code."""
    compiler = sys.modules.get("torch._dynamo")
    return call if compiler is None else compiler.disable(call)


def _begin_pass(model: torch.nn.Module) -> None:
    life = lifecycle.of(model)
    if life is None:
        return  # a copy: it has no lifecycle
    stack = ExitStack()
    caller = _running_frame()
    try:
        process_first(model, life)
        stack.enter_context(engine_guard.entering([life], engine_guard.Pass.REAL, always=True))
    except Exception:
        life.turn.enter(caller, stack)  # torch calls `_leave` for this one too
        raise
    life.turn.enter(caller, stack)


def _end_pass(model: torch.nn.Module) -> None:
    life = lifecycle.of(model)
    if life is not None:
        life.turn.leave()


def _running_frame() -> FrameType:
    """The frame of torch that runs the pass, and its hooks: compiled or not, it stands until the pass is over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    return frame or sys._getframe(1)


def guard(model: torch.nn.Module, life: Lifecycle) -> None:
    """A plain module is guarded by hooks on its forward; both are part of no graph that serves."""
    for hooks, ours in ((model._forward_pre_hooks, _enter), (model._forward_hooks, _leave)):
        for key in [key for key, hook in hooks.items() if hook is ours]:  # a copy's, from its original
            del hooks[key]
    life.hooks = [
        model.register_forward_pre_hook(_enter),
        model.register_forward_hook(_leave, always_call=True),
    ]


def process_first(model: torch.nn.Module, life: Lifecycle) -> None:
    """The end of a first load that came in chunks: the host's hooks, watched.

    Raises:
        SessionStateError: the load failed, and was not repeated.
    """
    if life.first is None:
        return
    with life.turn.passing():
        _process_now(model, life)


def _process_now(model: torch.nn.Module, life: Lifecycle) -> None:
    first, host = life.first, life.host
    if first is None or not first.came:
        return
    if life.first_by:
        raise errors.SessionStateError(
            f"the first load by {life.first_by} is not at its end", model=life.name,
            hint="await it before the model runs",
        )  # fmt: skip
    problem = first.dead or first.failed
    if problem:
        raise errors.SessionStateError(
            f"the first load failed: {problem}", model=life.name,
            hint="build the model again, and load that one" if first.dead else "load it again before it runs",
        )  # fmt: skip
    first.process(
        lambda: processing.run(
            model, host, lambda layer: True, lambda layer: True, lambda name: None, lambda *layer: None
        )
    )
