# SPDX-License-Identifier: Apache-2.0
"""Which models have a lifecycle in this process, how many of them are in trouble, and which session is running."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from weightlife._engine.slots import RESERVED_ATTRIBUTE

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession

Value = TypeVar("Value")


class Inside(threading.local, Generic[Value]):
    """What a thread is inside of now, with the interface of a context variable.

    It is none. `asyncio.to_thread` and every new task copy the context that they are made in: a task that a loader had
    made was then inside of its session for good, in another thread or while the loader waited, where nobody sees what
    is written.
    """

    _value: Value | None = None

    def get(self) -> Value | None:
        """The innermost, or None."""
        return self._value

    def set(self, value: Value) -> Value | None:
        """Go inside. Returns what `reset` takes."""
        before, self._value = self._value, value
        return before

    def reset(self, token: Value | None) -> None:
        """Leave it, in the thread that went inside."""
        self._value = token


current: Inside[WeightLoadSession] = Inside()
"""The session that the running call belongs to: set only while a call is inside the lifecycle."""

routing: Inside[Lifecycle] = Inside()
"""The model whose loader the running call drives over tensors without memory (`routing.py`)."""

_owners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Lifecycle]] = weakref.WeakKeyDictionary()
_registry: weakref.WeakValueDictionary[int, Lifecycle] = weakref.WeakValueDictionary()
_released: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""Models whose lifecycle `uninstall()` took: in kernel format, and no first load any more. What native code of theirs
points to lives as long as they do."""


class OpenSessions:
    """How many sessions are open or models poisoned in this process: the guard's one comparison."""

    count = 0


def enter(life: Lifecycle, model: torch.nn.Module) -> None:
    """A model has a lifecycle from here on; every part of it belongs to that one."""
    for module in model.modules():
        _owners[module] = weakref.ref(life)
    vars(model)[RESERVED_ATTRIBUTE] = life
    _registry[id(model)] = life


def of(model: Any) -> Lifecycle | None:
    """The lifecycle of a model, if it has one."""
    if not isinstance(model, torch.nn.Module):
        return None
    found: Lifecycle | None = vars(model).get(RESERVED_ATTRIBUTE)
    return found


def owner_of(layer: torch.nn.Module) -> Lifecycle | None:
    """The lifecycle of the model that a layer is part of."""
    found = _owners.get(layer)
    return None if found is None else found()


def all_lifecycles() -> list[Lifecycle]:
    """Every live model's lifecycle in this process."""
    return list(_registry.values())


def forget(model: torch.nn.Module) -> None:
    """Remove the lifecycle of a model (uninstall)."""
    found: Lifecycle | None = vars(model).pop(RESERVED_ATTRIBUTE, None)
    if found is not None:
        if found.poisoned:
            OpenSessions.count -= 1
            found.poisoned = ""
        for handle in found.hooks:
            handle.remove()
        for module in model.modules():
            owner = _owners.get(module)
            if owner is not None and owner() is found:
                del _owners[module]
        _registry.pop(id(model), None)


def release(model: torch.nn.Module) -> None:
    """Forget a model that has been loaded (uninstall): later loads of it are the host's own."""
    found = of(model)
    forget(model)
    if found is not None and found.first is None:
        _released[model] = [memory for _, memory in found.keep_alive]


def released(model: Any) -> bool:
    """Whether a model was loaded under a weightlife that is uninstalled since."""
    return isinstance(model, torch.nn.Module) and model in _released


__all__ = [
    "OpenSessions",
    "all_lifecycles",
    "current",
    "enter",
    "forget",
    "of",
    "owner_of",
    "release",
    "released",
    "routing",
]
