# SPDX-License-Identifier: Apache-2.0
"""Announced names, policies of one session, casts by region, and what a dummy start may not know yet."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.toyhost import INPUT, Layer, Served, ToyModel, parameter, unchanged
from weightlife import errors

SPEC = ("packed", "fused_packed", "dense", "norm")


@pytest.fixture
def served() -> Served:
    return Served(SPEC)


def send(served: Served, weights: Any, **session: Any) -> Any:
    with weightlife.session(served.model, partial="forbid", **session) as handle:
        served.send(weights)
    return handle


class TestExpected:
    @pytest.mark.parametrize("form", ["tensors", "pairs", "names", "manifest"])
    def test_what_was_announced_and_came(self, served: Served, form: str) -> None:
        new = served.checkpoint(1)
        expected: Any = {
            "tensors": new, "names": list(new), "manifest": weightlife.manifest(served.model),
            "pairs": {name: (value.dtype, value.shape) for name, value in new.items()},
        }[form]  # fmt: skip
        send(served, new, expected=expected)
        assert torch.equal(served.run(), served.expected(new))

    def refused(self, served: Served, expected: Any, kind: type[Exception], **more: Any) -> Any:
        """Before the first write: nothing was touched, not even prepared."""
        with unchanged(served.model), pytest.raises(kind) as caught:
            weightlife.session(served.model, expected=expected, **more).prepare()
        report = served.life.reports[-1]
        assert (report.outcome, report.tensors_received) == ("refused", 0)
        assert report.violations
        served.update(served.checkpoint(9))
        assert torch.equal(served.run(), served.expected())
        return caught.value

    def test_a_missing_name(self, served: Served) -> None:
        names = list(served.weights)
        error = self.refused(served, names[1:], errors.MissingTensorError, partial="forbid")
        assert error.tensors == (names[0],)

    def test_half_a_layer(self, served: Served) -> None:
        group = next(g for g in weightlife.manifest(served.model).atomic_groups() if len(g) > 1)
        error = self.refused(served, sorted(group)[1:], errors.HalfTouchedLayerError)
        assert error.tensors == (min(group),)

    def test_whole_layers_are_enough(self, served: Served) -> None:
        group = next(g for g in weightlife.manifest(served.model).atomic_groups() if len(g) > 1)
        new = {name: value for name, value in served.checkpoint(2).items() if name in group}
        with weightlife.session(served.model, expected=new):
            served.send(new)
        assert torch.equal(served.run(), served.expected(new))

    def test_a_shape(self, served: Served) -> None:
        expected = dict.fromkeys(served.weights) | {next(iter(served.weights)): ("float32", (9, 9))}
        self.refused(served, expected, errors.ShapeMismatchError, partial="forbid")

    def test_a_dtype(self, served: Served) -> None:
        first = next(iter(served.weights))
        expected = dict.fromkeys(served.weights) | {first: ("int8", served.weights[first].shape)}
        self.refused(served, expected, errors.DtypeMismatchError, partial="forbid")

    def test_a_name_that_nobody_knows(self, served: Served) -> None:
        expected = [*served.weights, "nobody"]
        self.refused(served, expected, errors.UnexpectedTensorError, partial="forbid", unexpected="refuse")

    def test_a_wrong_prefix_is_said(self, served: Served) -> None:
        expected = [f"module.{name}" for name in served.weights]
        error = self.refused(served, expected, errors.UnexpectedTensorError, unexpected="refuse")
        assert "without the prefix 'module.'" in error.message

    def test_something_else_comes(self, served: Served) -> None:
        new = served.checkpoint(1)
        first, *rest = new
        for stream in (
            {**{n: new[n] for n in rest}, first: new[first].double()},
            {**{n: new[n] for n in rest}, "stranger": new[first]},
            {n: new[n] for n in rest},
        ):
            with unchanged(served.model), pytest.raises(errors.CompletenessError):
                send(served, stream, expected=new)
        send(served, new, expected=new)
        assert torch.equal(served.run(), served.expected(new))

    def test_less_than_was_announced(self, served: Served) -> None:
        """Without a manifest that asks for it: the sender said so, and that is enough."""
        new = served.checkpoint(1)
        last = list(new)[-1]
        part = {name: value for name, value in new.items() if name != last}
        handle = weightlife.session(served.model, partial="allow", expected=new)
        with unchanged(served.model), pytest.raises(errors.MissingTensorError) as caught, handle:
            served.send(part)
        assert caught.value.tensors == (last,)

    def test_warn_and_off(self, served: Served, caplog: pytest.LogCaptureFixture) -> None:
        new = served.checkpoint(1)
        with caplog.at_level(logging.WARNING, "weightlife"):
            send(served, new, expected=[*new, "nobody"], announced="warn")
        assert "1 of" in caplog.text
        send(served, new, expected=["nobody"], announced="off")

    def test_a_loader_of_ones_own(self) -> None:
        model = ToyModel(("norm", "dense"))
        asked: list[Any] = []

        def expected(model: Any, weights: Any) -> Any:
            asked.append(model)
            return dict(weights)

        @weightlife.wrap_loader(expected=expected)
        def load(model: Any, weights: Any) -> None:
            model.load_weights(weights)

        first = {n: torch.ones(s) for n, s in model.sources().items()}
        load(model, list(first.items()))
        load(model, [(n, t + 1) for n, t in first.items()])
        assert asked == [model]
        before = model(INPUT).clone()
        with pytest.raises(errors.ShapeMismatchError):
            load(model, [(n, torch.ones(7, 7)) for n in first])
        assert torch.equal(model(INPUT), before)
        with pytest.raises(errors.ConfigError):
            weightlife.wrap_loader(chunked=True, expected=first)

    def test_after_a_dummy_start_nothing_can_be_held_against_it(self) -> None:
        served = Served(("packed", "dense"), provisional=True)
        new = served.checkpoint(1)
        with weightlife.session(served.model, partial="forbid", expected=new):
            served.send(new)
        assert torch.equal(served.run(), served.expected(new))


class TestPolicies:
    def test_of_one_session_only(self, served: Served) -> None:
        new = served.checkpoint(1)
        twice = [*new.items(), next(iter(new.items()))]
        with weightlife.session(served.model, surplus="warn"):
            served.send(twice)
        assert [v.code for v in served.life.reports[-1].violations] == ["WL202"]
        with pytest.raises(errors.SurplusTensorError), weightlife.session(served.model):
            served.send(twice)

    def test_nonfinite(self, served: Served) -> None:
        new = served.checkpoint(1)
        for value in (float("nan"), float("inf"), -float("inf")):
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                bad = {n: t.clone().to(dtype) for n, t in new.items()}
                bad[next(reversed(bad))].view(-1)[-1] = value
                with unchanged(served.model), pytest.raises(errors.NonFiniteError):
                    send(served, bad, nonfinite="strict")
        send(served, new, nonfinite="strict")

    def test_finite_extremes_are_finite(self, served: Served) -> None:
        big = {n: torch.full_like(t, torch.finfo(t.dtype).max) for n, t in served.weights.items()}
        send(served, big, nonfinite="strict")

    def test_settings_that_a_session_cannot_have(self, served: Served) -> None:
        with pytest.raises(errors.ConfigError, match="isolation"):
            weightlife.session(served.model, isolation="in_place")
        with pytest.raises(errors.ConfigError):
            weightlife.session(served.model, surplus="maybe")


class Half(Layer):
    """One storage of two halves: the loader views the upper one's bytes as integers, by design."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(2, 4, loader=self.rows)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"codes": (4,), "values": (4,)}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        self.weight.weight_loader(self.weight, tensor, 0 if name == "codes" else 1)

    def rows(self, param: torch.Tensor, tensor: torch.Tensor, row: int) -> None:
        param.data[row].copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


