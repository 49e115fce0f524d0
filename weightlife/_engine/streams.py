# SPDX-License-Identifier: Apache-2.0
"""The source of a load, item by item: whose operations these are, and which items run unobserved.

A loader may pull in a thread of its own, ahead of the one that writes: then no write belongs to a name, and nobody
knows when the loader is done with one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine.skeleton import DTYPE_NAMES
from weightlife._engine.watching import length, pop, push

if TYPE_CHECKING:
    from weightlife._engine.receive import Receiver
    from weightlife._engine.trust import Trust

Begin = Callable[[Any, Any, bool], torch.Tensor | None]
Item = tuple[str, torch.Tensor]

_PAIRS = (tuple, list)
# Iterators of C over what is there already: pulling them runs nobody's code. By type: a list of another class may
# have a generator for `__iter__`.
_KEPT: tuple[Iterable[Any], ...] = ([], (), {}.items(), OrderedDict[str, torch.Tensor]().items())
_STILL = {type(iter(value)) for value in _KEPT}


class Ahead(tuple[Any, ...]):
    """An item that somebody pulled before, elsewhere: it came, and no write that follows belongs to it."""

    __slots__ = ()


class _Given:
    """What a caller gave, whose first iteration is the observed one.

    A loader may ask a list for its length, look an item up or go through it twice. What it reads in these ways belongs
    to no name; its writes are seen all the same.
    """

    __slots__ = ("_stream", "_weights")

    def __init__(self, weights: Any, stream: Iterator[Any]) -> None:
        self._weights = weights
        self._stream: Iterator[Any] | None = stream

    def __iter__(self) -> Iterator[Any]:
        stream, self._stream = self._stream, None
        return iter(self._weights) if stream is None else stream

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._weights, name)

    def __len__(self) -> int:
        return len(self._weights)

    def __bool__(self) -> bool:
        return bool(self._weights)

    def __getitem__(self, key: Any) -> Any:
        return self._weights[key]

    def __contains__(self, item: Any) -> bool:
        return item in self._weights

    def __reversed__(self) -> Iterator[Any]:
        yield from reversed(self._weights)


def as_given(weights: Any, stream: Any) -> Any:
    """A stream over `weights` as the loader gets it: for what can be read more than once, with all else that it can."""
    return stream if hasattr(weights, "__next__") else _Given(weights, stream)


def _pair(item: Any) -> bool:
    """Whether an item is a name and a tensor. A loader may be given paths, or names, and opens files by itself."""
    return isinstance(item, _PAIRS) and len(item) > 1


def items(
    receiver: Receiver, weights: Iterable[Item], begin: Begin, between: Callable[[], None], home: int
) -> Iterator[Item]:
    """Every item is observed."""
    source = iter(weights)
    plain = type(source) in _STILL
    while True:
        here = receiver.puller = get_ident()
        began = perf_counter()
        try:
            try:
                item = receiver.outside(source) if receiver.trusted and not plain else next(source)
            finally:
                receiver.source_seconds += perf_counter() - began
            receiver.puller = 0
            named = _pair(item)
            instead = begin(item[0], item[1], here == home and type(item) is not Ahead) if named else None
        except StopIteration:
            receiver.exhausted = True
            if here == home and receiver.after is not None:
                receiver.after()
            return
        except BaseException as error:
            if here != home:
                receiver.lost = (
                    error  # a thread's exception reaches nobody: the call must not end as if all had come
                )
            raise
        finally:
            receiver.puller = 0
        receiver.odd = False
        yield item if instead is None else (item[0], instead, *item[2:])
        if here == home and named:
            between()


def ruled(
    receiver: Receiver,
    weights: Iterable[Item],
    begin: Begin,
    between: Callable[[], None],
    trust: Trust,
    home: int,
) -> Iterator[Item]:
    """As `items`, for a source whose items may have rules. What is not by rule goes the same way as there."""
    source, ident, clock = iter(weights), get_ident, perf_counter
    plain = type(source) in _STILL
    # A list, a dict and the host's own reader do nothing with the model. A generator may, and is watched.
    quiet, reader = plain or receiver.trusted, receiver.trusted
    names, received, ready, seen, index = trust.names, trust.received, trust.ready, trust.seen, receiver.index
    kinds, pending, simple = DTYPE_NAMES, trust.pending, trust.simple
    tensors, strided = torch.Tensor, torch.strided
    receiver.depth = -2  # another call may have found other modes
    while True:
        here = ident()
        if receiver.aside and here != home:
            # The mode can't be put back onto another thread's stack: what that one writes meanwhile is not seen.
            if receiver.lost is None:
                receiver.lost = trust.broken("a loader went on to read its source in another thread", [])
        elif receiver.aside and not quiet:
            if length() == receiver.depth:
                push(receiver)
                receiver.aside = False
            else:
                receiver.stand()
        receiver.puller = here
        began = clock()
        try:
            item = (
                next(source)
                if plain or receiver.aside or not quiet or here != home
                else receiver.outside(source)
            )
        except StopIteration:
            if here == home:
                receiver.stand()
            receiver.exhausted = True
            return
        except BaseException as error:
            if here == home:
                receiver.stand()
            if here != home:
                receiver.lost = error
            raise
        finally:
            receiver.source_seconds += clock() - began
            receiver.puller = 0
        if here == home and type(item) in _PAIRS and len(item) == 2:
            name, tensor = item
            # What `trust.rule` and `trust.take` do, for most of 94,000 tensors, without the calls: 0.7 us each.
            if (
                simple
                and type(name) is str
                and (entry := names.get(name)) is not None
                and entry.kind in seen
                and type(tensor) is tensors
                and tensor.shape == (like := entry.like)[0]
                and kinds[tensor.dtype] is like[1]
                and tensor.layout is strided
                and tensor.is_contiguous()
                and name not in received
                and (reader or tensor.untyped_storage()._cdata not in index)
                and ready.get(entry.number)
                and trust.left > 1
            ):
                if not receiver.aside:
                    if length() == receiver.depth + 1:
                        pop(None)
                        receiver.aside = True
                    elif not receiver.step_aside():
                        entry = None
                if entry is not None:
                    trust.left -= 1
                    received[name] = entry
                    pending.append(entry)
                    yield item
                    continue
            entry = trust.rule(name, tensor)
            if entry is not None and (receiver.aside or receiver.step_aside()):
                trust.take(name, entry)
                yield item
                if trust.streamer is not None and trust.streamer.ready:
                    receiver.stand()
                    between()
                continue
        if here == home:
            receiver.stand()
        try:
            named = _pair(item)
            if here == home and named:
                trust.observe(str(item[0]))
            instead = begin(item[0], item[1], here == home and type(item) is not Ahead) if named else None
        except BaseException as error:
            if here != home:
                receiver.lost = error
            raise
        receiver.odd = False
        yield item if instead is None else (item[0], instead, *item[2:])
        if here == home and named:
            between()


__all__ = ["Ahead", "as_given", "items", "ruled"]
