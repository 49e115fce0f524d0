# SPDX-License-Identifier: Apache-2.0
"""Finders: functions that tell where storage is which a model uses and does not reach. The register; imports nothing.

    def find(model):
        yield "workspace", (my_library.POOL, "workspace")       # an object and an attribute
        yield "tables[0]", (my_library.TABLES, 0)               # a container and a key or index
        yield "handle", (handle.get_scale, handle.set_scale)    # a getter and a setter

What is found has to be rebound when it moves, and put back when an update fails. So a finder tells the *place* of each
tensor, not the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from weightlife import errors

__all__ = ["Registered", "check", "for_classes", "label", "register_finder", "unregister_finder"]

Finder = Callable[[Any], Any]
"""`finder(model)`: a mapping, or an iterable of pairs, of a name and a place (see above)."""


class Registered(NamedTuple):
    """A finder, and the class of models that it is asked about (None: all)."""

    finder: Finder
    model_class: type | None


_REGISTERED: list[Registered] = []


def register_finder(finder: Finder, model_class: type | None = None) -> Finder:
    """Ask a finder about every model of a class, or about all: for libraries of kernels. Usable as a decorator.

    It is asked when addresses are sealed, before and after the processing of each update, and for digests and
    `verify`: it should be quick. Nothing is called before a model has had its first load. Twice is once. The process is
    that of the model: of an engine with workers, register it where the library is imported there.

    Args:
        finder: called with the model; gives names and places, as a mapping or as pairs. A place is `(object,
            "attribute")`, `(container, key)` or `(getter, setter)`; there a tensor stands, or an object that holds some.
        model_class: models of this class, or of one derived from it, and no others.

    Returns:
        The finder.

    Raises:
        ConfigError: it can't be called, or `model_class` is no class.
    """
    check(finder)
    if model_class is not None and not isinstance(model_class, type):
        raise errors.ConfigError(f"{type(model_class).__name__} is no class of models")
    entry = Registered(finder, model_class)
    if entry not in _REGISTERED:
        _REGISTERED.append(entry)
    return finder


def unregister_finder(finder: Finder) -> bool:
    """Ask a finder no more, about any class. Returns whether it was registered."""
    kept = [entry for entry in _REGISTERED if entry.finder is not finder]
    found = len(kept) < len(_REGISTERED)
    _REGISTERED[:] = kept
    return found


def for_classes(model: Any) -> list[Finder]:
    """The registered finders that are asked about a model, in the order of registration."""
    return [
        entry.finder
        for entry in _REGISTERED
        if entry.model_class is None or isinstance(model, entry.model_class)
    ]


def check(finder: Any) -> None:
    """Refuse what can't be asked.

    Raises:
        ConfigError: it is not callable.
    """
    if not callable(finder):
        raise errors.ConfigError(
            f"{type(finder).__name__} is no finder", hint="give a function that takes the model"
        )


def label(finder: Finder) -> str:
    """What a finder is called in paths and errors: `my.kernels.find`."""
    named = finder if hasattr(finder, "__qualname__") else getattr(finder, "func", type(finder))
    text = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(finder).__name__)}"
    return errors.clean(text.replace("<locals>.", ""))