class HalfModel(ToyModel):
    def __init__(self) -> None:
        super().__init__(("norm",))
        self.halves = Half()


class TestCasts:
    def weights(self, model: Any, codes: torch.dtype, values: torch.dtype) -> dict[str, torch.Tensor]:
        out = {n: torch.ones(s) for n, s in model.sources().items()}
        out["halves.codes"] = out["halves.codes"].to(codes)
        out["halves.values"] = out["halves.values"].to(values)
        return out

    def test_what_the_first_load_did_is_legal_for_that_region_and_no_other(self) -> None:
        model = HalfModel()
        wrapped = weightlife.wrap_loader(lambda model, weights: model.load_weights(weights))

        def load(model: Any, weights: dict[str, torch.Tensor]) -> None:
            wrapped(model, iter(weights.items()))

        load(model, self.weights(model, torch.int8, torch.float32))
        load(model, self.weights(model, torch.int8, torch.bfloat16))
        load(model, self.weights(model, torch.float64, torch.float32))
        before = model(INPUT).clone()
        with pytest.raises(errors.DtypeMismatchError) as caught:
            load(model, self.weights(model, torch.int8, torch.int8))
        assert caught.value.tensors == ("halves.values",)
        assert torch.equal(model(INPUT), before)
        assert "int8" in next(
            s.takes for s in weightlife.manifest(model).storages if "halves.weight" in s.tensors
        )

    def test_after_a_dummy_start_the_table_decides(self) -> None:
        served = Served(
            HalfModel, provisional=True, weights=self.weights(HalfModel(), torch.float32, torch.float32)
        )
        with pytest.raises(errors.DtypeMismatchError):
            served.update(self.weights(served.model, torch.int8, torch.float32))
        served.life.abort()
        served.update(self.weights(served.model, torch.bfloat16, torch.float64))


