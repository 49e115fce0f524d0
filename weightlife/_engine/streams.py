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
            instead = begin(item[0], item[1], here == home)
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
        yield item if instead is None else (item[0], instead)
        if here == home:
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
            if here == home:
                trust.observe(str(item[0]))
            instead = begin(item[0], item[1], here == home)
        except BaseException as error:
            if here != home:
                receiver.lost = error
            raise
        receiver.odd = False
        yield item if instead is None else (item[0], instead)
        if here == home:
            between()


__all__ = ["items", "ruled"]
