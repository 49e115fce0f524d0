# SPDX-License-Identifier: Apache-2.0
"""Operators that write what an index chooses: these elements count as written, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import weightlife
from tests.plainnet import nets
from weightlife import errors
from weightlife._engine import ledger, spots
from weightlife._engine.track import Track, region_of

__all__ = ["nets"]

Write = Callable[[torch.Tensor], Any]

SHAPE = (5, 6, 4)
long = torch.tensor
FORMS: dict[str, Write] = {
    "one index": lambda p: p.__setitem__(long([3, 1]), 1.0),
    "negative": lambda p: p.__setitem__(long([-1, 0]), 1.0),
    "twice the same": lambda p: p.__setitem__(long([2, 2, 2]), 1.0),
    "none at all": lambda p: p.__setitem__(long([], dtype=torch.long), 1.0),
    "of the second dimension": lambda p: p.__setitem__((slice(None), long([0, 2, 4])), 1.0),
    "of the last dimension": lambda p: p.__setitem__((..., long([3, 1])), 1.0),
    "of two dimensions": lambda p: p.__setitem__((long([0, 4]), long([5, 1])), 1.0),
    "of two that are apart": lambda p: p.__setitem__((long([0, 4]), slice(None), long([2])), 1.0),
    "broadcast": lambda p: p.__setitem__((long([[0], [3]]), long([1, 2, 5])), 1.0),
    "of all dimensions": lambda p: p.__setitem__((long([0, 1]), long([2, 3]), long([3, 0])), 1.0),
    "a slice and an index": lambda p: p.__setitem__((slice(1, 4), long([5, 0])), 1.0),
    "values": lambda p: p.__setitem__(long([3, 1]), torch.ones(2, 6, 4)),
    "added": lambda p: p.nan_to_num_().index_put_((long([3, 3]),), torch.ones(1), accumulate=True),
    "index_copy_": lambda p: p.index_copy_(1, long([4, 0]), torch.ones(5, 2, 4)),
    "index_copy_ from the end": lambda p: p.index_copy_(-1, long([1, 3]), torch.ones(5, 6, 2)),
    "index_fill_": lambda p: p.index_fill_(2, long([0]), 1.0),
    "index_add_": lambda p: p.nan_to_num_().index_add_(0, long([1, 1]), torch.ones(2, 6, 4)),
    "scatter_": lambda p: p.scatter_(1, long([5, 2]).view(1, 2, 1).expand(5, 2, 4), torch.ones(5, 2, 4)),
    "scatter_ of a corner": lambda p: p.scatter_(0, torch.full((2, 3, 1), 4), torch.ones(2, 3, 1)),
    "scatter_ a number": lambda p: p.scatter_(2, torch.ones(5, 6, 1, dtype=torch.long), 1.0),
    "scatter_add_": lambda p: p.nan_to_num_().scatter_add_(0, torch.full((2, 3, 1), 4), torch.ones(2, 3, 1)),
    "put_": lambda p: p.put_(long([0, 119, -2, 7]), torch.ones(4)),
}
MASKS: dict[str, Write] = {
    "a mask of rows": lambda p: p.__setitem__(long([True, False, True, False, False]), 1.0),
    "a mask of two dimensions": lambda p: p.__setitem__(torch.arange(30).view(5, 6) % 7 == 2, 1.0),
    "a mask of all": lambda p: p.__setitem__(torch.arange(120).view(SHAPE) % 7 == 2, 1.0),
    "a mask of nothing": lambda p: p.__setitem__(torch.zeros(SHAPE, dtype=torch.bool), 1.0),
    "a mask behind a slice": lambda p: p.__setitem__((slice(None), torch.arange(6) > 3), 1.0),
    "masked_fill_": lambda p: p.masked_fill_(torch.arange(120).view(SHAPE) % 3 == 0, 1.0),
    "masked_fill_ of rows": lambda p: p.masked_fill_((torch.arange(5) > 2).view(5, 1, 1), 1.0),
    "masked_fill_ of columns": lambda p: p.masked_fill_(torch.arange(4) % 2 == 0, 1.0),
    "masked_fill_ of everything": lambda p: p.masked_fill_(long(True), 1.0),
    "masked_scatter_": lambda p: p.masked_scatter_(torch.arange(120).view(SHAPE) % 5 == 1, torch.ones(120)),
}
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda memory: memory[:120].view(SHAPE),
    "transposed": lambda memory: memory[7:127].view(6, 4, 5).permute(2, 0, 1),
    "every second": lambda memory: memory[3:243].view(5, 6, 8)[..., ::2],
    "a part": lambda memory: memory[:630].view(7, 9, 10)[1:6, 2:8, 3:7],
}


class Watched(TorchDispatchMode):
    """What the last operator that chooses would be counted as."""

    found: spots.Spots | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in spots.CHOICES:
            self.found = spots.written(func, args, args[0])
        return func(*args, **(kwargs or {}))


def counted(memory: torch.Tensor, found: spots.Spots) -> list[int]:
    storage = memory.untyped_storage()
    track = Track(0, storage, storage.nbytes(), memory.dtype, False, "")
    parts = Counter(region_of(track, view) for view in found.views)
    return [int(n) for n in ledger.counts(track.numel, {part: n for part, n in parts.items() if part})]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("form", FORMS)
def test_what_counts_as_written_is_what_changes(form: str, view: str) -> None:
    memory = torch.full((640,), float("nan"))
    target = VIEWS[view](memory)
    with Watched() as watched:
        FORMS[form](target)
    assert watched.found is not None and watched.found.known
    assert counted(memory, watched.found) == [int(value == 1 or value == 2) for value in memory.tolist()]


@pytest.mark.parametrize("form", MASKS)
def test_a_mask_may_choose_others_the_next_time(form: str) -> None:
    """All of it counts as read and written."""
    memory = torch.zeros(640)
    target = VIEWS["a part"](memory)
    with Watched() as watched:
        MASKS[form](target)
    assert watched.found is not None and not watched.found.known
    assert sum(counted(memory, watched.found)) == target.numel()


def test_ranges_and_columns_are_few_pieces_and_noise_is_none() -> None:
    target = torch.zeros(512, 512)
    forms: dict[str, tuple[Write, int]] = {
        "rows": (lambda p: p.__setitem__(torch.arange(100, 400), 1.0), 1),
        "columns": (lambda p: p.__setitem__((slice(None), torch.arange(100, 400)), 1.0), 1),
        "every third column": (lambda p: p.index_fill_(1, torch.arange(0, 512, 3), 1.0), 1),
        "a block": (lambda p: p.scatter_(0, torch.arange(9, 19)[:, None].expand(10, 7), 1.0), 1),
        "two blocks": (lambda p: p.__setitem__((torch.arange(512) // 8 % 32 == 0).nonzero()[:, 0], 1.0), 1),
    }
    for form, (write, most) in forms.items():
        with Watched() as watched:
            write(target)
        assert watched.found is not None and watched.found.known
        assert len(watched.found.views) <= most, form
    with Watched() as watched:
        target[tuple((torch.rand(512, 512) > 0.5).nonzero().t())] = 1.0
    assert watched.found is not None and not watched.found.known
    assert [view.shape for view in watched.found.views] == [target.shape]


def test_what_an_operator_refuses_it_refuses_itself() -> None:
    forms: list[tuple[Write, type[Exception]]] = [
        (lambda p: p.__setitem__(long([9]), 1.0), IndexError),
        (lambda p: p.index_copy_(0, long([-9]), torch.ones(1, 6, 4)), (IndexError, RuntimeError)),  # type: ignore[list-item]
        (lambda p: p.masked_fill_(torch.ones(3, dtype=torch.bool), 1.0), RuntimeError),
        (lambda p: p.scatter_(0, long([0]), 1.0), RuntimeError),
    ]
    for write, kind in forms:
        with pytest.raises(kind), Watched():
            write(torch.zeros(SHAPE))
    nothing = torch.zeros(())
    with Watched() as watched:
        nothing.masked_fill_(long(True), 1.0)
    assert watched.found is not None and not watched.found.known and nothing == 1


ROWS = 48  # of which a load writes all but the last four


class Padded(nn.Module):
    """A table with rows that no load writes, and a loader that puts rows at their places by index."""

    def __init__(self, packed: bool, width: int) -> None:
        super().__init__()
        self.packed = packed
        self.table = nn.Parameter(torch.full((ROWS, width), 7.0), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        if self.packed:
            self.table = nn.Parameter(self.table.data.t().contiguous(), requires_grad=False)

    def rows(self) -> torch.Tensor:
        return self.table.data.t() if self.packed else self.table.data


def mask_of(at: torch.Tensor) -> torch.Tensor:
    return torch.isin(torch.arange(ROWS), at)


BY_INDEX: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "index": lambda p, at, t: p.__setitem__(at, t),
    "index_copy_": lambda p, at, t: p.index_copy_(0, at, t),
    "scatter_": lambda p, at, t: p.scatter_(0, at[:, None].expand_as(t), t),
    "index_fill_": lambda p, at, t: p.index_fill_(0, at, float(t[0, 0])),
}
BY_VALUE: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "mask": lambda p, at, t: p.__setitem__(mask_of(at), t),
    "masked_scatter_": lambda p, at, t: p.masked_scatter_(mask_of(at)[:, None].expand_as(p), t),
    "large values": lambda p, at, t: p.masked_fill_(
        torch.zeros(p.shape, dtype=torch.bool).index_copy_(0, at, t > 0.5), 2.0
    ),
}


@pytest.mark.parametrize("isolation", ["staged", "in_place"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("way", [*BY_INDEX, *BY_VALUE])
def test_a_loader_that_writes_by_index(way: str, packed: bool, isolation: str) -> None:
    """Rows that no load writes keep what the constructor made; a tensor that does not come is missed."""
    write = {**BY_INDEX, **BY_VALUE}[way]
    width = 8

    @weightlife.wrap_loader(isolation=isolation, log_level="error")
    def load(model: Padded, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            first = int(name)
            write(model.table.data, torch.arange(first, first + 4), tensor)

    def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [(str(at), torch.rand(4, width, generator=generator)) for at in range(0, ROWS - 4, 4)]

    def cold(weights: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
        table = torch.full((ROWS, width), 7.0)
        for name, tensor in weights:
            write(table, torch.arange(int(name), int(name) + 4), tensor)
        return table

    model = Padded(packed, width)
    load(model, checkpoint(1))
    load(model, checkpoint(2))
    assert torch.equal(model.rows(), cold(checkpoint(2)))
    short = checkpoint(3)
    del short[4]
    if (
        way in BY_VALUE
    ):  # which tensor wrote what is not known: at least nothing stands there that nobody made
        load(model, short)
        assert torch.equal(model.rows(), cold(short))
        return
    with pytest.raises(errors.MissingTensorError, match=r"tensors=\[16\]"):
        load(model, short)
    assert torch.equal(model.rows(), cold(checkpoint(2)))


@pytest.mark.parametrize("isolation", ["staged", "in_place"])
def test_a_partial_update_by_index_keeps_the_other_rows(isolation: str) -> None:
    """What a delta does not choose stays what serves."""
    model = Padded(False, 8)

    @weightlife.wrap_loader(isolation=isolation, log_level="error")
    def load(model: Padded, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            model.table.data[torch.arange(int(name), int(name) + len(tensor))] = tensor

    load(model, [("0", torch.rand(ROWS, 8))])
    want = model.rows().clone()
    want[9:12] = 5
    with weightlife.session(model):
        load(model, [("9", torch.full((3, 8), 5.0))])
    assert torch.equal(model.rows(), want)