class Spread(Layer):
    """A loader that fills a parameter with one value, by design."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = parameter(4, loader=self.fill)

    def sources(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (1,)}

    def fill(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        param.data.copy_(tensor)

    def process(self) -> None:
        self.doubled = nn.Parameter(self.scale.data * 2, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.doubled * x


class SpreadModel(ToyModel):
    def __init__(self) -> None:
        super().__init__(("norm",))
        self.spread = Spread()


def test_after_a_dummy_start_a_loader_that_repeats_stays_legal() -> None:
    """The second real load is held to what the first one did, not to nothing."""
    weights = {n: torch.ones(s) for n, s in SpreadModel().sources().items()}
    served = Served(SpreadModel, provisional=True, weights=weights)
    for seed in (1, 2, 3):
        served.update(served.checkpoint(seed))
        assert torch.equal(served.run(), served.expected())


class Cut(Layer):
    """A loader that narrows what it gets, as loaders of sharded layers do, and converts it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4, 4, loader=self.cut)

    def cut(self, param: torch.Tensor, tensor: torch.Tensor) -> None:
        param.data.copy_(tensor.narrow(0, 0, 4).to(param.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


class CutModel(ToyModel):
    def __init__(self) -> None:
        super().__init__(("norm",))
        self.cut = Cut()


@pytest.mark.parametrize("implicit", [False, True])
def test_a_tensor_that_a_loader_would_cut_or_convert_is_refused(implicit: bool) -> None:
    """Found by random streams: a scale of 128 groups in place of 4 was cut in silence."""
    served = Served(CutModel, weights={n: torch.ones(s) for n, s in CutModel().sources().items()})
    new = served.checkpoint(1)
    update = served.send if implicit else served.update
    for bad, kind in (
        (torch.ones(9, 4), errors.ShapeMismatchError),
        (torch.ones(4, 4, dtype=torch.int8), errors.DtypeMismatchError),
    ):
        with unchanged(served.model), pytest.raises(kind):
            update({**new, "cut.weight": bad})
    with weightlife.session(served.model, shapes="warn"):
        served.send({**new, "cut.weight": torch.cat([new["cut.weight"], torch.zeros(5, 4)])})
    assert torch.equal(served.run(), served.expected(new))


class Strict(ToyModel):
    """A loader that looks for what is missing at the end of each of its calls, as some drafters' do."""

    def load_weights(self, weights: Any) -> set[str]:
        taken = super().load_weights(weights)
        if taken != set(self.sources()):
            raise ValueError("weights are missing")
        return taken


def test_a_loaders_own_check_at_the_end_of_each_call() -> None:
    served = Served(lambda: Strict(("packed", "dense")))
    new = served.checkpoint(1)
    first, *rest = new.items()
    with unchanged(served.model), pytest.raises(ValueError, match="weights are missing"):
        served.send([first])
    with unchanged(served.model), pytest.raises(ValueError, match="weights are missing"):
        served.send(rest)
    served.update(new)
    assert torch.equal(served.run(), served.expected(new))
