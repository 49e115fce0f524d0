# SPDX-License-Identifier: Apache-2.0
"""One storage of the model during a session: its generations, what was written to it, and where a view lies on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from weightlife._engine import ledger
from weightlife._engine.ledger import Region, region


@dataclass(eq=False, repr=False)
class Track:
    """One storage of the model during a session.

    `number` is the constructor's storage number (None: nothing that a load is known to write). A *placeholder* has
    no generation A behind it; a *live* storage serves as A and is written only through `stage`.
    """

    number: int | None
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype
    placeholder: bool
    path: str
    stage: torch.UntypedStorage | None = None
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (object, its A view)
    owners: set[int] = field(default_factory=set)  # modules from which it is reached
    written: Counter[Region] = field(default_factory=Counter)  # in this epoch
    sequence: dict[Region, tuple[int, int]] = field(default_factory=dict)  # last write: number, call
    ever: set[Region] = field(default_factory=set)
    irregular: bool = False  # writes that can't be mapped to elements
    raw: bool = False  # its memory was handed out
    hooked: bool = False  # written while hooks run
    moved: bool = False  # a view of other memory may be about, of before the first tensor for it came
    retired: int = 0  # id of the layer that was processed early: nobody may touch this any more

    @property
    def current(self) -> torch.UntypedStorage:
        """The storage that holds generation B (or A, where B has not been written)."""
        return self.storage if self.stage is None else self.stage

    @property
    def numel(self) -> int:
        """Elements of `dtype`."""
        return self.nbytes // self.dtype.itemsize


@lru_cache(maxsize=8192)
def _contiguous(offset: int, numel: int) -> Region:
    """A contiguous region. Layers of one shape are written at the same places: one object for all, 100 bytes each."""
    return Region(offset, (numel,), (1,)) if numel != 1 else Region(offset, (), ())


def region_of(track: Track, view: torch.Tensor) -> Region | None:
    """The region that a view covers on its track's storage, in elements of the track's dtype.

    None where the view's element size is no multiple of the track's (the storage is then treated as irregular).
    """
    if view.dtype is track.dtype or view.dtype.itemsize == track.dtype.itemsize:
        if view.is_contiguous():
            return _contiguous(int(view.storage_offset()), view.numel())
        return region(view.storage_offset(), tuple(view.shape), view.stride())
    ratio, rest = divmod(view.dtype.itemsize, track.dtype.itemsize)
    if rest or not ratio:
        size = track.dtype.itemsize
        start, length = int(view.storage_offset()) * view.dtype.itemsize, view.numel() * view.dtype.itemsize
        if view.is_contiguous() and start % size == 0 and length % size == 0:
            return region(start // size, (length // size,), (1,))
        return None
    strides = tuple(stride * ratio for stride in view.stride())
    return region(view.storage_offset() * ratio, (*view.shape, ratio), (*strides, 1))


def whole(track: Track) -> bool:
    """Whether plain regions already show that the session wrote all of a storage."""
    return track.irregular or ledger.tiled(track.numel, track.ever)


def mask(track: Track) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Elements that the session wrote, shape (numel,). All, where writes can't be mapped."""
    if track.irregular:
        return np.ones(track.numel, dtype=bool)
    return ledger.counts(track.numel, track.ever) > 0


__all__ = ["Track", "mask", "region_of", "whole"]
