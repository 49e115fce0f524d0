# SPDX-License-Identifier: Apache-2.0
"""What processing derives is of the update that commits: hooks that cache outside their layer are found, by path."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.toyhost import KINDS, TIEABLE, Boom, Layer, Served, cold, faults, one, parameter, unchanged
from weightlife import errors
from weightlife.testing._walk import digests

CACHE: dict[Any, Any] = {}
DONE: set[int] = set()


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    Served.close_all()
    CACHE.clear()
    DONE.clear()


class Base(Layer):
    packed: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4, 4, loader=self.copy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = getattr(self.packed, "tensor", self.packed)
        return (self.weight if held is None else held.t()) @ x


class ByName(Base):
    """`dict.setdefault` in a Python module."""

    def process(self) -> None:
        self.packed = CACHE.setdefault("packed", self.weight.data.t().contiguous())


class InKernel(Base):
    """The same, in a kernel object that is new each time."""

    def process(self) -> None:
        packed = CACHE.setdefault("packed", self.weight.data.t().contiguous())
        self.packed = types.SimpleNamespace(tensor=packed)


class InClosure(Base):
    def process(self) -> None:
        packed = CACHE.setdefault("packed", self.weight.data.t().contiguous())
        self.fn = lambda: packed


class LruCached(Base):
    def process(self) -> None:
        holder = CACHE.setdefault("holder", types.SimpleNamespace())
        holder.layer = self
        CACHE.setdefault("function", functools.lru_cache(lambda: holder.layer.weight.data.t().contiguous()))
        self.packed = CACHE["function"]()


class HasAttribute(Base):
    """`if not hasattr(owner, ...)`, on an object that is nobody's."""

    def process(self) -> None:
        owner = CACHE.setdefault("owner", types.SimpleNamespace())
        if not hasattr(owner, "_packed"):
            owner._packed = self.weight.data.t().contiguous()
        self.packed = owner._packed


class ReplacedOnce(Base):
    """A parameter of the same name and shape, from a cache."""

    def process(self) -> None:
        made = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)
        self.weight = CACHE.setdefault("weight", made)


class FlaggedInPlace(Base):
    """The hook does nothing the second time: the weight stays as it was loaded."""

    def process(self) -> None:
        if id(self) not in DONE:
            DONE.add(id(self))
            self.weight.data.mul_(2.0)


class FlaggedReplaced(Base):
    def process(self) -> None:
        if id(self) not in DONE:
            DONE.add(id(self))
            self.weight = nn.Parameter(self.weight.data.flip(0).contiguous(), requires_grad=False)


class FlaggedAdded(Base):
    def process(self) -> None:
        if id(self) not in DONE:
            DONE.add(id(self))
            self.packed = self.weight.data.t().contiguous()


class FlaggedAfterCounting(FlaggedInPlace):
    """It sets a number all the same."""

    calls = 0

    def process(self) -> None:
        self.calls = self.calls + 1
        super().process()


FAULTS = {
    ByName: "special.packed", InKernel: "special.packed.tensor", InClosure: "special.fn.<closure 0>",
    LruCached: "special.packed", HasAttribute: "special.packed", ReplacedOnce: "special.weight",
    FlaggedInPlace: "special.weight", FlaggedReplaced: "special.weight", FlaggedAdded: "special.packed",
    FlaggedAfterCounting: "special.weight",
}  # fmt: skip


def fresh(served: Served) -> bool:
    """Whether everything is what a cold load of the weights makes, in every bit."""
    CACHE.clear()
    DONE.clear()
    return bool(digests(served.model) == digests(cold(served.spec, served.weights)))


