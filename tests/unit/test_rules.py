# SPDX-License-Identifier: Apache-2.0
"""Rules: the elements that are looked at belong to their region, whatever its shape."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import MAX_NUMEL, Geometry, geometries
from weightlife._engine.ledger import Region, counts, region
from weightlife._engine.rules import PROBE_BYTES, Kind, can_probe, copies_own, kind_of, probe_index


@given(geometries(), st.sampled_from([1, 2, 4, 8, 16]))
def test_probes_are_inside_their_region(geometry: Geometry, size: int) -> None:
    """Both ends, as many elements as make eight bytes, and none that the region does not write."""
    part = region(geometry.offset, geometry.shape, geometry.strides)
    if not can_probe(part, size):
        assert not part.shape or part.strides[-1] != 1 or part.shape[-1] * size < PROBE_BYTES or size == 16
        return
    index = probe_index([part, part], size)
    assert index.shape == (2, 2 * PROBE_BYTES // size)
    written = counts(MAX_NUMEL, [part])
    assert all(written[i] for i in index[0].tolist())
    inside = torch.from_numpy(written).nonzero().flatten().tolist()
    assert index[0, 0] == inside[0] and index[0, -1] == inside[-1]
    assert torch.equal(index[0], index[1])


def test_what_is_too_small_to_look_at() -> None:
    """A scalar scale, a column, nothing."""
    assert not can_probe(Region(0, (), ()), 4)
    assert not can_probe(Region(0, (1,), (1,)), 4)
    assert not can_probe(Region(0, (16,), (2,)), 4)
    assert not can_probe(Region(0, (0,), (1,)), 4)
    assert can_probe(Region(3, (2,), (1,)), 4)
    assert can_probe(Region(3, (5, 8), (16, 1)), 1)


def test_kinds_are_names_without_numbers() -> None:
    """Also numbers within a word."""
    kinds: dict[object, Kind] = {}
    one = kind_of(kinds, "model.layers.12.experts.7.w1.weight", None)
    assert one is kind_of(kinds, "model.layers.0.experts.63.w3.weight", None)
    assert kind_of(kinds, "layers.1.k", None) is not kind_of(kinds, "layers.1.v", None)


def test_a_copy_from_the_tensor_that_came() -> None:
    """By memory, not by object: views of it count, neighbours in the same bucket do not."""
    copy, fill = torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar
    bucket = torch.arange(32.0)
    mine, other = bucket[8:16], bucket[16:24]
    target = torch.empty(8)
    assert copies_own(copy, (target, mine), mine)
    assert copies_own(copy, (target[:2], mine[6:].view(2)), mine)
    assert not copies_own(copy, (target, other), mine)
    assert not copies_own(copy, (target, bucket[:8]), mine)
    assert not copies_own(copy, (target, mine.clone()), mine)
    assert not copies_own(fill, (target, 1.0), mine)
    assert not copies_own(copy, (target, mine), None)
    assert not copies_own(None, (), mine)
