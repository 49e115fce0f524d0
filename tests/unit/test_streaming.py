# SPDX-License-Identifier: Apache-2.0
"""In place, layers are processed and committed as soon as they are complete: exact, undone, or refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.plainnet import A, B, Net, serves
from tests.toyhost import KINDS, Boom, Layer, Served, Snapshot, ToyModel, cold, faults, parameter
from weightlife import errors
from weightlife._engine import stage
from weightlife._engine.guard import Pass

EVERYTHING = (*sorted(KINDS), ("packed", "tied"))
LEAN: dict[str, Any] = {"isolation": "in_place", "storage": "pinned"}


@pytest.fixture(autouse=True, params=["from the start", "when it is needed"])
def _clean(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test with either way to get memory for what loaders write."""
    if request.param == "when it is needed":
        monkeypatch.setattr(stage, "COLD_BYTES", 0)
    yield
    faults.clear()
    Served.close_all()


def early(served: Served) -> int:
    """How many layers the last update processed before its finish."""
    phases = {phase.name: phase for phase in served.life.reports[-1].phases}
    return phases["process_early"].calls if "process_early" in phases else 0


class TestExact:
    @pytest.mark.parametrize("budget", [None, 0])
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_there_and_back(self, kind: str, budget: int | None) -> None:
        served = Served((kind, "packed", kind, "attention"), **LEAN, undo_budget_bytes=budget)
        first = dict(served.weights)
        for weights in (served.checkpoint(1), first, served.checkpoint(2)):
            served.update(weights)
            assert torch.equal(served.run(), served.expected())
            assert early(served) >= 1

    def test_everything_at_once_in_any_order(self) -> None:
        import random

        served = Served(EVERYTHING, **LEAN, undo_budget_bytes=0)
        for seed in range(4):
            items = list(served.checkpoint(seed).items())
            random.Random(seed).shuffle(items)
            served.open()
            for item in items:
                served.send([item])
            served.finish()
            served.weights = dict(items)
            assert torch.equal(served.run(), served.expected())
            assert early(served) > 3

    def test_a_layer_is_committed_before_the_next_one_comes(self) -> None:
        served = Served(("packed", "packed"), **LEAN)
        checkpoint = served.checkpoint(1)
        names = [n for n in checkpoint if ".0." in n]
        layer = served.model.get_submodule("body.inner.0")
        address = layer.quant_method.kernel.packed.data_ptr()
        served.open()
        served.send({n: checkpoint[n] for n in names})
        assert layer.quant_method.kernel.packed.data_ptr() == address
        assert torch.equal(
            layer.quant_method.kernel.packed,
            cold(("packed", "packed"), checkpoint).get_submodule("body.inner.0").quant_method.kernel.packed,
        )
        served.send({n: v for n, v in checkpoint.items() if n not in names})
        served.finish()

    def test_memory_comes_with_the_first_tensor_for_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stage, "COLD_BYTES", 0)
        served = Served(("packed", "packed"), **LEAN)
        checkpoint = served.checkpoint(1)
        served.open()
        parameters = {n: p for n, p in served.model.named_parameters() if ".1." in n and p.numel()}
        first = {n: p.data_ptr() for n, p in parameters.items()}
        served.send({n: v for n, v in checkpoint.items() if ".0." in n})
        assert {n: p.data_ptr() for n, p in parameters.items()} == first
        served.send({n: v for n, v in checkpoint.items() if ".1." in n})
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("watch", ["all", "sampled"])
    @pytest.mark.parametrize("changes", [False, True])
    def test_views_that_a_loader_took_before_are_of_that_memory(self, changes: bool, watch: str) -> None:
        looks: list[bool] = [not changes]

        def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            parameters = dict(model.named_parameters())
            views = {name: parameter.data for name, parameter in parameters.items()}
            for name, tensor in weights:
                (views[name] if looks[0] else parameters[name].data).copy_(tensor)

        net = Net()
        wrapped = weightlife.wrap_loader(
            load, isolation="in_place", storage="pinned", undo_budget_bytes=0, watch_writes=watch
        )
        for weights, want in ((A, "A"), (B, "B"), (A, "A"), (B, "B")):
            wrapped(net, weights)
            assert serves(net) == want
            looks[0] = True

    def test_raw_memory_goes_although_the_loader_still_holds_the_parameter(self) -> None:
        held: list[torch.Tensor] = []

        class Holding(ToyModel):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                held[:] = list(self.parameters())
                return super().load_weights(weights)

        served = Served(lambda: Holding(("packed", "experts", "fused_packed")), **LEAN)
        served.open()
        served.send(served.checkpoint(1))
        assert held
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in held)
        served.finish()

    @pytest.mark.parametrize(
        "settings",
        [
            {"isolation": "staged", "storage": "pinned"},
            {"isolation": "in_place", "storage": "adopted"},
            {**LEAN, "processing": "at_finish"},
            {**LEAN, "surplus": "off"},
        ],
        ids=lambda settings: "-".join(settings.values()),
    )
    def test_elsewhere_nothing_is_early(self, settings: dict[str, Any]) -> None:
        served = Served(("packed", "fused_packed"), **settings)
        served.update(served.checkpoint(1))
        assert early(served) == 0
        assert torch.equal(served.run(), served.expected())

    def test_not_in_an_update_without_an_end(self) -> None:
        served = Served(("packed", "fused_packed"), **LEAN)
        served.send(served.checkpoint(1))
        served.life.finish("the next pass")
        assert early(served) == 0

    def test_not_after_a_dummy(self) -> None:
        served = Served(("packed",), provisional=True, **LEAN)
        for seed in (1, 2):  # what the first real load touches late was not watched
            served.update(served.checkpoint(seed))
            assert early(served) == 0
            assert torch.equal(served.run(), served.expected())


