# SPDX-License-Identifier: Apache-2.0
"""The commit: `pinned` keeps every address, `adopted` keeps generation B's; both hold a cold load's values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from tests.strategies import specs
from tests.toyhost import (
    KINDS,
    TIEABLE,
    Kernel,
    Layer,
    Served,
    Snapshot,
    ToyModel,
    cold,
    handles,
    one,
    parameter,
    unchanged,
)
from weightlife import errors
from weightlife.testing._walk import digests

EVERYTHING = (*sorted(KINDS), ("packed", "tied", ("scaled", "tied")))
STORAGES = ("pinned", "adopted")


def equal_to_cold(served: Served) -> None:
    """Every reachable tensor, its geometry and its aliases are those of a cold load."""
    ours, theirs = digests(served.model), digests(cold(served.spec, served.weights))
    assert ours == theirs


class TestPinned:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_every_address_stays_and_every_value_is_new(self, kind: str) -> None:
        served = Served((kind, "tied") if kind in TIEABLE else (kind,), storage="pinned")
        a = Snapshot(served.model)
        for seed in (1, 2, 3):
            served.update(served.checkpoint(seed))
            pointers = Snapshot(served.model).pointers()
            moved = {p for p, pointer in a.pointers().items() if pointers.get(p) != pointer}
            # An owner of a native resource is replaced whole: its own tensors come with it.
            assert {p for p in moved if "handle" not in p} == set()
            assert pointers.keys() == a.pointers().keys()
            equal_to_cold(served)

    def test_parameters_keep_their_identity(self) -> None:
        """A captured graph, an optimizer or a client may hold the object itself."""
        served = Served(EVERYTHING, storage="pinned")
        before = dict(served.model.named_parameters()) | dict(served.model.named_buffers())
        served.update(served.checkpoint(1))
        after = dict(served.model.named_parameters()) | dict(served.model.named_buffers())
        assert list(before) == list(after)
        assert [name for name in before if before[name] is not after[name]] == []

    def test_whoever_held_an_address_reads_the_new_values(self) -> None:
        served = Served(("packed",), storage="pinned")
        (layer,) = (layer for _, layer in served.model.layers())
        raw = layer.weight.data.view(-1)  # what a captured graph reads
        kernel: Kernel = layer.quant_method.kernel
        held = kernel.packed
        served.update(served.checkpoint(1))
        want = served.weights["body.inner.0.weight"].t()
        assert torch.equal(raw, want.flatten())
        assert torch.equal(held, want)
        assert layer.quant_method.kernel.packed.data_ptr() == layer.weight.data_ptr() == raw.data_ptr()

    def test_what_cannot_keep_its_address_is_refused_with_its_path(self) -> None:
        class Growing(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                keep = int(self.weight.data[0, 0]) % 3 + 1  # its shape depends on the values
                self.weight = nn.Parameter(self.weight.data[:keep].clone(), requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight @ x

        served = Served(one(Growing), storage="pinned")
        checkpoint = served.checkpoint(1)
        checkpoint["special.weight"][0, 0] = served.weights["special.weight"][0, 0] + 1
        with unchanged(served.model), pytest.raises(errors.StorageMovedError) as caught:
            served.update(checkpoint)
        assert caught.value.layer == "special.weight"
        checkpoint["special.weight"][0, 0] = served.weights["special.weight"][0, 0] + 3
        served.update(checkpoint)
        equal_to_cold(served)

    @pytest.mark.parametrize("tensor_first", [True, False])
    def test_a_tensor_that_became_none_or_came_from_none_is_a_contract_change(
        self, tensor_first: bool
    ) -> None:
        class Optional(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, loader=self.copy)
                self.offset: torch.Tensor | None = None

            def sources(self) -> dict[str, tuple[int, ...]]:
                return {"weight": (4,)}

            def process(self) -> None:
                self.offset = self.weight.data * 2 if self.weight.data[0] > 50 else None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight * x

        served = Served(one(Optional), storage="pinned", contract="warn")
        big, small = served.checkpoint(1), served.checkpoint(2)
        big["special.weight"][0], small["special.weight"][0] = 60.0, 40.0
        first, second = (big, small) if tensor_first else (small, big)
        served.update(first)
        served.update(second)
        changes = served.life.reports[-1].contract_changes
        assert [change["path"] for change in changes] == ["special.offset"]
        equal_to_cold(served)

    def test_two_views_of_one_packed_storage(self) -> None:
        class Two(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                packed = torch.cat([self.weight.data, self.weight.data * 2])
                self.weight = nn.Parameter(packed[:4], requires_grad=False)
                self.register_buffer("second", packed[4:])
                self.whole = packed

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight @ x + self.second @ x + self.whole[:4] @ x

        served = Served(one(Two), storage="pinned")
        pointers = Snapshot(served.model).pointers()
        served.update(served.checkpoint(1))
        assert Snapshot(served.model).pointers() == pointers
        equal_to_cold(served)

    def test_overlapping_views_without_a_whole(self) -> None:
        class Overlapping(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                packed = self.weight.data.flatten() * 3
                del self.weight
                self.kernels = [packed[:10], packed[6:]]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.kernels[0].sum() + self.kernels[1].sum()

        served = Served(one(Overlapping), storage="pinned")
        pointers = Snapshot(served.model).pointers()
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert Snapshot(served.model).pointers() == pointers
            equal_to_cold(served)

    def test_broadcast_and_transposed_kernel_tensors(self) -> None:
        class Strided(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                values = self.weight.data.clone()
                self.weight = nn.Parameter(values.t(), requires_grad=False)
                self.scale = values.sum().expand(4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight @ x + self.scale

        served = Served(one(Strided), storage="pinned")
        pointers = Snapshot(served.model).pointers()
        served.update(served.checkpoint(1))
        assert Snapshot(served.model).pointers() == pointers
        equal_to_cold(served)

    @given(specs())
    def test_random_trees(self, spec: Any) -> None:
        served = Served(spec, storage="pinned")
        before = {p: x for p, x in Snapshot(served.model).pointers().items() if "handle" not in p}
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            after = Snapshot(served.model).pointers()
            assert {p: after[p] for p in before} == before
            equal_to_cold(served)
        Served.close_all()

    def test_report_says_what_was_replaced_whole(self) -> None:
        served = Served(("native", "packed"), storage="pinned")
        served.update(served.checkpoint(1))
        report = served.life.reports[-1]
        assert (report.outcome, report.storage) == ("committed", "pinned")
        assert [(c["kind"], c["path"].rpartition(".")[2]) for c in report.contract_changes] == [
            ("opaque", "handle")
        ]


class TestAdopted:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_values_geometry_and_aliases_are_those_of_a_cold_load(self, kind: str) -> None:
        served = Served((kind, "tied") if kind in TIEABLE else (kind,), storage="adopted")
        for seed in (1, 2, 3):
            served.update(served.checkpoint(seed))
            equal_to_cold(served)

    @given(specs())
    def test_random_trees(self, spec: Any) -> None:
        served = Served(spec, storage="adopted")
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            equal_to_cold(served)
        Served.close_all()

    def test_is_refused_where_the_host_says_so_before_anything_is_touched(self) -> None:
        served = Served(("packed",), storage="adopted")
        served.host.not_adoptable = "captured graphs"
        with unchanged(served.model), pytest.raises(errors.NotAdoptableError, match="captured graphs"):
            served.update(served.checkpoint(1))
        assert served.life.session is None

    def test_old_memory_is_let_go(self) -> None:
        served = Served(("packed", "nested", "swapped"), storage="adopted")
        old = [
            weakref.ref(seen.tensor)
            for path, seen in Snapshot(served.model).tensors.items()
            if "weight" in path
        ]
        served.update(served.checkpoint(1))
        gc.collect()
        alive = [ref for ref in old if ref() is not None]
        live = {id(seen.tensor) for seen in Snapshot(served.model).tensors.values()}
        assert [ref for ref in alive if id(ref()) not in live] == []


@pytest.mark.parametrize("storage", STORAGES)
class TestBoth:
    def test_everything_at_once_and_back(self, storage: str) -> None:
        served = Served(EVERYTHING, storage=storage)
        a, b = served.weights, served.checkpoint(1)
        want_a = served.run()
        for weights in (b, a, b, a):
            served.update(weights)
            equal_to_cold(served)
        assert torch.equal(served.run(), want_a)

    def test_opaque_owners_are_neither_freed_twice_nor_leaked(self, storage: str) -> None:
        gc.collect()
        before, double = len(handles.alive), handles.double_frees
        served = Served(("native", "native"), storage=storage)
        for seed in range(4):
            served.update(served.checkpoint(seed))
            assert torch.equal(served.run(), served.expected())
        for cut in (0.5, 1.0):
            served.open("by_layer")
            items = list(served.checkpoint(9).items())
            served.send(dict(items[: int(len(items) * cut)]))
            served.life.abort()
            assert torch.equal(served.run(), served.expected())
        gc.collect()
        assert handles.double_frees == double
        assert len(handles.alive) == before + 2

    def test_opaque_owners_survive_an_abort_after_the_last_hook(self, storage: str) -> None:
        from tests.toyhost import Boom, faults

        served = Served(("native", "packed"), storage=storage)
        want = served.run()
        double = handles.double_frees
        for _ in range(3):
            faults.arm("model_hook", 0)
            with pytest.raises(Boom):
                served.update(served.checkpoint(1))
            gc.collect()
            assert torch.equal(served.run(), want)
        assert handles.double_frees == double

    def test_memory_given_to_native_code_lives_until_the_next_commit(self, storage: str) -> None:
        library = torch.library.Library("weightlife_native", "FRAGMENT")
        library.define("handle(Tensor x) -> int")
        given: list[weakref.ref[torch.Tensor]] = []
        pointers: list[int] = []

        def handle(x: torch.Tensor) -> int:
            given.append(weakref.ref(x))
            pointers.append(x.untyped_storage()._cdata)
            return x.data_ptr()

        library.impl("handle", handle, "CompositeImplicitAutograd")

        class ByAddress(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)
                self.address = 0

            def process(self) -> None:
                packed = self.weight.data.t().contiguous()
                self.weight = nn.Parameter(packed, requires_grad=False)
                self.address = torch.ops.weightlife_native.handle(packed)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                import ctypes

                flat = (ctypes.c_float * 16).from_address(self.address)
                return torch.tensor(list(flat)).view(4, 4).t() @ x

        try:
            served = Served(one(ByAddress), storage=storage)
            for seed in (1, 2, 3):
                served.update(served.checkpoint(seed))
                gc.collect()
                scribble = [torch.full((16,), -1.0) for _ in range(64)]  # freed memory would be used again
                assert torch.equal(served.run(), served.expected())
                del scribble
            assert len(served.life.keep_alive) <= 1
        finally:
            library._destroy()

    def test_frozen_kernels_closures_and_nested_containers_look_at_the_same_memory(
        self, storage: str
    ) -> None:
        @dataclass(frozen=True)
        class Arguments:
            packed: torch.Tensor
            inner: tuple[Any, ...]

        class Deep(Layer):
            fn: Callable[[torch.Tensor], torch.Tensor]

            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                packed = self.weight.data.t().contiguous()
                self.weight = nn.Parameter(packed, requires_grad=False)
                arguments = Arguments(packed, ([{"w": packed}],))
                self.arguments = arguments
                self.fn = lambda x: x @ arguments.inner[0][0]["w"] + x @ arguments.packed + x @ packed

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.fn(x)

        served = Served(one(Deep), storage=storage)
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            layer: Any = served.model.special
            pointer = layer.weight.data_ptr()
            assert layer.arguments.packed.data_ptr() == pointer
            assert layer.arguments.inner[0][0]["w"].data_ptr() == pointer
            assert torch.equal(served.run(), served.expected())

    def test_partial_updates_keep_the_rest(self, storage: str) -> None:
        served = Served(EVERYTHING, storage=storage)
        names = list(served.weights)
        layers = {name.rpartition(".")[0] for name in names}
        for i, layer in enumerate(sorted(layers)):
            part = {n: v for n, v in served.checkpoint(i + 1).items() if n.startswith(layer + ".")}
            served.update(part, "by_layer")
            assert torch.equal(served.run(), served.expected()), layer
            equal_to_cold(served)

    def test_tensor_attributes_of_processed_parameters_are_bs(self, storage: str) -> None:
        class Annotated(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                packed = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)
                packed.state = {"scale": self.weight.data.sum()}  # type: ignore[attr-defined]
                self.weight = packed

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.weight @ x * self.weight.state["scale"]  # type: ignore[attr-defined]

        served = Served(one(Annotated), storage=storage)
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert torch.equal(served.run(), served.expected())

    def test_two_layers_that_share_one_table(self, storage: str) -> None:
        """A helper that all layers write their packed weights to."""

        class Shared(ToyModel):
            def __init__(self) -> None:
                super().__init__(("norm",))
                self.table: dict[str, torch.Tensor] = {"": torch.zeros(1)}
                self.a, self.b = Entry(self.table, "a"), Entry(self.table, "b")

        class Entry(Layer):
            def __init__(self, table: dict[str, torch.Tensor], name: str) -> None:
                super().__init__()
                self.table, self.name = table, name
                self.weight = parameter(4, 4, loader=self.copy)

            def process(self) -> None:
                self.table[self.name] = self.weight.data.t().contiguous()
                self.weight = nn.Parameter(self.table[self.name], requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.table[self.name] @ x

        class Whole(Shared):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cat([super().forward(x), self.a(x), self.b(x)])

        served = Served(Whole, storage=storage)
        served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())
        part = {n: v for n, v in served.checkpoint(2).items() if n.startswith("a.")}
        served.update(part, "by_layer")
        assert torch.equal(served.run(), served.expected())


class TestCopy:
    @pytest.mark.parametrize("backend", ["auto", "foreach", "copy"])
    def test_every_backend_commits_the_same(self, backend: str) -> None:
        served = Served(EVERYTHING, storage="pinned", copy_backend=backend)
        served.update(served.checkpoint(1))
        equal_to_cold(served)

    def test_one_that_does_not_work_here_is_refused_before_anything_is_touched(self) -> None:
        served = Served(("packed",), copy_backend="triton")
        with unchanged(served.model), pytest.raises(errors.ConfigError, match="Triton"):
            served.update(served.checkpoint(1))
        assert served.life.reports[-1].outcome == "refused"


@pytest.fixture(autouse=True)
def _no_double_frees() -> Iterator[None]:
    before = handles.double_frees
    yield
    assert handles.double_frees == before
