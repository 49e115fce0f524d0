# SPDX-License-Identifier: Apache-2.0
"""One call of a user's loader, taken apart: the model, the stream of weights, and everything else."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._session import watch

if TYPE_CHECKING:
    import torch

    from weightlife._engine.lifecycle import Lifecycle


class Call:
    """One call of a loader: what it is bound to, the model, what may be a stream of weights, and the rest."""

    def __init__(
        self, loader: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
    ) -> None:
        import torch

        self.loader = loader
        self.name: str = name or getattr(loader, "__name__", type(loader).__name__)
        rest: tuple[Any, ...] = ()
        if "model" in kwargs:
            kwargs = dict(kwargs)
            before, model = args, kwargs.pop("model")
        else:
            # A method has `self` in front, which may be a module itself (a trainer's).
            at = 1 if len(args) > 1 and isinstance(args[1], torch.nn.Module) else 0
            before, model, rest = args[:at], args[at] if args else None, args[at + 1 :]
        if not isinstance(model, torch.nn.Module):
            raise errors.HostError(
                f"{self.name} was called without a model: {type(model).__name__} is no torch.nn.Module",
                hint="its first argument (after self), or its keyword `model`, has to be the model",
            )
        self.model: torch.nn.Module = model
        self.before, self.rest, self.kwargs = before, rest, kwargs
        self.keyword = "weights" in kwargs
        given = kwargs["weights"] if self.keyword else rest[0] if rest else None
        self.source = given if is_stream(given) else None

    def life(self, settings: dict[str, Any]) -> Lifecycle | None:
        """The model's lifecycle, made if it has none; None where weightlife was uninstalled since it was loaded."""
        from weightlife._engine import lifecycle

        life = lifecycle.of(self.model)
        if life is None and not lifecycle.released(self.model):
            watch(self.model, **settings)
            life = lifecycle.of(self.model)
            assert life is not None
        return life

    def plain(self) -> Any:
        """The loader itself."""
        return self.loader(*self.before, self.model, *self.rest, **self.kwargs)

    def with_stream(self) -> Callable[[Any], Any]:
        """The loader as a function of its stream: rules know a loader by what is in this closure, so no more is in it."""
        loader, before, model, rest, kwargs = self.loader, self.before, self.model, self.rest, self.kwargs
        if self.source is None:
            return lambda stream: loader(*before, model, *rest, **kwargs)
        if self.keyword:
            others = self.others()
            return lambda stream: loader(*before, model, *rest, weights=stream, **others)
        after = rest[1:]
        return lambda stream: loader(*before, model, stream, *after, **kwargs)

    def for_later(self) -> Later | None:
        """The same to be kept on the model; None for a loader without a stream."""
        return None if self.source is None else Later(self)

    def others(self) -> dict[str, Any]:
        """Keywords but for a stream among them."""
        return {name: given for name, given in self.kwargs.items() if not self.keyword or name != "weights"}

    def expected(self, expected: Any) -> Any:
        """What a reload brings, told from the arguments if that is what was wanted."""
        return expected(self.model, *self.rest, **self.kwargs) if callable(expected) else expected


class Later:
    """A loader as a model keeps it: a function of the stream, which does not keep the model alive."""

    def __init__(self, call: Call) -> None:
        self._loader, self._before, self._others = call.loader, call.before, call.others()
        self._keyword = call.keyword
        self._rest = call.rest if call.keyword else call.rest[1:]  # without the old stream
        self._model = weakref.ref(call.model)

    def __call__(self, stream: Any) -> Any:
        """Load."""
        args, kwargs = self._arguments(self._model(), stream)
        return self._loader(*args, **kwargs)

    def call(self, model: Any, stream: Any, name: str) -> Call:
        """Another call of it, which is known to be of the same loader."""
        return Call(self._loader, *self._arguments(model, stream), name)

    def _arguments(self, model: Any, stream: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._keyword:
            return (*self._before, model, *self._rest), {**self._others, "weights": stream}
        return (*self._before, model, stream, *self._rest), self._others


def is_stream(given: Any) -> bool:
    """Whether it can be (name, tensor) pairs."""
    if isinstance(given, (str, bytes, os.PathLike, Mapping)):
        return False
    return isinstance(given, (Iterable, AsyncIterable))


__all__ = ["Call", "Later", "is_stream"]