class TestUndone:
    @pytest.mark.parametrize("after", range(4))
    def test_a_failing_hook_with_undo_leaves_a(self, after: int) -> None:
        served = Served(("packed", "scaled", "swapped", "fused_packed"), **LEAN)
        a = Snapshot(served.model)
        faults.arm("hook", after)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        faults.clear()
        assert a.differences(Snapshot(served.model)) == []
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())

    def test_an_incomplete_update_with_undo_leaves_a(self) -> None:
        served = Served(("packed", "fused_packed", "dense"), **LEAN)
        a = Snapshot(served.model)
        weights = served.checkpoint(1)
        weights.popitem()
        with pytest.raises(errors.MissingTensorError):
            served.update(weights)
        assert a.differences(Snapshot(served.model)) == []

    def test_without_undo_a_failure_poisons_and_a_complete_update_heals(self) -> None:
        served = Served(("packed", "scaled"), **LEAN, undo_budget_bytes=0)
        faults.arm("hook", 1)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        faults.clear()
        with pytest.raises(errors.PoisonedModelError):
            served.run(Pass.REAL)
        served.update(served.checkpoint(2))
        assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("bare", [False, True])
    @pytest.mark.parametrize("after", [2, 5, 9])
    def test_a_failure_without_undo_is_healed_whatever_layers_held(self, after: int, bare: bool) -> None:
        served = Served(EVERYTHING, **LEAN, undo_budget_bytes=0)
        faults.arm("hook", after)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        faults.clear()
        with pytest.raises(errors.PoisonedModelError):
            served.run(Pass.REAL)
        for seed in (2, 3):
            if bare:  # no layer may look as if a client had made it anew
                served.send(weights := served.checkpoint(seed))
                served.life.finish("the next pass")
                served.weights = weights
            else:
                served.update(served.checkpoint(seed))
            assert not served.life.poisoned
            assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("budget", [None, 0])
    def test_what_a_layer_held_is_kept_for_undo_alone(self, budget: int | None) -> None:
        served = Served(("packed", "native", "packed"), **LEAN, undo_budget_bytes=budget)
        old = weakref.ref(served.model.get_submodule("body.inner.1").handle)
        weights = served.checkpoint(1)
        rest = {n: weights.pop(n) for n in list(weights) if ".2." in n}
        served.open()
        served.send(weights)
        gc.collect()
        assert (old() is None) == (budget == 0)
        served.send(rest)
        served.finish()
        served.weights = {**weights, **rest}
        assert torch.equal(served.run(), served.expected())
        assert old() is None

    def test_a_failure_before_the_first_commit_poisons_nothing(self) -> None:
        served = Served(("packed", "scaled"), **LEAN, undo_budget_bytes=0)
        want = served.run()
        faults.arm("hook", 0)
        with pytest.raises(Boom):
            served.update(served.checkpoint(1))
        faults.clear()
        assert torch.equal(served.run(), want)