class TestFaults:
    @pytest.mark.parametrize(
        ("isolation", "processing"),
        [("staged", "at_finish"), ("in_place", "at_finish"), ("in_place", "as_complete")],
    )
    @pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.__name__)
    def test_a_cache_outside_the_layer_is_found(self, kind: Any, isolation: str, processing: str) -> None:
        served = Served(one(kind), storage="pinned", isolation=isolation, processing=processing)
        with unchanged(served.model), pytest.raises(errors.StaleDerivedError) as caught:
            served.update(served.checkpoint(1))
        assert caught.value.layer == FAULTS[kind] and caught.value.tensors == (FAULTS[kind],)
        assert served.life.generation == 0 and not served.life.poisoned

    @pytest.mark.parametrize("policy", ["warn", "off"])
    def test_by_policy(self, policy: str) -> None:
        served = Served(one(ByName), storage="pinned", contract=policy)
        served.update(served.checkpoint(1))
        codes = [violation.code for violation in served.life.reports[-1].violations]
        assert codes == (["WL305"] if policy == "warn" else [])
        assert not fresh(served)

    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    def test_what_was_made_two_generations_ago(self, storage: str) -> None:
        """By the parity of its call: what serves is fresh in the first update, and not in the second."""

        class Alternates(Base):
            def process(self) -> None:
                turn = CACHE["turn"] = CACHE.get("turn", -1) + 1
                made = self.weight.data.t().contiguous()
                self.packed = CACHE.setdefault(turn % 2, made)

        served = Served(one(Alternates), storage=storage)
        served.update(served.checkpoint(1))
        with unchanged(served.model), pytest.raises(errors.StaleDerivedError) as caught:
            served.update(served.checkpoint(2))
        assert caught.value.layer == "special.packed"

    def test_what_an_update_that_failed_put_into_a_cache(self) -> None:
        class Skips(Base):
            def process(self) -> None:
                turn = CACHE["turn"] = CACHE.get("turn", -1) + 1
                made = self.weight.data.t().contiguous()
                self.packed = made if turn == 0 else CACHE.setdefault("packed", made)

        served = Served(one(Skips), storage="pinned")
        faults.arm("model_hook", 0)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        with unchanged(served.model), pytest.raises(errors.StaleDerivedError):
            served.update(served.checkpoint(2))


class TestNoFalseAlarm:
    EVERYTHING = (*sorted(KINDS), ("packed", "tied", ("scaled", "tied")))

    @pytest.mark.parametrize("isolation", ["staged", "in_place"])
    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    def test_of_any_kind_of_layer(self, storage: str, isolation: str) -> None:
        served = Served(self.EVERYTHING, storage=storage, isolation=isolation)
        for seed in (1, 2, 3):
            served.update(served.checkpoint(seed))
            assert served.life.reports[-1].violations == []
        assert fresh(served)
        if storage == "pinned":
            assert set(served.life.derived.epochs.values()) == {3}

    def test_layers_that_an_update_leaves_alone_keep_their_epoch(self) -> None:
        served = Served(("packed", "renamed"), storage="pinned")
        some = {name: t for name, t in served.checkpoint(1).items() if ".0." in name}
        assert some and len(some) < len(served.weights)
        served.update(some, "by_layer")
        epochs = served.life.derived.epochs
        assert {epochs[path] for path in epochs if ".0." in path} == {1}
        assert {epochs[path] for path in epochs if ".1." in path} == {0}
        assert fresh(served)

    def test_a_constant_may_be_handed_out_again(self) -> None:
        """It depends on the shape of a weight alone: it is told as kept, and no more."""

        class Constant(Base):
            def process(self) -> None:
                order = CACHE.setdefault("order", torch.arange(self.weight.shape[0]).flip(0))
                self.order = order
                self.space = CACHE.setdefault("space", torch.zeros_like(self.weight.data))
                self.packed = self.weight.data[order].t().contiguous()

        served = Served(one(Constant), storage="pinned")
        served.update(served.checkpoint(1))
        report = served.life.reports[-1]
        assert report.violations == [] and fresh(served)
        assert {c["path"] for c in report.contract_changes if c["kind"] == "kept"} == {
            "special.order", "special.space"
        }  # fmt: skip

    def test_a_workspace_that_is_written_again_is_of_this_update(self) -> None:
        class Workspace(Base):
            def process(self) -> None:
                self.packed = CACHE.setdefault("space", torch.empty(4, 4))
                self.packed.copy_(self.weight.data.t())

        for isolation in ("staged", "in_place"):
            CACHE.clear()
            served = Served(one(Workspace), storage="pinned", isolation=isolation)
            served.update(served.checkpoint(1))
            assert fresh(served)

    def test_a_hook_that_looks_at_values(self) -> None:
        """Whether it writes depends on them; it makes something in any case."""

        class Clamped(Base):
            def process(self) -> None:
                if float(self.weight.data.max()) > 50:
                    self.weight.data.clamp_(max=50.0)
                self.packed = self.weight.data.t().contiguous()

        served = Served(one(Clamped), storage="pinned")
        small = {name: torch.ones_like(t) for name, t in served.weights.items()}
        for weights in (small, served.checkpoint(2), small):
            served.update(weights)
            assert fresh(served)


def test_ties_are_no_alarm() -> None:
    for kind in TIEABLE:
        served = Served((kind, "tied"), storage="pinned")
        served.update(served.checkpoint(1))
        assert served.life.reports[-1].violations == []
