# SPDX-License-Identifier: Apache-2.0
"""Which elements of a tensor a copy takes: no false alarm for the same elements by other views, none missed for others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weightlife._engine.cuts import WHOLE, cut_of, strays
from weightlife._engine.ledger import region
from weightlife._engine.manifest import Received

COPY = torch.ops.aten.copy_.default
FULL = torch.arange(64.0).reshape(8, 8)
View = Callable[[torch.Tensor], torch.Tensor]


def note(entry: Received, weight: torch.Tensor, to: View, of: View, full: torch.Tensor = FULL) -> None:
    """Enter one copy as a load does."""
    view, given = to(weight), of(full)
    entry.wrote(0, region(view.storage_offset(), tuple(view.shape), view.stride()))
    entry.cuts = (*(entry.cuts or ()), cut_of(COPY, (view, given), view, full))


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def left(value: torch.Tensor) -> torch.Tensor:
    return value[:, :4]


def learned(*pairs: tuple[View, View], shape: tuple[int, ...] = (8, 4)) -> Received:
    entry, weight = Received((8, 8), "float32", 256), torch.zeros(shape)
    for to, of in pairs or ((same, left),):
        note(entry, weight, to, of)
    return entry


def asked(
    known: Received, to: View, of: View, shape: tuple[int, ...] = (8, 4), full: torch.Tensor = FULL
) -> bool:
    now = Received((8, 8), "float32", 256)
    note(now, torch.zeros(shape), to, of, full)
    assert now.cuts is not None
    ((number, part),) = now.writes
    return strays(now.cuts[0], number, part, known) is not None


@pytest.mark.parametrize(
    ("to", "of"),
    [
        (same, lambda full: full.narrow(1, 0, 4)),
        (lambda weight: weight.t(), lambda full: full.t()[:4]),
        (lambda weight: weight[2:5], lambda full: full[2:5, :4]),
        (lambda weight: weight[:, 1], lambda full: full[:, 1]),
        (lambda weight: weight.view(8, 2, 2), lambda full: full.view(8, 4, 2)[:, :2]),
        (lambda weight: weight[0, 0], lambda full: full[0, 0]),
        (same, lambda full: full[:, :4] * 1.0),  # computed: nothing is known
    ],
)  # fmt: skip
def test_the_same_elements_by_other_views_are_no_finding(to: View, of: View) -> None:
    assert not asked(learned(), to, of)


@pytest.mark.parametrize(
    ("to", "of"),
    [
        (same, lambda full: full[:, 4:]),  # another rank's
        (same, lambda full: full[:4].t()),  # another dimension
        (lambda weight: weight.view(-1), lambda full: full.view(-1)[:32]),  # so many, from the front
        (lambda weight: weight[2:5], lambda full: full[3:6, :4]),
        (lambda weight: weight[0, 1], lambda full: full[1, 0]),
    ],
)  # fmt: skip
def test_other_elements_are_found(to: View, of: View) -> None:
    assert asked(learned(), to, of)


def test_pieces_and_the_whole() -> None:
    """Two halves that one name wrote, against one copy of all; and a square that is transposed."""
    halves = learned(
        (lambda weight: weight[:4], lambda full: full[:4]), (lambda weight: weight[4:], lambda full: full[4:]),
        shape=(8, 8),
    )  # fmt: skip
    whole = learned((same, same), shape=(8, 8))
    assert whole.cuts == (WHOLE,)
    for known in (halves, whole):
        assert not asked(known, same, same, (8, 8))
        assert not asked(known, lambda weight: weight[3:6], lambda full: full[3:6], (8, 8))
        assert asked(known, same, lambda full: full.t(), (8, 8))
    exchanged = learned(
        (lambda weight: weight[:4], lambda full: full[4:]), (lambda weight: weight[4:], lambda full: full[:4]),
        shape=(8, 8),
    )  # fmt: skip
    assert asked(exchanged, same, same, (8, 8))


def test_a_sender_may_lay_its_tensor_out_otherwise() -> None:
    turned = FULL.t().contiguous().t()
    assert not asked(learned((same, same), shape=(8, 8)), same, same, (8, 8), turned)
    assert not asked(learned(), same, left, full=turned)  # not known, and not guessed


def test_a_neighbour_in_a_bucket_is_not_the_tensor() -> None:
    bucket = torch.zeros(128)
    first, second = bucket[:64].view(8, 8), bucket[64:].view(8, 8)
    weight = torch.zeros(8, 8)
    assert cut_of(COPY, (weight, first), weight, second) is None
    assert cut_of(COPY, (weight, second.t()), weight, second) == (0, (8, 8), (1, 8), (8, 1))


def test_random_views_against_a_table_of_elements() -> None:
    """What is said is true: a finding only where some element really comes from elsewhere."""
    random = np.random.default_rng(5)
    found = 0
    for _ in range(300):
        rows, columns = (int(n) for n in random.integers(1, 5, 2))
        starts = random.integers(0, 8 - max(rows, columns), 4)
        first = FULL[starts[0] : starts[0] + rows, starts[1] : starts[1] + columns]
        other = FULL[starts[2] : starts[2] + rows, starts[3] : starts[3] + columns]
        if random.random() < 0.3:
            other = first
        if rows == columns and random.random() < 0.5:
            other = other.t()
        known = learned((same, lambda _, first=first: first), shape=(rows, columns))
        said = asked(known, same, lambda _, other=other: other, (rows, columns))
        assert said == (not torch.equal(first, other))
        found += said
    assert 50 < found < 290
