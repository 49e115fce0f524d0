# SPDX-License-Identifier: Apache-2.0
"""Generations: A and B are exchanged any number of times, and A comes back exactly from anywhere."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.strategies import specs
from tests.toyhost import (
    INPUT,
    KINDS,
    TIEABLE,
    Boom,
    Served,
    Snapshot,
    ToyModel,
    faults,
    parameter,
    unchanged,
)
from weightlife._engine.guard import Pass

STORAGES = ("pinned", "adopted")


def both(kind: str) -> Any:
    """A layer with something beside it, and tied where it can be."""
    return (kind, ("dense", "tied")) if kind in TIEABLE else (kind, ("dense",))


def begun(spec: Any, share: float = 1.0, **settings: Any) -> tuple[Served, Snapshot]:
    """A session that received a share of a checkpoint, and A as it was before."""
    served = Served(spec, **settings)
    before = Snapshot(served.model)
    served.open("by_layer")
    items = list(served.checkpoint(1).items())
    served.send(dict(items[: round(len(items) * share)]))
    return served, before


class TestExchange:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_a_and_b_are_exact_however_often_they_are_exchanged(self, kind: str) -> None:
        served, a = begun(both(kind))
        assert served.life.session is not None
        stage = served.life.session.stage
        assert stage is not None
        b = Snapshot(served.model)
        assert a.differences(b) != []
        for _ in range(4):
            stage.show_a()
            assert a.differences(Snapshot(served.model)) == []
            stage.show_a()  # twice is once
            stage.show_b()
            assert b.differences(Snapshot(served.model)) == []
            stage.show_b()
        served.finish()

    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_passes_between_chunks_see_a_and_change_nothing(self, kind: str, storage: str) -> None:
        served = Served(both(kind), storage=storage)
        want_a = served.run()
        a = Snapshot(served.model)
        checkpoint = served.checkpoint(1)
        served.open()
        for item in checkpoint.items():
            assert torch.equal(served.run(), want_a)
            assert torch.equal(served.run(Pass.DUMMY), want_a)
            served.send(dict([item]))
        assert served.life.session is not None
        stage = served.life.session.stage
        assert stage is not None
        stage.show_a()
        assert a.differences(Snapshot(served.model)) == []
        stage.show_b()
        served.finish()
        served.weights = checkpoint
        assert torch.equal(served.run(), served.expected())

    def test_what_passes_bind_to_a_stays_with_a_and_survives_the_commit(self) -> None:
        """The engine binds caches to layers whenever it likes; an update must not lose them."""
        served = Served(("packed", "dense"))
        layers = [layer for _, layer in served.model.layers()]
        served.open()
        served.send(served.checkpoint(1))
        cache = torch.zeros(1)

        class Binding(ToyModel):
            pass

        from weightlife._engine import guard

        def bind() -> None:
            for layer in layers:
                layer.kv_cache = cache

        guard.guarded([served.life], Pass.REAL, bind)
        served.finish()
        assert all(layer.kv_cache is cache for layer in layers)

    def test_what_passes_bind_to_a_survives_an_abort(self) -> None:
        from weightlife._engine import guard

        served = Served(("packed", "dense"))
        layers = [layer for _, layer in served.model.layers()]
        served.open()
        served.send(served.checkpoint(1))
        guard.guarded([served.life], Pass.REAL, lambda: [setattr(layer, "kv_cache", 1) for layer in layers])
        served.life.abort()
        assert [layer.kv_cache for layer in layers] == [1, 1]

    def test_a_pass_that_fails_leaves_b_where_it_was(self) -> None:
        from weightlife._engine import guard

        served, a = begun(("packed", "fused"))
        b = Snapshot(served.model)

        def fail() -> None:
            raise Boom("pass")

        with pytest.raises(Boom):
            guard.guarded([served.life], Pass.REAL, fail)
        assert b.differences(Snapshot(served.model)) == []
        served.life.abort()
        assert a.differences(Snapshot(served.model)) == []


class TestRevert:
    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_after_any_share_of_the_weights(self, kind: str, share: float) -> None:
        served, a = begun(both(kind), share)
        served.life.abort()
        assert a.differences(Snapshot(served.model)) == []

    @pytest.mark.parametrize("storage", STORAGES)
    def test_after_every_hook(self, storage: str) -> None:
        """Up to the last one: the model's own hook, after which nothing is left to process."""
        spec = (*sorted(KINDS), ("packed", "tied"))
        served = Served(spec, storage=storage)
        a = Snapshot(served.model)
        want = served.run()
        hooks = sum(1 for _, layer in served.model.layers() if getattr(layer, "process", None))
        for kind, count in (("hook", hooks), ("model_hook", 1)):
            for after in range(count):
                faults.arm(kind, after)
                with pytest.raises(Boom):
                    served.update(served.checkpoint(after + 1))
                assert a.differences(Snapshot(served.model)) == [], f"after {after} {kind}s"
        assert torch.equal(served.run(), want)
        served.update(served.checkpoint(99))
        assert torch.equal(served.run(), served.expected())

    def test_after_every_write(self) -> None:
        served = Served(("fused", "padded", "experts", "dense"))
        a = Snapshot(served.model)
        faults.seen.clear()
        served.update(served.checkpoint(1))
        writes = faults.seen["write"]
        served.update(served.weights)
        a = Snapshot(served.model)
        for after in range(0, writes, 2):
            faults.arm("write", after)
            with pytest.raises(Boom):
                served.update(served.checkpoint(2))
            assert a.differences(Snapshot(served.model)) == []

    @given(specs(), st.integers(0, 2**16), st.sampled_from(STORAGES))
    def test_random_trees_random_moment(self, spec: Any, seed: int, storage: str) -> None:
        rng = random.Random(seed)
        served = Served(spec, storage=storage)
        a = Snapshot(served.model)
        checkpoint = list(served.checkpoint(seed).items())
        rng.shuffle(checkpoint)
        kind = rng.choice(("write", "hook", "model_hook", "source"))
        cut = rng.randrange(len(checkpoint) + 1) if checkpoint else 0
        faults.clear()
        faults.arm(kind, rng.randrange(4))

        def source() -> Any:
            for i, item in enumerate(checkpoint):
                if kind == "source" and i == cut:
                    raise Boom("source")
                yield item

        try:
            served.open()
            served.send(source())
            served.finish()
        except Boom:
            assert a.differences(Snapshot(served.model)) == []
        else:
            served.weights = dict(checkpoint)
        faults.clear()
        assert torch.equal(served.run(), served.expected())
        Served.close_all()

    @pytest.mark.parametrize("packed", [True, False])
    def test_a_loader_that_views_the_parameter_anew(self, packed: bool) -> None:
        """`param.data = param.data.t()`: the same memory in another shape, before anything was written."""

        class Viewing(ToyModel):
            def __init__(self) -> None:
                super().__init__(("norm",))
                self.weight = parameter(4, 6, loader=self.load, fill=0.0)

            def sources(self) -> dict[str, tuple[int, ...]]:
                return {"weight": (4, 6), **super().sources()}

            def take(self, name: str, tensor: torch.Tensor) -> None:
                self.weight.weight_loader(self.weight, tensor)

            def load(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
                shape = param.data.shape
                param.data = param.data.view(-1)
                faults.tick("viewed")
                param.data.copy_(tensor.flatten())
                param.data = param.data.view(shape)

            def process(self) -> None:
                super().process()
                if packed:
                    self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

        served = Served(Viewing)
        faults.arm("viewed", 0)
        with unchanged(served.model), pytest.raises(Boom):
            served.update(served.checkpoint(1))
        served.update(served.checkpoint(1))
        assert torch.equal(served.model.weight.flatten(), served.weights["weight"].t().flatten() if packed else
                           served.weights["weight"].flatten())  # fmt: skip

    def test_abort_twice_is_once(self) -> None:
        served, a = begun(("packed",))
        served.life.abort()
        served.life.abort()
        assert a.differences(Snapshot(served.model)) == []
        assert [report.outcome for report in served.life.reports] == ["committed", "aborted"]


class TestInPlace:
    SPEC = (*sorted(KINDS), ("packed", "tied"))

    @pytest.mark.parametrize("share", [0.3, 1.0])
    def test_undo_gives_the_old_bytes_back(self, share: float) -> None:
        served, a = begun(self.SPEC, share, isolation="in_place")
        served.life.abort()
        assert not served.life.poisoned
        assert a.differences(Snapshot(served.model)) == []

    @pytest.mark.parametrize("kind", ["hook", "model_hook"])
    def test_undo_after_a_hook_that_fails(self, kind: str) -> None:
        served = Served(self.SPEC, isolation="in_place")
        faults.arm(kind, 0 if kind == "model_hook" else 5)
        with unchanged(served.model), pytest.raises(Boom):
            served.update(served.checkpoint(1))
        assert not served.life.poisoned

    def test_undo_works_under_any_budget_that_suffices(self) -> None:
        served = Served(("dense", "fused"), isolation="in_place", undo_budget_bytes=4 * (16 + 4 + 48 + 4))
        faults.arm("write", 4)
        with unchanged(served.model), pytest.raises(Boom):
            served.update(served.checkpoint(1))
        assert not served.life.poisoned

    def test_update_is_exact(self) -> None:
        served = Served(self.SPEC, isolation="in_place")
        for seed in (1, 2):
            served.update(served.checkpoint(seed))
            assert torch.equal(served.run(), served.expected())

    def test_direct_storage_is_written_without_a_copy(self) -> None:
        served = Served(("dense",), isolation="in_place")
        pointers = Snapshot(served.model).pointers()
        served.open()
        served.send(served.checkpoint(1))
        assert served.life.session is not None
        assert served.life.session.stage is not None
        assert all(track.stage is None for track in served.life.session.stage.index.values())
        assert Snapshot(served.model).pointers() == pointers
        served.finish()


class TestPlaceholders:
    def test_shape_class_attributes_and_memory(self) -> None:
        served, _ = begun(("packed", "aliased", ("fused_packed",)), 0.0)
        fresh = ToyModel(("packed", "aliased", ("fused_packed",)))
        for (name, made), (other, shown) in zip(
            fresh.named_parameters(), served.model.named_parameters(), strict=True
        ):
            assert name == other
            assert (made.shape, made.stride(), type(made)) == (shown.shape, shown.stride(), type(shown))
            assert vars(made).keys() == vars(shown).keys()

    def test_ties_and_views_survive(self) -> None:
        served, _ = begun(("packed", "tied", "aliased"), 0.0)
        packed, tied, aliased = (layer for _, layer in served.model.layers())
        assert packed.weight is tied.weight
        assert aliased.first_row.untyped_storage()._cdata == aliased.weight.untyped_storage()._cdata

    def test_outside_a_call_every_tensor_has_memory(self) -> None:
        served, _ = begun(("packed", "experts", "nested"), 0.4)
        for value in served.model.parameters():
            assert value.untyped_storage().nbytes() >= value.numel() * value.element_size()
            assert value.numel() == 0 or value.data_ptr()

    def test_fresh_memory_is_poisoned_and_none_of_it_survives_a_commit(self) -> None:
        served = Served((*sorted(KINDS),))
        served.update(served.checkpoint(1))
        for path, seen in Snapshot(served.model).tensors.items():
            if seen.tensor.is_floating_point():
                assert not seen.tensor.isnan().any(), path

    def test_nothing_of_a_closed_session_is_kept(self) -> None:
        import gc
        import weakref

        served, _ = begun(("packed", "dense"))
        session = served.life.session
        assert session is not None
        assert session.stage is not None
        stage = weakref.ref(session.stage)
        served.finish()
        del session
        gc.collect()
        assert stage() is None


def test_eager_input_is_not_part_of_the_model() -> None:
    """The oracle itself: two cold loads of one checkpoint agree, two checkpoints differ."""
    served = Served((*sorted(KINDS),))
    assert torch.equal(served.expected(), served.model(INPUT))
    assert not torch.equal(served.expected(served.checkpoint(5)), served.expected())
