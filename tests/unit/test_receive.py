# SPDX-License-Identifier: Apache-2.0
"""Receiving: every way of writing is attributed, reads see generation B, and A is not touched."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.strategies import geometries
from tests.toyhost import Boom, Served, Snapshot, ToyModel, cold, faults, parameter, poison, unchanged
from weightlife import errors
from weightlife._engine.ledger import Region, counts, region
from weightlife._engine.operators import CustomOperators, Sampled, WriteObserver
from weightlife._engine.receive import Receiver
from weightlife._engine.skeleton import storage_key, view_on
from weightlife._engine.track import Track, region_of

N = 24


class Rig:
    """A receiver over one live storage and one placeholder, without a session."""

    def __init__(self) -> None:
        self.live = nn.Parameter(torch.arange(N, dtype=torch.float32).view(4, 6), requires_grad=False)
        self.made = torch.UntypedStorage(N * 4)
        self.placeholder = view_on(self.made, torch.float32, 0, (4, 6), (6, 1))
        poison(self.placeholder)
        self.a = Track(0, self.live.untyped_storage(), N * 4, torch.float32, False, "live")
        self.a.tensors.append((self.live, self.live.detach()))
        self.b = Track(1, self.made, N * 4, torch.float32, True, "placeholder")
        self.index = {storage_key(self.live): self.a, int(self.made._cdata): self.b}
        self.writes: list[tuple[int | None, Region | None]] = []
        self.receiver = Receiver(self.index, self.on_write, self.stage)

    def on_write(self, track: Track, view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        self.writes.append((track.number, region_of(track, view)))

    def stage(self, track: Track) -> None:
        track.stage = torch.UntypedStorage(track.nbytes)
        self.index[int(track.stage._cdata)] = track
        for tensor, _ in track.tensors:
            tensor.data = view_on(
                track.stage, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def count(self, number: int) -> list[int]:
        return counts(N, [part for n, part in self.writes if n == number and part is not None]).tolist()


Way = Callable[[torch.Tensor, torch.Tensor], Any]

WAYS: dict[str, Way] = {
    "copy_": lambda p, x: p.data.copy_(x),
    "copy_ on the parameter": lambda p, x: p.copy_(x),
    "detach().copy_": lambda p, x: p.detach().copy_(x),
    "broadcast copy_": lambda p, x: p.data.copy_(x[0]),
    "fill_": lambda p, x: p.data.fill_(3.0),
    "zero_": lambda p, x: p.data.zero_(),
    "index assignment": lambda p, x: p.data.__setitem__(slice(None), x),
    "ellipsis assignment": lambda p, x: p.data.__setitem__(..., x),
    "index assignment of a number": lambda p, x: p.data.__setitem__(slice(None), 1.5),
    "narrow": lambda p, x: [p.data.narrow(0, i, 1).copy_(x[i : i + 1]) for i in range(4)],
    "columns": lambda p, x: [p.data.narrow(1, i, 2).copy_(x[:, i : i + 2]) for i in (0, 2, 4)],
    "as_strided": lambda p, x: p.data.as_strided((N,), (1,)).copy_(x.flatten()),
    "view": lambda p, x: p.data.view(-1).copy_(x.flatten()),
    "transposed": lambda p, x: p.data.t().copy_(x.t()),
    "chunk": lambda p, x: [c.copy_(y) for c, y in zip(p.data.chunk(2), x.chunk(2), strict=True)],
    "unbind": lambda p, x: [c.copy_(y) for c, y in zip(p.data.unbind(1), x.unbind(1), strict=True)],
    "select": lambda p, x: [p.data[i].copy_(x[i]) for i in range(4)],
    "_foreach_copy_": lambda p, x: torch._foreach_copy_([p.data[0], p.data[1:]], [x[0], x[1:]]),
    "out=": lambda p, x: torch.add(x, 1.0, out=p.data),
    "out= of a view": lambda p, x: [torch.mul(x[i], 2.0, out=p.data[i]) for i in range(4)],
    "cat out=": lambda p, x: torch.cat([x[:2], x[2:]], out=p.data),
    "index_copy_": lambda p, x: p.data.index_copy_(0, torch.arange(4), x),
    "scatter_": lambda p, x: p.data.scatter_(0, torch.arange(4)[:, None].expand(4, 6), x),
    "masked assignment": lambda p, x: p.data.__setitem__(torch.ones(4, 6, dtype=torch.bool), x.flatten()),
    "index_put": lambda p, x: p.data.__setitem__(torch.arange(4), x),
    "uniform_": lambda p, x: p.data.uniform_(1, 2),
    "bytes": lambda p, x: p.data.view(torch.uint8).copy_(x.view(torch.uint8)),
    "set_data of an alias": lambda p, x: nn.Parameter(p.data, requires_grad=False).data.copy_(x),
}
READS_FIRST = {
    "add_": lambda p, x: p.data.add_(x),
    "augmented assignment": lambda p, x: p.data.__setitem__(slice(None), p.data + x),
    "mul_ by itself": lambda p, x: p.data.mul_(p.data),
}


class TestWays:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("live", [True, False], ids=["live", "placeholder"])
    def test_every_element_is_attributed_once_and_a_is_not_touched(self, way: str, live: bool) -> None:
        rig = Rig()
        target = rig.live if live else rig.placeholder
        a = rig.a.tensors[0][1]
        before = a.clone()
        value = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).add_(5)
        plain = torch.zeros(4, 6)
        torch.manual_seed(3)
        WAYS[way](plain, value)
        torch.manual_seed(3)
        with rig.receiver:
            WAYS[way](target, value)
        assert torch.equal(target.data, plain)
        number = 0 if live else 1
        if way != "bytes":  # bytes of a wider type are written, but not counted by element
            assert rig.count(number) == [1] * N
            assert rig.count(1 - number) == [0] * N
        assert torch.equal(a, before)

    @pytest.mark.parametrize("way", READS_FIRST)
    def test_read_and_write_of_what_was_written_before(self, way: str) -> None:
        rig = Rig()
        value = torch.full((4, 6), 3.0)
        plain = value.clone()
        READS_FIRST[way](plain, value)
        for target in (rig.live, rig.placeholder):
            with rig.receiver:
                target.data.copy_(value)
                READS_FIRST[way](target, value)
            assert torch.equal(target.data, plain)

    @given(st.lists(geometries(N), min_size=1, max_size=6))
    def test_any_view_is_counted_as_a_bitmap(self, parts) -> None:
        for pick in ("live", "placeholder"):
            rig = Rig()
            with rig.receiver:
                for part in parts:
                    if len(set(part.elements())) == len(
                        part.elements()
                    ):  # torch refuses writes that overlap themselves
                        view = getattr(rig, pick).data.as_strided(part.shape, part.strides, part.offset)
                        view.fill_(1.0)
            want = [0] * N
            for part in parts:
                if len(set(part.elements())) == len(part.elements()):
                    for element in part.elements():
                        want[element] += 1
            assert rig.count(0 if pick == "live" else 1) == want

    def test_writes_to_other_memory_are_none_of_ours(self) -> None:
        rig = Rig()
        with rig.receiver:
            scratch = torch.empty(4, 6)
            scratch.copy_(rig.live)
            scratch += 1
        assert rig.writes == []
        assert rig.a.stage is None

    def test_reads_alone_stage_nothing(self) -> None:
        rig = Rig()
        with rig.receiver:
            assert float(rig.live.sum()) == float(sum(range(N)))
            rig.live.clone()
            rig.live[1:].t().contiguous()
        assert rig.a.stage is None

    def test_reads_see_what_was_written(self) -> None:
        rig = Rig()
        view = rig.live.data[1:3]  # made before the first write: it still points to A
        with rig.receiver:
            rig.live.data.fill_(9.0)
            assert torch.equal(view, torch.full((2, 6), 9.0))
            assert float(view.sum()) == 9.0 * 12
            view.fill_(2.0)
            assert rig.live.data[:, 0].tolist() == [9.0, 2.0, 2.0, 9.0]
        assert rig.a.tensors[0][1].flatten().tolist() == [float(i) for i in range(N)]

    def test_raw_memory_of_a_live_storage_is_that_of_its_stage(self) -> None:
        rig = Rig()
        a = rig.a.tensors[0][1]
        address = a.data_ptr()
        with CustomOperators(rig.receiver, None), rig.receiver:
            array = rig.live.data.numpy()
            assert rig.live.data_ptr() != address
        array[:] = 9.0
        assert rig.a.raw
        assert torch.equal(rig.live.data, torch.full((4, 6), 9.0))
        assert a.flatten().tolist() == [float(i) for i in range(N)]

    def test_raw_memory_of_a_placeholder_is_its_own(self) -> None:
        rig = Rig()
        with CustomOperators(rig.receiver, None), rig.receiver:
            rig.placeholder.data.numpy()[:] = 9.0
        assert rig.b.raw
        assert torch.equal(rig.placeholder, torch.full((4, 6), 9.0))

    def test_in_place_operations_return_their_own_argument(self) -> None:
        rig = Rig()
        with rig.receiver:
            data = rig.live.data
            assert data.copy_(torch.ones(4, 6)) is data
            assert rig.placeholder.fill_(1.0) is rig.placeholder

    def test_lists_of_tensors_are_redirected(self) -> None:
        rig = Rig()
        with rig.receiver:
            rig.live.data.fill_(1.0)
            old_view = rig.a.tensors[0][1]
            assert torch.cat([old_view, old_view]).sum() == 2 * N
            assert torch.stack([old_view]).unique().tolist() == [1.0]

    def test_the_sender_may_reuse_its_buffer_at_once(self) -> None:
        rig = Rig()
        buffer = torch.empty(6)
        with rig.receiver:
            for row in range(4):
                buffer.fill_(row)
                rig.placeholder.data[row].copy_(buffer)
        buffer.fill_(-1)
        assert rig.placeholder.data[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


class TestRegionOf:
    def test_wider_elements_count_as_several(self) -> None:
        storage = torch.UntypedStorage(32)
        track = Track(0, storage, 32, torch.int8, True, "")
        view = view_on(storage, torch.int32, 1, (3,), (2,))
        part = region_of(track, view)
        assert part is not None
        assert counts(32, [part]).nonzero()[0].tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]

    def test_narrower_elements_are_irregular(self) -> None:
        storage = torch.UntypedStorage(32)
        assert (
            region_of(
                Track(0, storage, 32, torch.int32, True, ""), view_on(storage, torch.int8, 1, (4,), (1,))
            )
            is None
        )

    def test_other_type_of_the_same_size(self) -> None:
        storage = torch.UntypedStorage(32)
        track = Track(0, storage, 32, torch.float32, True, "")
        assert region_of(track, view_on(storage, torch.int32, 2, (4,), (1,))) == region(2, (4,), (1,))


class TestStream:
    def drive(self, rig: Rig, weights: Any, load: Callable[[Iterator[Any]], Any]) -> list[str]:
        events: list[str] = []
        with rig.receiver:
            load(
                rig.receiver.stream(
                    weights, lambda name, *_: events.append(f"begin {name}"), lambda: events.append("end")
                )
            )
        return events

    def test_order_of_events(self) -> None:
        events = self.drive(Rig(), iter([("a", torch.ones(1)), ("b", torch.ones(1))]), list)
        assert events == ["begin a", "end", "begin b", "end"]

    def test_operations_of_the_iterator_are_not_recorded(self) -> None:
        rig = Rig()
        other = torch.zeros(6)

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for i in range(3):
                yield (
                    str(i),
                    other.add_(1).clone() * float(rig.live[0, 0] + 1),
                )  # nothing of it is replaced yet

        def load(stream: Any) -> None:
            for name, tensor in stream:
                rig.placeholder.data[int(name)].copy_(tensor)

        self.drive(rig, source(), load)
        assert {number for number, _ in rig.writes} == {1}
        assert rig.a.stage is None
        assert rig.placeholder.data[:3, 0].tolist() == [1.0, 2.0, 3.0]

    def test_an_iterator_that_reads_what_is_being_replaced_is_refused(self) -> None:
        rig = Rig()

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", rig.live.data * 2
            yield "b", rig.live.data * 2

        with pytest.raises(errors.SessionStateError, match="reads live"):
            self.drive(rig, source(), lambda stream: [rig.live.data.copy_(tensor) for _, tensor in stream])
        assert torch._C._len_torch_dispatch_stack() == 0

    def test_a_nested_receiver_is_left_alone(self) -> None:
        outer, inner = Rig(), Rig()
        with outer.receiver:
            self.drive(
                inner, iter([("a", torch.ones(4, 6))]), lambda s: [inner.live.data.copy_(t) for _, t in s]
            )
            outer.placeholder.data.fill_(1.0)
        assert inner.count(0) == [1] * N
        assert outer.count(1) == [1] * N

    @pytest.mark.parametrize("kind", ["list", "tuple", "generator"])
    def test_any_iterable(self, kind: str) -> None:
        items = [("a", torch.ones(1)), ("b", torch.zeros(1))]
        weights = {"list": items, "tuple": tuple(items), "generator": (item for item in items)}[kind]
        seen: list[str] = []
        self.drive(Rig(), weights, lambda s: seen.extend(name for name, _ in s))
        assert seen == ["a", "b"]

    def test_the_iterators_exception_is_its_own(self) -> None:
        def source() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.ones(1)
            raise Boom("source")

        with pytest.raises(Boom, match="source"):
            self.drive(Rig(), source(), list)
        assert torch._C._len_torch_dispatch_stack() == 0

    def test_a_loader_that_stops_early_or_closes(self) -> None:
        rig = Rig()

        def load(stream: Iterator[Any]) -> None:
            next(stream)
            stream.close()  # type: ignore[attr-defined]

        self.drive(rig, iter([("a", torch.ones(1)), ("b", torch.ones(1))]), load)
        assert torch._C._len_torch_dispatch_stack() == 0


class TestObserver:
    @pytest.mark.parametrize("way", [*WAYS, *READS_FIRST])
    def test_every_way_of_writing_in_place_is_noted(self, way: str) -> None:
        param = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        observer = WriteObserver({storage_key(param): 7})
        with observer:
            (WAYS | READS_FIRST)[way](param, torch.ones(4, 6))
        assert observer.written == {7}

    def test_reads_are_not(self) -> None:
        param = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        observer = WriteObserver({storage_key(param): 7})
        with observer:
            torch.add(param, 1.0, out=torch.empty(4, 6))
            param.t().contiguous().mul_(2)
        assert observer.written == set()


@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    """Operators as hosts register them: composite ones run below dispatch, handles are integers."""
    library = torch.library.Library("weightlife_toy", "FRAGMENT")
    library.define("pack(Tensor x, Tensor(a!) out) -> ()")
    library.define("handle(Tensor x) -> int")
    library.define("sum(Tensor x) -> Tensor")

    def pack(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    library.impl("pack", pack, "CompositeImplicitAutograd")
    library.impl("handle", lambda x: x.data_ptr(), "CompositeImplicitAutograd")
    library.impl("sum", lambda x: x.sum(), "CompositeImplicitAutograd")
    yield torch.ops.weightlife_toy
    library._destroy()


class TestCustomOperators:
    def test_declared_writes_are_reported(self, operators: Any) -> None:
        seen: list[torch.Tensor] = []
        out = torch.zeros(3)
        with CustomOperators(None, seen.append):
            operators.pack(torch.ones(3), out)
        assert [t is out for t in seen] == [True]

    def test_placeholders_are_written(self, operators: Any) -> None:
        rig = Rig()
        with CustomOperators(rig.receiver, None), rig.receiver:
            operators.pack(torch.ones(4, 6), rig.placeholder)
        assert torch.equal(rig.placeholder, torch.ones(4, 6))
        assert rig.count(1) == [1] * N

    def test_a_is_not_written(self, operators: Any) -> None:
        rig = Rig()
        a = rig.a.tensors[0][1]
        with CustomOperators(rig.receiver, None), rig.receiver:
            operators.pack(torch.ones(4, 6), a)
        assert a.flatten().tolist() == [float(i) for i in range(N)]
        assert torch.equal(rig.live, torch.ones(4, 6))

    @pytest.mark.parametrize("packet", [True, False])
    def test_what_is_handed_over_for_an_integer_is_remembered(self, operators: Any, packet: bool) -> None:
        mode = CustomOperators(None, None)
        tensor = torch.ones(3)
        with mode:
            (operators.handle if packet else operators.handle.default)(tensor)
            operators.sum(torch.ones(4))
        assert list(mode.handed_over) == [storage_key(tensor)]
        assert not mode.handed_over[storage_key(tensor)].expired()
        del tensor
        assert [weak.expired() for weak in mode.handed_over.values()] == [True]

    def test_torch_itself_is_left_alone(self) -> None:
        mode = CustomOperators(None, lambda t: pytest.fail("reported"))
        with mode:
            torch.ones(3).add_(1)
            torch.ops.aten.sum(torch.ones(3)).item()
        assert mode.handed_over == {}


# -- through a whole session -----------------------------------------------------------------------------------


class TestSampled:
    """The function mode is off for the third name of a kind, and the stack of modes is what it was in any case."""

    @staticmethod
    def names(count: int) -> list[str]:
        return [f"layers.{i}.experts.{i * 7}.w1" for i in range(count)]

    def test_two_of_a_kind_are_watched(self) -> None:
        mode = CustomOperators(None, None)
        seen = []
        with Sampled(mode, {}, 1) as sampled:
            for name in [*self.names(5), "layers.9.norm"]:
                sampled.begin(name)
                seen.append(torch._C._len_torch_function_stack())
            sampled.stand()
            after = torch._C._len_torch_function_stack()
        assert seen == [1, 1, 0, 0, 0, 1]
        assert (after, torch._C._len_torch_function_stack()) == (1, 0)

    def test_a_second_call_is_watched_anew_and_its_kinds_are_the_same(self) -> None:
        kinds: dict[Any, Any] = {}
        mode = CustomOperators(None, None)
        seen, found = [], set()
        for call in (1, 2):
            with Sampled(mode, kinds, call) as sampled:
                for name in self.names(3):
                    found.add(sampled.begin(name, torch.ones(2)))
                    seen.append(torch._C._len_torch_function_stack())
        assert seen == [1, 1, 0, 1, 1, 0]
        assert len(found) == len(kinds) == 1

    def test_alike_are_names_that_differ_in_numbers_with_tensors_of_one_shape_and_dtype(self) -> None:
        kinds: dict[Any, Any] = {}
        with Sampled(CustomOperators(None, None), kinds, 1) as sampled:
            one = sampled.begin("a.1.\ud800", torch.ones(2))
            assert sampled.begin("a.22.\ud800", torch.zeros(2)) is one
            others = [("a.1.b", torch.ones(2)), ("a.1.\ud800", torch.ones(1, 2)), ("a.1.\ud800", torch.ones(2).half()),
                      ("a.1.\ud800", None)]  # fmt: skip
            assert len({one, *(sampled.begin(name, tensor) for name, tensor in others)}) == 5

    def test_a_loader_that_fails_in_the_middle(self) -> None:
        def load() -> None:
            with Sampled(CustomOperators(None, None), {}, 1) as sampled:
                for name in self.names(3):
                    sampled.begin(name)
                raise Boom

        with pytest.raises(Boom):
            load()
        assert torch._C._len_torch_function_stack() == 0

    def test_function_modes_of_the_loader(self) -> None:
        """A generator between us and the loader that holds a device context over what it yields."""
        mode = CustomOperators(None, None)

        def through(names: list[str]) -> Iterator[str]:
            for name in names:
                sampled.begin(name)
                with torch.device("cpu"):
                    yield name

        with Sampled(mode, {}, 1) as sampled, torch.device("meta"):
            depths = [torch._C._len_torch_function_stack() for _ in through(self.names(4))]
        assert depths == [3, 3, 3, 3]  # below a mode of another's it stays
        assert torch._C._len_torch_function_stack() == 0


class OneWay(ToyModel):
    """A model whose one extra parameter is written in a given way."""

    def __init__(self, way: Way, packed: bool) -> None:
        super().__init__(("norm",))
        self.way = way
        self.packed = packed
        self.weight = parameter(4, 6, loader=self.load, fill=0.0)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (4, 6), **super().sources()}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        self.weight.weight_loader(self.weight, tensor)

    def load(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        faults.tick("write")
        with torch.no_grad():
            self.way(param, tensor)

    def process(self) -> None:
        super().process()
        if self.packed:
            self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super().forward(x), self.weight.data.flatten()])


ROUND: dict[str, Way] = {
    "set_": lambda p, x: p.data.set_(x.clone()),
    "data =": lambda p, x: setattr(p, "data", x.clone()),
    "resize_": lambda p, x: p.data.resize_(2, 12).copy_(x.view(2, 12)),
}
RAW: dict[str, Way] = {
    "numpy": lambda p, x: p.data.numpy().__setitem__(slice(None), x.numpy()),
    "data_ptr": lambda p, x: ctypes.memmove(p.data_ptr(), x.data_ptr(), N * 4),
    "repr": lambda p, x: (repr(p), p.data.copy_(x)),
    "tolist": lambda p, x: (p.tolist(), p.data.copy_(x)),
}


def round_trip(how: str, packed: bool) -> str:
    """Update by one of these ways: "right", or what is wrong."""
    served = Served(lambda: OneWay((ROUND | RAW)[how], packed))
    before, snapshot = served.run(), Snapshot(served.model)
    try:
        served.update(served.checkpoint(1))
    except (errors.WeightlifeError, RuntimeError):
        same = torch.equal(served.run(), before)
        return (
            "right"
            if same and not snapshot.differences(Snapshot(served.model))
            else "refused, but A was changed"
        )
    return "right" if torch.equal(served.run(), served.expected()) else "committed other values"


def test_raw_memory_is_right_or_refused_and_never_silent_nor_a_crash() -> None:
    """In a child: a placeholder without memory would be a null pointer to whoever goes round torch."""
    code = (
        "from tests.unit.test_receive import RAW, round_trip\n"
        "for how in RAW:\n"
        "    for packed in (False, True):\n"
        "        print(how, packed, round_trip(how, packed), flush=True)"
    )
    root = Path(__file__).resolve().parents[2]
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    want = [f"{how} {packed} right" for how in RAW for packed in (False, True)]
    assert (child.returncode, child.stdout.splitlines()) == (0, want), child.stderr[-2000:]


@pytest.mark.parametrize("packed", [False, True], ids=["direct", "rebuild"])
class TestSession:
    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    @pytest.mark.parametrize("way", [w for w in WAYS if w != "uniform_"])
    def test_reload_equals_a_cold_load(self, way: str, packed: bool, storage: str) -> None:
        served = Served(lambda: OneWay(WAYS[way], packed), storage=storage)
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("way", [w for w in WAYS if w != "bytes"])
    def test_missing_is_noticed_whichever_way_is_taken(self, way: str, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS[way], packed))
        checkpoint = served.checkpoint(1)
        del checkpoint["weight"]
        with unchanged(served.model), pytest.raises(errors.MissingTensorError) as caught:
            served.update(checkpoint)
        assert caught.value.tensors == ("weight",)

    @pytest.mark.parametrize("way", ["add_", "augmented assignment"])
    def test_a_loader_that_accumulates_starts_from_the_constructors_value_or_is_refused(
        self, way, packed
    ) -> None:
        served = Served(lambda: OneWay(READS_FIRST[way], packed))
        before = served.run()
        try:
            served.update(served.checkpoint(1))
        except errors.WeightlifeError:
            assert torch.equal(served.run(), before)
            return
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("how", list(ROUND))
    def test_a_write_that_goes_round_the_parameter_is_right_or_refused_and_never_silent(
        self, how, packed
    ) -> None:
        assert round_trip(how, packed) == "right"

    def test_an_operator_of_the_hosts_own_counts_once(self, packed: bool, operators: Any) -> None:
        """It is seen twice, whole and by the operations inside it: still one write."""
        served = Served(lambda: OneWay(lambda p, x: operators.pack(x, p.data), packed))
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("after", [0, 1])
    def test_the_loaders_exception_comes_out_as_it_is(self, after: int, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        faults.arm("write", after)
        with unchanged(served.model), pytest.raises(Boom) as caught:
            served.update(served.checkpoint(1))
        assert type(caught.value) is Boom
        assert served.life.session is None

    def test_a_wrong_shape_is_named(self, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        for shape in ((5, 7), (6, 4)):  # before the loader sees it; what the loader says of it
            checkpoint = {**served.checkpoint(1), "weight": torch.ones(shape)}
            with unchanged(served.model), pytest.raises(errors.ShapeMismatchError) as caught:
                served.update(checkpoint)
            assert caught.value.tensors == ("weight",)
        assert isinstance(caught.value.__cause__ or caught.value.__context__, RuntimeError)

    def test_an_error_of_ours_inside_a_write_comes_out_as_ours(self, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        checkpoint = {**served.checkpoint(1), "weight": torch.ones(4, 6, dtype=torch.int8)}
        with unchanged(served.model), pytest.raises(errors.DtypeMismatchError) as caught:
            served.update(checkpoint)
        assert caught.value.tensors == ("weight",)

    @pytest.mark.parametrize("way", ["index assignment", "_foreach_copy_", "narrow", "index_copy_"])
    def test_a_forbidden_cast_is_noticed_in_other_ways_too(self, way: str, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS[way], packed))
        checkpoint = {**served.checkpoint(1), "weight": torch.ones(4, 6, dtype=torch.int8)}
        # index_copy_ refuses the types by itself; the others would convert in silence.
        with unchanged(served.model), pytest.raises((errors.DtypeMismatchError, RuntimeError)):
            served.update(checkpoint)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_a_float_cast_is_legal(self, dtype: torch.dtype, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        checkpoint = {name: value.to(dtype) for name, value in served.checkpoint(1).items()}
        served.update(checkpoint)
        assert torch.equal(served.run(), served.expected())

    def test_a_reused_buffer(self, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        checkpoint = served.checkpoint(1)
        buffer = torch.empty(64)

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in checkpoint.items():
                view = buffer[: value.numel()].view(value.shape)
                view.copy_(value)
                yield name, view
                buffer.fill_(float("nan"))

        served.open()
        served.send(source())
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    def test_a_sender_in_inference_mode(self, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        with torch.inference_mode():
            served.update(served.checkpoint(1))
        assert not any(p.is_inference() for p in served.model.parameters())
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())

    def test_received_names_are_attributed(self, packed: bool) -> None:
        served = Served(lambda: OneWay(WAYS["copy_"], packed))
        manifest = served.life.manifest
        assert set(manifest.names) == set(served.weights)
        number = manifest.names["weight"].writes[0][0]
        assert manifest.expected[number] == Counter({region(0, (N,), (1,)): 1})
        assert manifest.names["weight"].shape == (4, 6)
        report = served.life.reports[-1]
        assert (report.tensors_received, report.bytes_received) == (2, 4 * (N + 4))


def test_the_same_region_under_several_names_and_twice_under_one_is_legal() -> None:
    class Twice(ToyModel):
        def load_weights(self, weights: Any) -> set[str]:
            items = list(weights)
            for name, tensor in items:
                super().load_weights([(name, tensor)])
                if name.endswith("q"):
                    super().load_weights([(name, tensor)])  # a composed loader writes twice
            return set()

    served = Served(lambda: Twice(("fused_packed",)))
    served.update(served.checkpoint(1))
    want = cold(lambda: Twice(("fused_packed",)), served.weights)
    assert torch.equal(served.run(), want(torch.arange(1, 5, dtype=torch.float32)))