class TestRefused:
    @pytest.mark.parametrize("kind", ["packed", "scaled", "experts", "fused_packed"])
    def test_a_tensor_that_comes_again(self, kind: str) -> None:
        served = Served((kind, "packed"), **LEAN)
        a = Snapshot(served.model)
        checkpoint = served.checkpoint(1)
        first = next(iter(checkpoint))
        served.open()
        served.send(checkpoint)
        with pytest.raises(errors.SurplusTensorError) as caught:
            served.send([(first, checkpoint[first])])
        assert caught.value.tensors == (first,)
        assert a.differences(Snapshot(served.model)) == []

    def test_a_hook_that_uses_another_layers_weights_is_found_and_runs_late_from_then_on(self) -> None:
        class Reader(Layer):
            """Its hook takes the norm of a neighbour that a loader fills."""

            neighbour: Any

            def __init__(self) -> None:
                super().__init__()
                self.weight = parameter(2, loader=self.copy)

            def sources(self) -> dict[str, tuple[int, ...]]:
                return {"weight": (2,)}

            def process(self) -> None:
                self.weight = nn.Parameter(
                    self.weight.data * self.neighbour().weight.data.sum(), requires_grad=False
                )

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight.sum()

        def build() -> ToyModel:
            model = ToyModel(("dense", "norm"))
            reader, dense = Reader(), model.get_submodule("body.inner.0")
            object.__setattr__(reader, "neighbour", lambda: dense)
            model.body.inner.insert(0, reader)  # type: ignore[union-attr, operator]
            return model

        served = Served(build, **LEAN)
        a = Snapshot(served.model)
        with pytest.raises(errors.EarlyProcessingError) as caught:
            served.update(served.checkpoint(1))
        assert caught.value.code == "WL403"
        assert a.differences(Snapshot(served.model)) == []
        served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())

    def test_a_loader_that_always_comes_back_is_known_from_the_first_load(self) -> None:
        class Finishing(ToyModel):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                out = super().load_weights(weights)
                if any(".0." in name for name in out):
                    layer: Any = self.get_submodule("body.inner.0")
                    layer.weight.data.add_(1.0)
                return out

        served = Served(lambda: Finishing(("packed", "packed")), **LEAN)
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert early(served) == 1
            assert torch.equal(served.run(), served.expected())

    @pytest.mark.parametrize("write", [True, False])
    def test_a_loader_that_comes_back_later_on_is_found(self, write: bool) -> None:
        late = {"armed": False}

        class Turning(ToyModel):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                kept: Any = self.get_submodule("body.inner.0").weight
                out = super().load_weights(weights)
                if late["armed"]:
                    kept.data.add_(1.0) if write else kept.data.sum()
                return out

        served = Served(lambda: Turning(("packed", "packed")), **LEAN)
        late["armed"] = True
        a = Snapshot(served.model)
        with pytest.raises(errors.EarlyProcessingError):
            served.update(served.checkpoint(1))
        assert a.differences(Snapshot(served.model)) == []
        late["armed"] = not write  # a read does no harm at the finish, a write more than expected is surplus
        served.update(served.checkpoint(2))
        assert early(served) == 1
        assert torch.equal(served.run(), served.expected())

    def test_a_loader_that_writes_the_processed_weight(self) -> None:
        late = {"armed": False}

        class Turning(ToyModel):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                out = super().load_weights(weights)
                if late["armed"]:
                    layer: Any = self.get_submodule("body.inner.0")
                    layer.qkv.data.zero_()
                return out

        served = Served(lambda: Turning(("fused_packed", "packed")), **LEAN)
        late["armed"] = True
        a = Snapshot(served.model)
        with pytest.raises(errors.EarlyProcessingError):
            served.update(served.checkpoint(1))
        assert a.differences(Snapshot(served.model)) == []
