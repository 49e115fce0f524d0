# SPDX-License-Identifier: Apache-2.0
"""Cuts: which elements of a source tensor went to which elements of a weight, and whether a later load does the same.

A loader that cuts in the wrong place (the shard of another rank, another dimension, a transposed square) writes the
elements that it should, from elements that it should not: names, shapes, dtypes and the ledger all agree. So the first
load also notes where in its tensor each plain copy begins and how it strides. Two loads of one name must bring each
element of a weight from the same element of the tensor, whatever the pieces are. It is asked at some points of each
piece, and exactly: a difference at a point is never a false alarm.

A copy of something that was computed from the tensor (a cast, a quantised copy) has no cut. Of these ranks see that
shards which differed are equal, and `verify` sees all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine.ledger import Region

if TYPE_CHECKING:
    from weightlife._engine.manifest import Received

Cut = tuple[Any, ...]
"""(offset, shape, strides in the source tensor, strides in the weight), in elements; `WHOLE`: all of it, in order."""

WHOLE: Cut = ()
# Points an axis: both ends, a neighbour, the middle. Of more than three axes only the ends: 64 points at most, 40 us.
_FINE = 3

_COPY = torch.ops.aten.copy_.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def cut_of(func: Any, args: tuple[Any, ...], view: torch.Tensor, tensor: torch.Tensor | None) -> Cut | None:
    """What a write takes of the source tensor that is being loaded; None where that can't be told.

    Args:
        func: the operator.
        args: its arguments.
        view: the destination, whose elements are those of its storage.
        tensor: the source tensor.
    """
    if func is not _COPY or tensor is None:
        return None
    given = args[1]
    if given is tensor:
        if given.shape != view.shape:
            return None
        if view.is_contiguous():
            return WHOLE
        return (0, tuple(given.shape), _in_order(given.shape), view.stride())
    if (
        type(given) not in _PLAIN
        or type(tensor) not in _PLAIN
        or given.dtype is not tensor.dtype
        or given.shape != view.shape
        or given.layout is not torch.strided
        or not tensor.is_contiguous()
        or given.untyped_storage()._cdata != tensor.untyped_storage()._cdata
    ):
        return None
    shape, strides = tuple(given.shape), given.stride()
    offset = given.storage_offset() - tensor.storage_offset()
    # A bucket is one storage for many tensors, and a loader may write an earlier one now.
    if offset < 0 or offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) >= tensor.numel():
        return None
    return (offset, shape, strides, view.stride())


def _in_order(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _explicit(cut: Cut, part: Region) -> Cut:
    return cut or (0, (part.numel,), (1,), (1,))


def strays(cut: Cut | None, number: int, part: Region, known: Received) -> tuple[int, int] | None:
    """The first point at which a write takes another element than the last complete load did.

    Args:
        cut: what is taken.
        number: the storage that is written.
        part: where on it.
        known: the same name in the last complete load.

    Returns:
        index in the source tensor now and then, in elements; None: no difference is known.
    """
    writes = known.writes
    if cut is None or known.cuts is None or len(known.cuts) != len(writes):
        return None
    then = [
        (place, before)
        for (storage, place), before in zip(writes, known.cuts, strict=True)
        if storage == number and before is not None
    ]
    if (part, cut) in then:
        return None  # nearly always
    maps = [(place.offset, *_explicit(before, place)) for place, before in then]
    offset, shape, source, weight = _explicit(cut, part)
    for at in itertools.product(*(_points(size, len(shape)) for size in shape)):
        element = part.offset + sum(i * stride for i, stride in zip(at, weight, strict=True))
        now = offset + sum(i * stride for i, stride in zip(at, source, strict=True))
        before = [came for one in maps if (came := _came_from(element, *one)) is not None]
        if before and now not in before:
            return now, before[0]
    return None


def _points(size: int, axes: int) -> Iterable[int]:
    fine = (0, 1, size // 2, size - 1) if axes <= _FINE else (0, size - 1)
    return sorted({i for i in fine if i < size})


def _came_from(
    element: int, start: int, offset: int, shape: Sequence[int], source: Sequence[int], weight: Sequence[int]
) -> int | None:
    """The element of the tensor that a known copy put into an element of the weight; None: it is not among its."""
    rest, found = element - start, offset
    if rest < 0:
        return None
    for size, step, stride in sorted(zip(shape, source, weight, strict=True), key=lambda axis: -axis[2]):
        if size == 1:
            continue
        if stride <= 0:
            return None
        index = min(rest // stride, size - 1)
        rest -= index * stride
        found += index * step
    return None if rest else found


__all__ = ["WHOLE", "Cut", "cut_of", "strays"]
