# SPDX-License-Identifier: Apache-2.0
"""The ledger against a bitmap: every claim that it makes about regions is counted element by element."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import MAX_NUMEL, Geometry, geometries, narrowed
from weightlife._engine import ledger
from weightlife._engine.ledger import Region, StorageLedger, compare, counts, region, uncovered


def of(geometry: Geometry) -> Region:
    return region(geometry.offset, geometry.shape, geometry.strides)


def brute(numel: int, parts: Iterable[Geometry]) -> np.ndarray:
    out = np.zeros(numel, dtype=np.int64)
    for part in parts:
        for element in part.elements():
            out[element] += 1
    return out


def elements(part: Region) -> Counter[int]:
    return Counter(Geometry(*part).elements())


WHOLE = Geometry(0, (MAX_NUMEL,), (1,))


class TestNormalForm:
    @given(geometries())
    def test_keeps_every_element_with_its_multiplicity(self, geometry: Geometry) -> None:
        assert elements(of(geometry)) == Counter(geometry.elements())

    @given(geometries())
    def test_counts_its_elements(self, geometry: Geometry) -> None:
        assert of(geometry).numel == len(geometry.elements())

    @given(geometries())
    def test_is_a_fixed_point(self, geometry: Geometry) -> None:
        part = of(geometry)
        assert region(*part) == part

    @given(geometries(), st.randoms(use_true_random=False))
    def test_does_not_depend_on_the_order_of_dimensions(self, geometry: Geometry, rng) -> None:
        dims = list(zip(geometry.shape, geometry.strides, strict=True))
        rng.shuffle(dims)
        assert region(geometry.offset, tuple(d[0] for d in dims), tuple(d[1] for d in dims)) == of(geometry)

    @given(narrowed())
    def test_a_view_of_a_contiguous_tensor_equals_its_copy_by_elements(self, drawn) -> None:
        shape, geometry = drawn
        base = torch.arange(int(np.prod(shape))).view(shape)
        view = base.as_strided(geometry.shape, geometry.strides, geometry.offset)
        assert sorted(elements(of(geometry)).elements()) == sorted(view.flatten().tolist())

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [
            ((4, 6), (6, 1)),
            ((24,), (1,)),
            ((2, 3, 4), (12, 4, 1)),
            ((1, 24, 1), (24, 1, 1)),
            ((6, 4), (1, 6)),
        ],
    )
    def test_whole_storage_is_one_region_whatever_the_view(self, shape, strides) -> None:
        assert region(0, shape, strides) == Region(0, (24,), (1,))

    def test_different_ways_to_the_same_rows_are_one_region(self) -> None:
        param = torch.zeros(8, 5)
        views = [
            param[2:6], param.narrow(0, 2, 4), param.view(-1)[10:30], param.as_strided((4, 5), (5, 1), 10),
            param.t()[:, 2:6], param.view(2, 4, 5).reshape(8, 5)[2:6].unsqueeze(1),
        ]  # fmt: skip
        regions = {region(v.storage_offset(), tuple(v.shape), v.stride()) for v in views}
        assert regions == {Region(10, (20,), (1,))}

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_narrow_on_any_dimension_covers_what_it_says(self, dim: int) -> None:
        base = torch.arange(3 * 4 * 5).view(3, 4, 5)
        view = base.narrow(dim, 1, 2)
        part = region(view.storage_offset(), tuple(view.shape), view.stride())
        assert sorted(elements(part)) == sorted(view.flatten().tolist())

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 1)])
    def test_empty(self, shape) -> None:
        part = region(4, shape, (1,) * len(shape))
        assert part.numel == 0
        assert not counts(8, [part]).any()

    def test_scalar_is_one_element(self) -> None:
        assert region(3, (), ()).numel == 1
        assert counts(8, [region(3, (), ())]).tolist() == [0, 0, 0, 1, 0, 0, 0, 0]

    def test_broadcast_dimension_counts_every_write(self) -> None:
        part = region(0, (5, 2), (0, 1))
        assert counts(2, [part]).tolist() == [5, 5]

    def test_regions_that_differ_in_elements_differ(self) -> None:
        assert region(0, (4,), (1,)) != region(0, (4,), (2,)) != region(1, (4,), (2,))


class TestCounts:
    @given(st.lists(geometries(), max_size=6))
    def test_equal_a_bitmap(self, parts: list[Geometry]) -> None:
        assert counts(MAX_NUMEL, [of(part) for part in parts]).tolist() == brute(MAX_NUMEL, parts).tolist()

    @given(st.lists(geometries(), min_size=1, max_size=4), st.integers(1, 5))
    def test_a_mapping_multiplies(self, parts: list[Geometry], times: int) -> None:
        book = {of(part): times for part in parts}
        distinct = {of(part): part for part in parts}.values()
        assert counts(MAX_NUMEL, book).tolist() == (brute(MAX_NUMEL, distinct) * times).tolist()

    @given(geometries(), st.integers(1, MAX_NUMEL))
    def test_out_of_range_is_an_error_and_nothing_else_is(self, geometry: Geometry, numel: int) -> None:
        reached = geometry.elements()
        outside = any(element >= numel for element in reached)
        if outside:
            with pytest.raises(IndexError):
                counts(numel, [of(geometry)])
        else:
            assert counts(numel, [of(geometry)]).sum() == len(reached)

    def test_negative_offset_is_out_of_range(self) -> None:
        with pytest.raises(IndexError):
            counts(4, [Region(-1, (2,), (1,))])

    def test_nothing_written_is_zero(self) -> None:
        assert counts(3, []).tolist() == [0, 0, 0]

    def test_many_writes_of_one_element_are_not_mistaken_for_none(self) -> None:
        # int16 wraps at 65,536: a counter that came back to zero would call the element missing.
        assert (counts(2, {Region(0, (2,), (1,)): 65_536}) != 0).all()


class TestCovered:
    @given(st.lists(geometries(), max_size=6))
    def test_equals_a_bitmap(self, parts: list[Geometry]) -> None:
        book = StorageLedger(MAX_NUMEL, Counter(of(part) for part in parts))
        want = brute(MAX_NUMEL, parts) > 0
        assert book.covered() == bool(want.all())
        assert book.mask().tolist() == want.tolist()

    @given(st.integers(1, 6), st.data())
    def test_pieces_of_a_whole_cover_it_in_any_order(self, pieces: int, data) -> None:
        cuts = sorted(
            data.draw(st.sets(st.integers(1, MAX_NUMEL - 1), min_size=pieces - 1, max_size=pieces - 1))
        )
        bounds = [0, *cuts, MAX_NUMEL]
        parts = [region(a, (b - a,), (1,)) for a, b in itertools.pairwise(bounds)]
        order = data.draw(st.permutations(parts))
        assert StorageLedger(MAX_NUMEL, Counter(order)).covered()
        assert StorageLedger(MAX_NUMEL, Counter(order[1:])).covered() is False

    def test_empty_storage_is_covered(self) -> None:
        assert StorageLedger(0).covered()

    def test_nothing_written_covers_nothing(self) -> None:
        assert not StorageLedger(1).covered()

    def test_enough_elements_in_the_wrong_place_do_not_cover(self) -> None:
        twice = Counter({region(0, (4,), (1,)): 1, region(1, (4,), (1,)): 1})
        assert not StorageLedger(8, twice).covered()


books = st.lists(geometries(), max_size=5)


class TestCompare:
    @given(books, books)
    def test_equals_a_bitmap(self, expected: list[Geometry], received: list[Geometry]) -> None:
        result = compare(
            MAX_NUMEL, Counter(of(part) for part in expected), Counter(of(part) for part in received)
        )
        want, have = brute(MAX_NUMEL, expected), brute(MAX_NUMEL, received)
        assert result.missing == int(((want > 0) & (have == 0)).sum())
        assert result.surplus == int((have > np.maximum(want, 1)).sum())
        assert result.exact == (result.missing == 0 and result.surplus == 0)

    @given(books, st.randoms(use_true_random=False))
    def test_a_load_is_exact_against_itself_in_any_order(self, parts: list[Geometry], rng) -> None:
        shuffled = list(parts)
        rng.shuffle(shuffled)
        assert compare(MAX_NUMEL, Counter(map(of, parts)), Counter(map(of, shuffled))).exact

    @given(st.integers(1, MAX_NUMEL - 1))
    def test_the_same_elements_in_other_pieces_are_exact(self, cut: int) -> None:
        pieces = Counter([region(0, (cut,), (1,)), region(cut, (MAX_NUMEL - cut,), (1,))])
        whole = Counter([of(WHOLE)])
        assert compare(MAX_NUMEL, whole, pieces).exact
        assert compare(MAX_NUMEL, pieces, whole).exact

    def test_twice_is_surplus_where_once_is_expected(self) -> None:
        once, twice = Counter({of(WHOLE): 1}), Counter({of(WHOLE): 2})
        assert compare(MAX_NUMEL, once, twice) == ledger.Comparison(0, MAX_NUMEL)
        assert compare(MAX_NUMEL, twice, once).missing == 0

    def test_elements_that_nobody_expects_may_be_written_once(self) -> None:
        assert compare(8, Counter(), Counter({region(0, (4,), (1,)): 1})).surplus == 0
        assert compare(8, Counter(), Counter({region(0, (4,), (1,)): 2})).surplus == 4

    def test_nothing_received(self) -> None:
        assert compare(MAX_NUMEL, Counter({of(WHOLE): 3}), Counter()) == ledger.Comparison(MAX_NUMEL, 0)


class TestUncovered:
    @given(geometries(), books)
    def test_equals_a_bitmap(self, part: Geometry, received: list[Geometry]) -> None:
        have = brute(MAX_NUMEL, received)
        want = any(have[element] == 0 for element in part.elements())
        assert uncovered(of(part), MAX_NUMEL, Counter(map(of, received))) == want


@st.composite
def expert_writes(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[tuple[int, int, int]]]:
    """A stack of fused experts (experts, 2 * rows, columns), and (expert, half, dimension that is cut) of its writes."""
    shape = (draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3)), draw(st.sampled_from((2, 4, 6))))
    slot = st.tuples(st.integers(0, shape[0] - 1), st.integers(0, 1), st.integers(0, 1))
    return shape, draw(st.lists(slot, max_size=12))


class TestExpertSlots:
    @given(expert_writes())
    def test_halves_of_experts_equal_a_bitmap(self, drawn) -> None:
        shape, writes = drawn
        stack = torch.zeros(shape)
        bitmap = torch.zeros(shape, dtype=torch.int64)
        parts = []
        for expert, half, dim in writes:
            size = shape[1 + dim] // 2
            view = stack[expert].narrow(dim, half * size, size)
            parts.append(region(view.storage_offset(), tuple(view.shape), view.stride()))
            bitmap[expert].narrow(dim, half * size, size).add_(1)
        assert counts(stack.numel(), parts).tolist() == bitmap.flatten().tolist()
        assert ledger.covered(stack.numel(), parts) == bool((bitmap > 0).all())
        everything = Counter([region(0, (stack.numel(),), (1,))])
        result = compare(stack.numel(), everything, Counter(parts))
        assert result.missing == int((bitmap == 0).sum())
        assert result.surplus == int((bitmap > 1).sum())

    @given(expert_writes(), st.integers(0, 12))
    def test_union_of_two_loads(self, drawn, cut: int) -> None:
        """What two calls wrote is what one that makes both writes: nothing depends on where a stream is cut."""
        shape, writes = drawn
        stack = torch.zeros(shape)
        parts = [
            region(v.storage_offset(), tuple(v.shape), v.stride())
            for expert, half, dim in writes
            for v in [stack[expert].narrow(dim, half * (shape[1 + dim] // 2), shape[1 + dim] // 2)]
        ]
        one, two = Counter(parts[:cut]), Counter(parts[cut:])
        numel = stack.numel()
        assert (counts(numel, one) + counts(numel, two)).tolist() == counts(numel, one + two).tolist()
        assert compare(numel, Counter(parts), one + two).exact


class TestPacked:
    @given(
        st.sampled_from((torch.int8, torch.int16, torch.int32, torch.int64)),
        st.sampled_from((torch.int8, torch.int16, torch.int32, torch.int64)),
        narrowed(),
    )
    def test_views_of_another_width_reach_the_bytes_that_they_say(self, stored, seen, drawn) -> None:
        """Packed weights are written through views of another dtype: elements of the storage are counted by bytes."""
        from weightlife._engine.track import Track, region_of

        shape, geometry = drawn
        base = torch.zeros(int(np.prod(shape)), dtype=seen)
        nbytes = base.numel() * seen.itemsize
        if nbytes % stored.itemsize:
            return
        view = base.as_strided(geometry.shape, geometry.strides, geometry.offset)
        track = Track(0, base.untyped_storage(), nbytes, stored, False, "w")
        part = region_of(track, view)
        view.fill_(-1)
        touched = base.view(torch.uint8).view(-1, stored.itemsize) != 0
        if part is None:  # an element of the storage would be half written
            assert seen.itemsize < stored.itemsize
            return
        assert touched.any(1).tolist() == (counts(track.numel, [part]) > 0).tolist()
        assert touched.any(1).equal(touched.all(1))
