# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: geometries of views, and trees of toy layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.toyhost import KINDS, TIEABLE

MAX_NUMEL = 64


@dataclass(frozen=True)
class Geometry:
    """A view of a storage, in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def elements(self) -> list[int]:
        """Every element it reaches, with multiplicity, the slow way."""
        out = [self.offset]
        for size, stride in zip(self.shape, self.strides, strict=True):
            out = [base + i * stride for base in out for i in range(size)]
        return out


@st.composite
def geometries(draw: st.DrawFn, numel: int = MAX_NUMEL) -> Geometry:
    """Any view that fits a storage of `numel` elements: strided, overlapping, broadcast (stride 0), empty."""
    rank = draw(st.integers(0, 4))
    shape: list[int] = []
    strides: list[int] = []
    room = numel - 1
    for _ in range(rank):
        size = draw(st.integers(0, 6))
        stride = draw(st.integers(0, 12))
        if size > 1 and (size - 1) * stride > room:
            stride = room // (size - 1)
        shape.append(size)
        strides.append(stride)
        room -= max(size - 1, 0) * stride
    return Geometry(draw(st.integers(0, room)), tuple(shape), tuple(strides))


@st.composite
def narrowed(draw: st.DrawFn) -> tuple[tuple[int, ...], Geometry]:
    """A contiguous tensor's shape, and a chain of narrows, transposes, strided slices and flattenings of it."""
    import torch

    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    view = torch.zeros(shape)
    for _ in range(draw(st.integers(0, 4))):
        what = draw(st.sampled_from(("narrow", "transpose", "slice", "select", "unsqueeze", "flatten")))
        if what == "unsqueeze":
            view = view.unsqueeze(draw(st.integers(0, view.dim())))
            continue
        if view.dim() == 0:
            continue
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if what == "narrow":
            start = draw(st.integers(0, size))
            view = view.narrow(dim, start, draw(st.integers(0, size - start)))
        elif what == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif what == "slice":
            view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
        elif what == "select" and size:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif what == "flatten" and view.is_contiguous():
            view = view.view(-1)
    return shape, Geometry(view.storage_offset(), tuple(view.shape), view.stride())


def kinds() -> st.SearchStrategy[str]:
    """A layer's kind."""
    return st.sampled_from(sorted(KINDS))


@st.composite
def specs(draw: st.DrawFn, max_layers: int = 5) -> Any:
    """A tree of toy layers, ties included."""
    flat: list[Any] = []
    tieable = False
    for _ in range(draw(st.integers(1, max_layers))):
        kind = draw(st.sampled_from([*sorted(KINDS), "tied"]) if tieable else kinds())
        tieable = tieable or kind in TIEABLE
        flat.append(kind)
    cut = draw(st.integers(0, len(flat)))
    return (*flat[:cut], tuple(flat[cut:])) if 0 < cut < len(flat) else tuple(flat)
