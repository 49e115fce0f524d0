# SPDX-License-Identifier: Apache-2.0
"""Operators that write a part of their destination, chosen by an index or a mask: which elements these are.

`p[experts] = t` is one operation on all of `p`. Taken for a write of all of it, a tensor that did not come would not
be missed, and elements that no load writes would keep what was in fresh memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from weightlife._engine.skeleton import view_on

_Positions: TypeAlias = npt.NDArray[np.int64]

# Pieces of one operation, each of equal distances. Any range is one; noise has as many as elements, and its pieces would
# take a hundred times the memory of the weight.
MOST = 1024
_RUNS = 1 << 14  # before runs are put together to such pieces


class Spots(NamedTuple):
    """What one operation writes.

    Attributes:
        views: of the destination; each is written whole.
        known: whether that is so. If not, `views` is the destination, of which some elements stay as they are.
    """

    views: list[torch.Tensor]
    known: bool


class _Chosen(NamedTuple):
    """Offsets in elements from the destination's first one, and the dimensions that are written whole at each."""

    offsets: _Positions
    rest: list[int]


class _UntoldError(Exception):
    """Masks; indices without values, or outside of the destination: what the operator says of these is better."""


def written(func: Any, args: tuple[Any, ...], view: torch.Tensor) -> Spots | None:
    """The elements of `view` that an operator writes; None where it is none of these, and writes all of it.

    Args:
        func: the operator.
        args: its arguments, of which the first is the destination.
        view: the destination as it is now (it may have been redirected), dense.
    """
    choose = None if func is None else CHOICES.get(func._schema.name)
    if choose is None or not args or view.shape != getattr(args[0], "shape", None):
        return None
    if view.ndim == 0:
        return Spots([view], False)
    try:
        offsets, rest = choose(view, args)
    except _UntoldError:
        return Spots([view], False)
    shape, strides = [view.shape[dim] for dim in rest], [view.stride(dim) for dim in rest]
    pieces = _pieces(np.unique(offsets))
    if pieces is None:
        return Spots([view], False)
    start, memory = view.storage_offset(), view.untyped_storage()
    views = [
        view_on(memory, view.dtype, start + first, (*sizes, *shape), (*steps, *strides))
        for first, sizes, steps in pieces
    ]
    return Spots(views, True)


def _values(index: Any) -> npt.NDArray[Any]:
    if not isinstance(index, torch.Tensor) or index.is_meta or index.layout is not torch.strided:
        raise _UntoldError
    return np.asarray(index.detach().cpu().numpy())


def _within(index: npt.NDArray[Any], size: int) -> _Positions:
    found = index.astype(np.int64, copy=False)
    if found.size and (found.min() < -size or found.max() >= size):
        raise _UntoldError
    return np.where(found < 0, found + size, found)


def _at(view: torch.Tensor, dims: Sequence[int], indices: Sequence[npt.NDArray[Any]]) -> _Positions:
    """Offsets of index tuples, broadcast against each other."""
    total = np.zeros((), dtype=np.int64)
    for dim, index in zip(dims, indices, strict=True):
        total = total + _within(index, view.shape[dim]) * view.stride(dim)
    return np.asarray(total, dtype=np.int64).ravel()


def _others(view: torch.Tensor, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(view.ndim) if dim not in dims]


def _by_indices(view: torch.Tensor, args: tuple[Any, ...]) -> _Chosen:
    """`index_put_(self, indices, values)`: for each dimension an index, or nothing. For masks see `_masked`."""
    dims: list[int] = []
    indices: list[npt.NDArray[Any]] = []
    dim = 0
    for index in args[1]:
        if index is None:
            dim += 1
            continue
        values = _values(index)
        if values.dtype in (np.bool_, np.uint8) or dim == view.ndim:
            raise _UntoldError
        dims.append(dim)
        indices.append(values)
        dim += 1
    return _Chosen(_at(view, dims, indices), _others(view, dims))


def _along(view: torch.Tensor, args: tuple[Any, ...]) -> _Chosen:
    """`index_copy_(self, dim, index, ...)` and its kin."""
    dim = args[1] % view.ndim
    return _Chosen(_at(view, [dim], [_values(args[2])]), _others(view, [dim]))


def _scattered(view: torch.Tensor, args: tuple[Any, ...]) -> _Chosen:
    """`scatter_(self, dim, index, ...)`: an index for each element of the source."""
    dim, index = args[1] % view.ndim, _values(args[2])
    if index.ndim != view.ndim:
        raise _UntoldError
    grid: list[npt.NDArray[Any]] = list(np.indices(index.shape, sparse=True))
    grid[dim] = index
    return _Chosen(_at(view, range(view.ndim), grid), [])


def _masked(view: torch.Tensor, args: tuple[Any, ...]) -> _Chosen:
    """`masked_fill_(self, mask, ...)`: a mask is made of values (`isnan`), and chooses others in the next load."""
    raise _UntoldError


def _flat(view: torch.Tensor, args: tuple[Any, ...]) -> _Chosen:
    """`put_(self, index, ...)`: positions in the destination's own order."""
    index = _within(_values(args[1]), view.numel()).ravel()
    return _Chosen(_at(view, range(view.ndim), np.unravel_index(index, view.shape)), [])


CHOICES: dict[str, Callable[[torch.Tensor, tuple[Any, ...]], _Chosen]] = {
    **dict.fromkeys(("aten::index_put_", "aten::_index_put_impl_"), _by_indices),
    **dict.fromkeys(
        ("aten::index_copy_", "aten::index_fill_", "aten::index_add_", "aten::index_reduce_"), _along
    ),
    **dict.fromkeys(("aten::scatter_", "aten::scatter_add_", "aten::scatter_reduce_"), _scattered),
    **dict.fromkeys(("aten::masked_fill_", "aten::masked_scatter_"), _masked),
    "aten::put_": _flat,
}
"""Operators by name, and what each chooses."""


def _pieces(offsets: _Positions) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]] | None:
    """Ascending offsets as (first, sizes, strides), or None where there are too many.

    Runs of equal distances, and runs of equal runs of equal distances.
    """
    runs: list[tuple[int, int, int]] = []
    for first, last in _runs(offsets):
        if len(runs) == _RUNS:
            return None
        size = last - first + 1
        runs.append((int(offsets[first]), size, int(offsets[first + 1] - offsets[first]) if size > 1 else 1))
    out: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    at = 0
    while at < len(runs):
        if len(out) == MOST:
            return None
        start, *like = runs[at]
        end = at + 1
        step = runs[end][0] - start if end < len(runs) else 0
        while end < len(runs) and runs[end][1:] == tuple(like) and runs[end][0] - runs[end - 1][0] == step:
            end += 1
        alone = end == at + 1
        out.append(
            (start, (like[0],), (like[1],)) if alone else (start, (end - at, like[0]), (step, like[1]))
        )
        at = end
    return out


def _runs(offsets: _Positions) -> Iterator[tuple[int, int]]:
    """First and last position of each run of equal distances, greedily."""
    distances = np.diff(offsets)
    ends = np.append(np.flatnonzero(np.diff(distances)), len(distances) - 1)  # last distance of each kind
    at, count = 0, len(offsets)
    while at < count:
        if at == count - 1:
            yield at, at
            return
        last = int(ends[np.searchsorted(ends, at)]) + 1
        yield at, last
        at = last + 1


__all__ = ["CHOICES", "MOST", "Spots", "written"]
