# SPDX-License-Identifier: Apache-2.0
"""The footprint: exactly the slots that processing changed are restored, and the closure over shared storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.toyhost import KINDS, Served, ToyModel, cold, parameter
from weightlife import errors
from weightlife._engine import footprint
from weightlife._engine.footprint import ABSENT, Plan, tensor_change
from weightlife._engine.operators import WriteObserver
from weightlife._engine.skeleton import Skeleton, Token

NEVER = lambda obj: False  # noqa: E731


class Special(nn.Parameter):
    """A parameter class of a framework."""


def learn(module: nn.Module, process: Callable[[nn.Module], Any]) -> tuple[Skeleton, Plan]:
    """S0, processing, S2."""
    skeleton = Skeleton(module, NEVER, False)
    observer = WriteObserver(skeleton.table())
    with observer:
        process(module)
    return skeleton, footprint.learn(skeleton, module, observer.written)


def layer(**values: Any) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    for name, value in values.items():
        setattr(module, name, value)
    return module


def restored(plan: Plan, obj: Any) -> set[Any]:
    return set(plan.restore.get(id(obj), {}))


class TestWhatCounts:
    def test_nothing_changed_is_direct(self) -> None:
        module = layer()
        _, plan = learn(module, lambda m: m.weight.sum())
        assert plan.restore == {}
        assert plan.layers[id(module)].strategy == "direct"

    @pytest.mark.parametrize(
        ("process", "slots_changed", "reason"),
        [
            (lambda m: setattr(m, "weight", nn.Parameter(m.weight.t().contiguous())), {("param", "weight")}, "replaced"),
            (lambda m: delattr(m, "weight"), {("param", "weight")}, "removed"),
            (lambda m: m.weight.data.mul_(2), {("param", "weight")}, "written in place"),
            (lambda m: setattr(m.weight, "data", m.weight.data.clone()), {("param", "weight")}, "moved"),
            (lambda m: setattr(m.weight, "data", m.weight.data.t()), {("param", "weight")}, "moved|reshaped|given"),
            (lambda m: setattr(m.weight, "data", m.weight.data[:2]), {("param", "weight")}, "reshaped"),
            (lambda m: setattr(m.weight, "extra", 1), {("param", "weight")}, "attributes"),
            (lambda m: setattr(m.weight, "__class__", Special), {("param", "weight")}, "class"),
            (lambda m: setattr(m, "scale", 2.0), {("attr", "scale")}, "added"),
            (lambda m: m.register_buffer("buf", torch.ones(1)), {("buffer", "buf")}, "added"),
            (lambda m: m.register_parameter("new", nn.Parameter(torch.ones(1))), {("param", "new")}, "added"),
            (lambda m: setattr(m, "latch", True), {("attr", "latch")}, "changed"),
            (lambda m: m.items.append(1), {("item", 0)}, "added"),
            (lambda m: m.table.update(k=torch.ones(1)), {("item", "k")}, "added"),
            (lambda m: m.table.update(old=2), {("item", "old")}, "changed"),
            (lambda m: setattr(m.method, "calls", 1), {("attr", "calls")}, "changed"),
        ],
        ids=[
            "replaced", "removed", "in place", "data", "transposed data", "narrowed data", "attribute", "class",
            "plain attribute", "buffer", "parameter", "latch", "list", "dict item", "dict value", "method",
        ],
    )  # fmt: skip
    def test_one_change(self, process: Any, slots_changed: set[Any], reason: str) -> None:
        module = layer(latch=False, items=[], table={"old": 1}, method=Method())
        _, plan = learn(module, process)
        assert set().union(*(set(r) for r in plan.restore.values())) == slots_changed
        assert plan.layers[id(module)].strategy == "rebuild"
        assert any(word in plan.layers[id(module)].reason for word in reason.split("|"))

    def test_only_the_slots_that_differ(self) -> None:
        module = layer(other=nn.Parameter(torch.zeros(2)), kv_cache=torch.zeros(1))
        _, plan = learn(module, lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(1))))
        assert restored(plan, module) == {("param", "weight")}

    def test_renamed_parameter_restores_both_names(self) -> None:
        module = layer()

        def process(m: nn.Module) -> None:
            m.packed = nn.Parameter(m.weight.data.t().contiguous())
            del m.weight

        skeleton, plan = learn(module, process)
        restore = plan.restore[id(module)]
        assert restore["param", "packed"] is ABSENT
        assert isinstance(restore["param", "weight"], Token)
        assert plan.rebuilt_storages == {skeleton.tensors[0].storage}

    def test_kernel_object_made_once(self) -> None:
        method = Method()
        module = layer(method=method)

        def process(m: nn.Module) -> None:
            m.method.kernel = m.method.kernel or object()

        _, plan = learn(module, process)
        assert plan.restore[id(method)] == {("attr", "kernel"): None}

    def test_writes_by_index_view_and_out_argument_are_seen(self) -> None:
        for write in (
            lambda w: w.data.__setitem__(0, 1.0),
            lambda w: w.data.view(-1)[3:].fill_(1),
            lambda w: torch.add(w.data, 1, out=w.data),
            lambda w: torch._foreach_add_([w.data], 1.0),
            lambda w: torch.max(torch.ones(4, 4), dim=0, out=(w.data[0], torch.zeros(4, dtype=torch.int64))),
        ):
            module = layer()
            _, plan = learn(module, lambda m, write=write: write(m.weight))
            assert restored(plan, module) == {("param", "weight")}

    def test_a_write_through_an_alias_counts_for_all_of_the_storage(self) -> None:
        base = torch.zeros(4, 4)
        module = nn.Module()
        module.weight = nn.Parameter(base, requires_grad=False)
        module.register_buffer("row", base[0])
        _, plan = learn(module, lambda m: m.row.fill_(1))
        assert restored(plan, module) == {("param", "weight"), ("buffer", "row")}

    def test_nan_that_stays_nan_is_no_change(self) -> None:
        module = layer(scale=float("nan"))
        _, plan = learn(module, lambda m: setattr(m, "scale", float("nan")))
        assert plan.restore == {}


class Method:
    """A host object."""

    def __init__(self) -> None:
        self.kernel: Any = None
        self.calls = 0


class TestClosure:
    def test_a_tied_layer_is_rebuilt_with_its_partner(self) -> None:
        head, embedding = layer(), layer()
        head.weight = embedding.weight
        _, plan = learn(
            nn.Sequential(embedding, head), lambda m: setattr(m[0], "weight", nn.Parameter(torch.zeros(1)))
        )
        assert plan.rebuild == {id(head), id(embedding)}
        assert restored(plan, head) == {("param", "weight")}
        assert "shares a rebuilt storage" in plan.layers[id(head)].reason

    def test_through_a_view_in_a_host_object(self) -> None:
        a, b = layer(), layer()
        b.table = {"view": a.weight.data[1:]}
        _, plan = learn(nn.Sequential(a, b), lambda m: m[0].weight.data.mul_(2))
        assert restored(plan, b.table) == {("item", "view")}
        assert id(b) in plan.rebuild

    def test_to_a_fixpoint(self) -> None:
        """Alias buffers chained over three layers: a rebuilt storage of one pulls in the next."""
        base, other = torch.zeros(8), torch.zeros(8)
        a, b, c = nn.Module(), nn.Module(), nn.Module()
        a.weight = nn.Parameter(base, requires_grad=False)
        b.alias, b.weight = base[2:], nn.Parameter(other, requires_grad=False)
        c.alias = other[3:]
        _, plan = learn(nn.Sequential(a, b, c), lambda m: m[0].weight.data.mul_(2))
        assert restored(plan, b) == {("attr", "alias")}
        # Of `b` only the alias is restored: `other` was not touched, so `c` stays as it is.
        assert restored(plan, c) == set()

    def test_unrelated_layers_stay_direct(self) -> None:
        a, b = layer(), layer()
        _, plan = learn(nn.Sequential(a, b), lambda m: m[0].weight.data.mul_(2))
        assert plan.rebuild == {id(a)}
        assert plan.layers[id(b)].strategy == "direct"

    def test_a_shared_helper_does_not_pull_in_its_owners(self) -> None:
        helper = Method()
        a, b = layer(method=helper), layer(method=helper)
        _, plan = learn(nn.Sequential(a, b), lambda m: setattr(helper, "calls", 1))
        assert restored(plan, helper) == {("attr", "calls")}
        assert plan.rebuild == set()


class TestTensorChange:
    def test_not_a_tensor_any_more(self) -> None:
        module = layer()
        skeleton = Skeleton(module, NEVER, False)
        assert tensor_change(skeleton, Token(0), None, set()) == "removed"

    def test_equal_copy_is_a_replacement(self) -> None:
        module = layer()
        skeleton = Skeleton(module, NEVER, False)
        assert (
            tensor_change(skeleton, Token(0), nn.Parameter(module.weight.data.clone()), set()) == "replaced"
        )
        assert tensor_change(skeleton, Token(0), module.weight, set()) is None


class TestRefused:
    def test_a_lazily_shaped_parameter_is_refused_with_its_path(self) -> None:
        module = layer(lazy=nn.parameter.UninitializedParameter())
        _, plan = learn(nn.Sequential(module), lambda m: None)
        assert [(p.strategy, p.path) for p in plan.refused] == [("refuse", "0")]
        assert "lazy" in plan.refused[0].reason


class TestOnToys:
    """What each toy layer is learned as."""

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_strategy(self, kind: str) -> None:
        served = Served((kind,))
        (path, found), *_ = served.model.layers()
        plan = served.life.plan.layers[id(found)]
        direct = kind in ("dense", "norm", "fused", "padded_plain")
        assert plan.path == path
        assert plan.strategy == ("direct" if direct else "rebuild"), plan.reason

    def test_report_says_why(self) -> None:
        served = Served(("packed", "dense"))
        report = served.life.reports[-1]
        assert report.layers_by_strategy == {
            "rebuild": 2,
            "direct": 1,
        }  # the model's own hook changes the model
        assert all(record.reason for record in report.layers)

    def test_parameter_in_an_immutable_place_is_rebuilt_or_refused_but_never_stale(self) -> None:
        """A constructor may keep its weight in a tuple, a partial or a default argument: they can't be written."""
        import functools

        places: dict[str, Callable[[nn.Parameter], Any]] = {
            "tuple": lambda w: (w, 1),
            "partial": lambda w: functools.partial(torch.mul, w),
            "default": lambda w: lambda x=w: x,
            "bound method": lambda w: w.sum,
        }
        stale = []
        for name, place in places.items():
            served = Served(lambda place=place: ToyModelWith(place))
            checkpoint = served.checkpoint(1)
            try:
                served.update(checkpoint)
            except errors.RefusedLayerError:
                continue
            want = cold(lambda place=place: ToyModelWith(place), checkpoint)
            if not torch.equal(served.model.held(), want.held()):
                stale.append(name)
        assert stale == []


