# SPDX-License-Identifier: Apache-2.0
"""Loaders of a user's own: `weightlife.wrap_loader`."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import AsyncIterable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from weightlife import errors
from weightlife._loader_calls import Call
from weightlife._safetensors import Checkpoint
from weightlife._session import session
from weightlife.hosts import runtime

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

Loader = TypeVar("Loader", bound=Callable[..., Any])

METHODS = ("load", "load_weights", "__call__")
"""Of a class of loaders the first of these that it has."""


@overload
def wrap_loader(loader: Loader) -> Loader: ...


@overload
def wrap_loader(
    *, chunked: bool = False, expected: Any = None, **settings: Any
) -> Callable[[Loader], Loader]: ...


def wrap_loader(loader: Any = None, *, chunked: bool = False, expected: Any = None, **settings: Any) -> Any:
    """Make a loader of your own, `loader(model, ...)`, one session a call.

    The first call on a model is its first load: watched, then processed by the host's hooks (`TorchHost`: methods
    named `process_weights_after_loading`); do not call them yourself. Every later call is a reload: complete or
    refused, undone when it fails.

    Args:
        loader: a function or a method; its first argument (after `self`) is the model. If the next one, or the keyword
            `weights`, is an iterable of (name, tensor), also an asynchronous one, errors can name tensors; a list can
            still be indexed and read twice. Anything else (paths, a state dict) is handed through, and what is missing
            is known by element. `async def` is one
            session too: between its awaits the old weights serve. Of a class a subclass is made, whose method `load`
            (or else `load_weights`, `__call__`) is wrapped.
        chunked: a call brings a part, and the next forward pass is the end.
        expected: what a reload brings, as for `session`, or a function that tells it from the loader's arguments.
        settings: override the installed settings for models that this loader meets first.

    After `uninstall()` it is the plain loader again for models that it has loaded. `WEIGHTLIFE=0` does not reach it:
    it is code of yours, not something that was installed.

    Raises:
        ConfigError: `chunked` and `expected` together, or nothing that loads. The wrapped loader, besides what it and
        a session raise: HostError: it was not given a model.
    """
    if chunked and expected is not None:
        raise errors.ConfigError("a loader whose calls bring parts cannot expect all of it")
    if loader is None:
        return functools.partial(_wrap, chunked=chunked, expected=expected, settings=settings)
    return _wrap(loader, chunked=chunked, expected=expected, settings=settings)


def _wrap(loader: Any, chunked: bool, expected: Any, settings: dict[str, Any]) -> Any:
    again = functools.partial(_wrap, chunked=chunked, expected=expected, settings=settings)
    if isinstance(loader, (staticmethod, classmethod)):
        return type(loader)(again(loader.__func__))
    if isinstance(loader, type):
        return _subclass(loader, again)
    if not callable(loader):
        raise errors.ConfigError(f"{type(loader).__name__} loads nothing: it can't be called")

    @functools.wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        return run(Call(loader, args, kwargs), settings, chunked, expected)

    @functools.wraps(loader)
    async def load_later(*args: Any, **kwargs: Any) -> Any:
        call = Call(loader, args, kwargs)
        life = call.life(settings)
        if life is None:
            return await call.plain()
        if life.first is None and _mode(life) == "observe":
            life.note(
                f"{call.name} loads by itself: of an asynchronous load there is no report in observe mode"
            )
            return await call.plain()
        return await _run_later(call, life, chunked, expected)

    asynchronous = inspect.iscoroutinefunction(loader) or inspect.iscoroutinefunction(
        getattr(type(loader), "__call__", None)  # noqa: B004 - not whether it can be called, but how it is written
    )
    return load_later if asynchronous else load


def _subclass(cls: type, wrapped: Callable[[Any], Any]) -> type:
    """The class with its loading method wrapped. The original stays as it is: it may be somebody else's."""
    for name in METHODS:
        method = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if method is not None:
            body = {name: wrapped(method), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
            return type(cls)(cls.__name__, (cls,), {**body, "__doc__": cls.__doc__})
    raise errors.ConfigError(f"{cls.__name__} has none of the methods {', '.join(METHODS)}")


def run(call: Call, settings: dict[str, Any], chunked: bool = False, expected: Any = None) -> Any:
    """One call of a loader that is no coroutine function, as `wrap_loader` has it."""
    life = call.life(settings)
    if life is None:
        return call.plain()
    if life.first is None and _mode(life) == "observe":
        return life.observe(call.name, call.plain, (), {})
    return _run(call, life, chunked, expected)


def _mode(life: Lifecycle) -> str:
    """The mode in force for a model: its own, else the installed one, which may change while it lives."""
    return life.own_mode or (runtime.mode_for(life) if runtime.installed() else life.settings.mode)


def _run(call: Call, life: Lifecycle, chunked: bool, expected: Any) -> Any:
    from weightlife.hosts import forward

    if isinstance(call.source, AsyncIterable):
        raise errors.HostError(
            f"{call.name} is no coroutine function, and its weights come asynchronously", model=life.name,
            hint="write it as `async def`, or give it an ordinary iterable",
        )  # fmt: skip
    life.loader = call.for_later() or life.loader
    stream, weights = call.with_stream(), () if call.source is None else call.source
    if life.first is not None:
        _alone(call, life)
        out = _loaded(life.load_weights(stream, weights), call)
        if not chunked:
            forward.process_first(call.model, life)
        return out
    life.refuse_from_source(call.name)
    if _joins(life, chunked):
        with _reading(life, call.source):
            return _loaded(life.load_weights(stream, weights), call)
    with _session(call, life, expected) as opened:
        opened.engine_session.whole = True
        with _reading(life, call.source):
            return _loaded(life.load_weights(stream, weights), call)


def _loaded(out: Any, call: Call) -> Any:
    """What a loader returned, which was none if it has only promised to load."""
    if inspect.iscoroutine(out):
        out.close()
        raise errors.HostError(
            f"{call.name} returned a coroutine and loaded nothing", model=type(call.model).__name__,
            hint="wrap the function that is written `async def`, below other decorators",
        )  # fmt: skip
    return out


async def _run_later(call: Call, life: Lifecycle, chunked: bool, expected: Any) -> Any:
    from weightlife.hosts import forward

    if life.first is not None:
        _alone(call, life)
        out = await _Steps(call, life)
        if not chunked:
            forward.process_first(call.model, life)
        return out
    life.refuse_from_source(call.name)
    if _joins(life, chunked):
        return await _Steps(call, life)
    with _session(call, life, expected) as opened:
        opened.engine_session.whole = True
        return await _Steps(call, life)


def _alone(call: Call, life: Lifecycle) -> None:
    """Nobody joins a first load that waits. Its report names the files that it reads.

    Raises:
        SessionConflictError: one is under way.
    """
    if life.first_by:
        raise errors.SessionConflictError(
            f"{call.name} wants to load the model while its first load by {life.first_by} is under way",
            model=life.name,
        )
    if life.first is not None and isinstance(call.source, Checkpoint):
        life.first.report.source = call.source.path


@contextmanager
def _reading(life: Lifecycle, source: Any) -> Iterator[None]:
    """A call within a session. What a reader of files does is not of the model, and costs 19 us a tensor to look at.

    In a session that somebody else began, what its headers say is held against a complete load first.

    Raises:
        CompletenessError: by the setting `source`; nothing of this call was written.
    """
    from weightlife._engine import announce

    opened = life.session
    if opened is None or opened.receiver is None or not isinstance(source, Checkpoint):
        yield
        return
    if not opened.whole:
        announce.check(opened, source.headers, False, opened.settings.source)
    receiver = opened.receiver
    before, receiver.trusted = receiver.trusted, True
    try:
        yield
    finally:
        receiver.trusted = before


def _joins(life: Lifecycle, chunked: bool) -> bool:
    """Whether a call is a part of an update that somebody else began, or has no end of its own.

    A loader's own session is no such update: who comes while it waits is another one, and is told so.
    """
    session = life.session
    explicit = session is not None and session.explicit and not session.whole
    return chunked or explicit or life.is_inside()


def _session(call: Call, life: Lifecycle, expected: Any) -> Any:
    return session(
        call.model,
        partial=life.settings.partial_disk,
        expected=call.expected(expected),
        source=call.source if isinstance(call.source, Checkpoint) else "",
        opened_by=call.name,
    )


class _Steps:
    """An asynchronous loader, as the calls that it is made of: what runs between two awaits is one.

    Nothing of ours is in force while it waits: passes of other tasks see the old weights, and what those do is theirs.
    """

    def __init__(self, call: Call, life: Lifecycle) -> None:
        from weightlife._engine.streams import Ahead, as_given

        self._life, self._name = life, call.name
        source = call.source
        self._later = source.__aiter__() if isinstance(source, AsyncIterable) else None
        self._came: deque[Any] = deque()  # of an asynchronous source, and not handed over yet
        self._ahead: deque[Any] = deque()  # handed over while no step ran, and not known to a call yet
        self._source: Iterator[Any] = iter(()) if source is None or self._later else iter(source)
        self._items = _Feed(Ahead, self._ahead, self._came, self._source)
        self.now: Iterator[Any] | None = None
        given = self if source is None or self._later else as_given(source, self)
        self._coroutine: Coroutine[Any, Any, Any] = call.with_stream()(given)

    def __iter__(self) -> _Steps:
        return self

    def __next__(self) -> Any:
        """The loader's next tensor, named to the call that runs now.

        Where none runs a task or a thread of the loader's pulls ahead: the next call is told.
        """
        if self.now is not None:
            return next(self.now)
        item = self._came.popleft() if self._came else next(self._source)
        if isinstance(item, (tuple, list)):
            self._ahead.append(item)
        return item

    def __aiter__(self) -> _Steps:
        return self

    async def __anext__(self) -> Any:
        """As `__next__`, of an asynchronous source: it may come in a later call than it was asked for in."""
        if self._later is not None:
            self._came.append(await self._later.__anext__())
            return next(self)
        try:
            return next(self)
        except StopIteration:
            raise StopAsyncIteration from None

    def told(self, stream: Iterator[Any]) -> None:
        """A call begins: it hears of what was pulled before it."""
        while self._ahead:
            next(stream)

    def __await__(self) -> Generator[Any, Any, Any]:
        """Run it to its end."""
        step: Callable[[], Any] = functools.partial(self._coroutine.send, None)
        while True:
            done, value = self._life.load_weights(_Step(self, step).run, self._items)
            if done:
                return value
            try:
                if self._life.first is not None:
                    self._life.first_by = self._name
                sent = yield value
            except BaseException as error:  # noqa: BLE001 - cancelled, or failed: the loader may clean up, or go on
                step = functools.partial(self._coroutine.throw, error)
            else:
                step = functools.partial(self._coroutine.send, sent)
            finally:
                self._life.first_by = ""


class _Step:
    """One call. An object of its own each time: no rule is learned from a loader that waits, nor used for it."""

    def __init__(self, steps: _Steps, step: Callable[[], Any]) -> None:
        self._steps, self._step = steps, step

    def run(self, stream: Iterator[Any]) -> tuple[bool, Any]:
        """(whether it was the last one, what it returned or waits for)."""
        steps = self._steps
        steps.told(stream)
        steps.now = stream
        try:
            return False, self._step()
        except StopIteration as end:
            return True, end.value
        finally:
            steps.now = None


class _Feed:
    """What a call's stream is made of: first what was pulled ahead of it, then what came, then the source."""

    def __init__(
        self, mark: Callable[[Any], Any], ahead: deque[Any], came: deque[Any], source: Iterator[Any]
    ) -> None:
        self._mark, self._ahead, self._came, self._source = mark, ahead, came, source

    def __iter__(self) -> _Feed:
        return self

    def __next__(self) -> Any:
        if self._ahead:
            return self._mark(self._ahead.popleft())
        return self._came.popleft() if self._came else next(self._source)