class ToyModelWith(ToyModel):
    """A packed weight whose constructor's object is also held in `place(weight)`."""

    def __init__(self, place: Callable[[nn.Parameter], Any]) -> None:
        super().__init__(("packed",))
        self.kept = place(dict(self.layers())["body.inner.0"].weight)

    def held(self) -> torch.Tensor:
        kept = self.kept
        if isinstance(kept, tuple):
            return kept[0].data.clone()
        if hasattr(kept, "args"):
            return kept.args[0].data.clone()
        if hasattr(kept, "__self__"):
            return kept.__self__.data.clone()
        return kept().data.clone()


class TestTensorAttributes:
    """State that hangs on a tensor object rather than in a slot."""

    class Model(ToyModel):
        def __init__(self, what: str) -> None:
            super().__init__(("norm",))
            self.what = what
            self.weight = parameter(4, 4, loader=self.load)
            if what == "tensor":
                self.weight.scale = torch.zeros(4)  # type: ignore[attr-defined]
            if what == "list":
                self.weight.parts = []  # type: ignore[attr-defined]

        def sources(self) -> dict[str, tuple[int, ...]]:
            return {**super().sources(), "weight": (4, 4)}

        def take(self, name: str, tensor: torch.Tensor) -> None:
            self.weight.weight_loader(self.weight, tensor)

        def load(self, param: Any, tensor: torch.Tensor) -> None:
            param.data.copy_(tensor)
            if self.what == "tensor":
                param.scale.copy_(tensor[0])
            if self.what == "list":
                param.parts.append(float(tensor[0, 0]))

        def process(self) -> None:
            super().process()
            if self.what == "attribute":
                self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)
                self.weight.amax = float(self.weight.max())  # type: ignore[attr-defined]

        def extra(self) -> Any:
            weight: Any = self.weight
            if self.what == "tensor":
                return weight.scale.tolist()
            return list(weight.parts) if self.what == "list" else weight.amax

    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    @pytest.mark.parametrize("what", ["tensor", "list", "attribute"])
    def test_is_that_of_a_cold_load_or_refused(self, what: str, storage: str) -> None:
        served = Served(lambda: self.Model(what), storage=storage)
        a = served.model.extra()
        checkpoint = served.checkpoint(1)
        try:
            served.update(checkpoint)
        except errors.WeightlifeError:
            assert served.model.extra() == a
            return
        assert served.model.extra() == cold(lambda: self.Model(what), checkpoint).extra()

    @pytest.mark.parametrize("what", ["tensor", "list", "attribute"])
    def test_comes_back_with_a(self, what: str) -> None:
        served = Served(lambda: self.Model(what))
        before = served.model.extra()
        served.open()
        served.send(served.checkpoint(1))
        served.life.abort()
        assert served.model.extra() == before
