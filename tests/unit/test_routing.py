# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's tensors would go, from headers alone: true to a load, and the model that serves is not touched."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file
from torch import nn

import weightlife
from tests.plainnet import Net, copy_all, load, nets
from tests.plainnet import checkpoint as net_checkpoint
from tests.strategies import specs
from tests.toyhost import KINDS, Layer, Served, ToyModel, parameter, unchanged
from weightlife import errors
from weightlife._engine.lifecycle import OpenSessions
from weightlife.source_checks import Source

__all__ = ["nets"]

EVERYTHING = (*sorted(KINDS), ("packed", "tied"))


def headers(weights: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(value.dtype), tuple(value.shape)) for name, value in weights.items()}


def routed(served: Served, weights: Any) -> weightlife.Manifest:
    """The manifest of a checkpoint of which only headers are told; nothing of the model may change."""
    with unchanged(served.model):
        return weightlife.manifest(served.model, checkpoint=headers(weights))


class Broken(ToyModel):
    """One more layer, whose loader is the class's own."""

    def __init__(self, layer: type[Layer]) -> None:
        super().__init__(("packed", "norm"))
        self.more = layer()


class Branching(Layer):
    """Loads by what the tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter(4, loader=self.load)

    @staticmethod
    def load(param: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.sum() > 0:
            param.data.copy_(tensor)
        else:
            param.data.copy_(-tensor)


class Foreign(Branching):
    """Goes through memory of another library."""

    @staticmethod
    def load(param: torch.Tensor, tensor: torch.Tensor) -> None:
        param.data.copy_(torch.from_numpy(tensor.numpy()))


class Hidden(Branching):
    """Writes a tensor that it holds where nobody looks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(4), requires_grad=False)
        alias = self.extra.data
        self.weight = parameter(4, loader=lambda param, tensor: alias.copy_(alias + 1))


class Forgiving(Branching):
    """Swallows what goes wrong."""

    @staticmethod
    def load(param: torch.Tensor, tensor: torch.Tensor) -> None:
        try:
            Branching.load(param, tensor)
        except Exception:  # noqa: BLE001 - as some loaders do
            param.data.zero_()


class TestTrue:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_a_routed_manifest_is_that_of_a_load(self, kind: str) -> None:
        served = Served((kind, ("packed", "tied")))
        known = weightlife.manifest(served.model)
        found = routed(served, served.checkpoint(1))
        assert found.provisional
        assert str(known.diff(found)) == "no difference"
        assert [s.takes for s in found.storages] == [s.takes for s in known.storages]
        assert found.atomic_groups() == known.atomic_groups()

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(specs())
    def test_of_any_model(self, spec: Any) -> None:
        served = Served(spec)
        assert not weightlife.manifest(served.model).diff(routed(served, served.checkpoint(1)))

    def test_the_next_update_is_exact(self) -> None:
        served = Served(EVERYTHING)
        routed(served, served.checkpoint(1))
        new = served.checkpoint(2)
        served.update(new)
        assert torch.equal(served.run(), served.expected(new))

    def test_a_part_of_a_checkpoint_and_other_dtypes(self) -> None:
        served = Served(("packed", "fused"))
        part = dict(list(served.checkpoint(1).items())[:2])
        part = {name: value.to(torch.bfloat16) for name, value in part.items()}
        found = routed(served, part)
        assert list(found.tensors) == list(part)
        assert {dtype for s in found.storages for dtype in s.takes} == {"bfloat16"}

    def test_a_loader_that_gives_parameters_other_data(self) -> None:
        class Assigning(ToyModel):
            def load_weights(self, weights: Any) -> Any:
                for name, tensor in weights:
                    self.get_parameter(name).data = tensor

        class Swapping(ToyModel):
            def load_weights(self, weights: Any) -> Any:
                self.load_state_dict(dict(weights), assign=True, strict=False)

        plain = Served(("norm",))
        names = [n for n, _ in plain.model.named_parameters()]
        shapes = {n: tuple(p.shape) for n, p in plain.model.named_parameters()}
        for model in (Assigning, Swapping):
            made: Any = model
            weights = {n: torch.ones(shapes[n]) for n in names}
            served = Served(lambda made=made: made(("norm",)), weights=weights)
            found = routed(served, weights)
            regions = served.life.manifest.expected
            assert found.left_out == weightlife.manifest(served.model).left_out, regions
            assert not weightlife.manifest(served.model).diff(found)


class TestRefused:
    @pytest.mark.parametrize(
        ("layer", "said"),
        [
            (Branching, "a value of the tensor"),
            (Foreign, "can't run without values"),
            (Forgiving, "a value of the tensor"),
        ],
    )
    def test_a_loader_that_reads_values_is_named(self, layer: type[Layer], said: str) -> None:
        weights = {**Served(("packed", "norm")).weights, "more.weight": torch.ones(4)}
        served = Served(lambda: Broken(layer), weights=weights)
        with pytest.raises(errors.RoutingError, match=said) as caught:
            routed(served, weights)
        assert caught.value.tensors == ("more.weight",)
        assert caught.value.model == "Broken"
        assert OpenSessions.count == 0
        served.update(served.checkpoint(1))
        assert torch.equal(served.run(), served.expected())

    def test_memory_that_serves_is_never_written(self) -> None:
        weights = {**Served(("packed", "norm")).weights, "more.weight": torch.ones(4)}
        served = Served(lambda: Broken(Hidden), weights=weights)
        with pytest.raises(errors.RoutingError, match="memory that serves"):
            routed(served, weights)

    def test_a_layer_that_can_not_be_shown_without_memory(self) -> None:
        class Sparse(Branching):
            def __init__(self) -> None:
                super().__init__()
                self.table = torch.zeros(4, 4).to_sparse()

            @staticmethod
            def load(param: torch.Tensor, tensor: torch.Tensor) -> None:
                param.data.copy_(tensor)

        weights = {**Served(("packed", "norm")).weights, "more.weight": torch.ones(4)}
        served = Served(lambda: Broken(Sparse), weights=weights)
        with pytest.raises(errors.RoutingError, match="without memory") as caught:
            weightlife.manifest(served.model, checkpoint=headers(weights))
        assert caught.value.layer == "more"

    def test_what_a_name_can_not_be(self) -> None:
        served = Served(("packed", "norm"))
        with pytest.raises(errors.RoutingError) as caught, unchanged(served.model):
            weightlife.manifest(served.model, checkpoint={"<b>\x1b[31m": None})
        assert "\x1b" not in str(caught.value)
        with pytest.raises(errors.RoutingError, match="float7"), unchanged(served.model):
            weightlife.manifest(served.model, checkpoint={"a": ("float7", (1,))})
        with pytest.raises(errors.ConfigError):
            weightlife.manifest(served.model, checkpoint=7)
        served.host.load = None
        with pytest.raises(errors.RoutingError, match="not known"):
            weightlife.manifest(served.model, checkpoint={})
        with pytest.raises(errors.RoutingError, match="no headers"):
            weightlife.manifest(served.model, checkpoint="/nowhere")

    def test_whatever_happens_the_model_is_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also where the tree was half exchanged, and for what is no ordinary exception."""
        from weightlife._engine import routing

        served = Served(EVERYTHING)

        def interrupted(weights: Any) -> None:
            next(iter(weights))
            raise KeyboardInterrupt

        served.host.load = interrupted
        with unchanged(served.model), pytest.raises(KeyboardInterrupt):
            weightlife.manifest(served.model, checkpoint=headers(served.weights))
        made = routing.MetaStage._placeholder

        def breaks(stage: Any, index: int) -> torch.Tensor:
            if len(stage.placeholders) == 3:
                raise MemoryError
            return made(stage, index)

        monkeypatch.setattr(routing.MetaStage, "_placeholder", breaks)
        with unchanged(served.model), pytest.raises(MemoryError):
            weightlife.manifest(served.model, checkpoint=headers(served.weights))
        assert OpenSessions.count == 0
        new = served.checkpoint(1)
        served.update(new)
        assert torch.equal(served.run(), served.expected(new))

    def test_while_an_update_is_open(self) -> None:
        served = Served(("packed", "norm"))
        served.open()
        with pytest.raises(errors.SessionStateError):
            weightlife.manifest(served.model, checkpoint=headers(served.weights))
        served.send(served.checkpoint(1))
        served.finish()

    def test_from_inside_a_source(self) -> None:
        served = Served(("packed", "norm"))
        heard: list[type] = []

        def source() -> Any:
            for item in served.checkpoint(1).items():
                try:
                    weightlife.manifest(served.model, checkpoint=headers(served.weights))
                except errors.WeightlifeError as error:
                    heard.append(type(error))
                yield item

        served.open()
        served.send(source())
        served.finish()
        assert set(heard) == {errors.SessionStateError}

    def test_a_pass_of_another_thread_waits_and_sees_the_weights(self) -> None:
        served = Served(("packed", "norm"))
        inside, answers, went_on = threading.Event(), [], []
        real = served.model.load_weights

        def slow(weights: Any) -> None:
            inside.set()
            thread.join(0.2)
            went_on.append(not thread.is_alive())
            real(weights)

        def passing() -> None:
            inside.wait(10)
            answers.append(served.run())

        served.host.load = slow
        thread = threading.Thread(target=passing)
        thread.start()
        weightlife.manifest(served.model, checkpoint=headers(served.weights))
        thread.join(10)
        assert went_on == [False]
        assert torch.equal(answers[0], served.expected())


class TestDummyStart:
    """`Served(provisional=True)` has had a dummy first load; its host knows no files, so each test routes itself."""

    def started(self, told: Any, **settings: Any) -> Served:
        from weightlife._engine import routing

        served = Served(("packed", "fused", "dense", "norm"), provisional=True, **settings)
        served.host.source = Source("a", headers={n: _header(v) for n, v in told.items()})
        real = served.model.load_weights
        # a name that nothing takes is the loader's business: this one drops it
        served.host.load = lambda weights: real((n, t) for n, t in weights if not n.startswith("gone"))
        self.said = routing.at_start(served.life)
        return served

    def test_the_provisional_manifest_names_what_a_checkpoint_would_write(self) -> None:
        weights = Served(("packed", "fused", "dense", "norm")).weights
        served = self.started(weights)
        assert f"{len(weights)} names" in self.said
        found = weightlife.manifest(served.model)
        assert found.provisional
        assert set(found.tensors) == set(weights)
        assert found.left_out
        assert [type(e) for e in found.check(list(weights)[1:])] == [errors.MissingTensorError]
        assert weightlife.Manifest.from_json(found.to_json()) == found

    def test_the_first_real_load_replaces_it_and_agrees(self) -> None:
        served = self.started(Served(("packed", "fused", "dense", "norm")).weights)
        served.update(served.checkpoint(1))
        assert any("what the headers had told" in note for note in served.life.reports[-1].notes)
        assert not any("differs" in note for note in served.life.reports[-1].notes)
        assert not weightlife.manifest(served.model).provisional
        assert served.life.routed is None

    def test_the_first_real_load_says_what_differed(self, caplog: pytest.LogCaptureFixture) -> None:
        weights = Served(("packed", "fused", "dense", "norm")).weights
        served = self.started({**weights, "gone.weight": torch.ones(2)})
        with caplog.at_level(logging.WARNING, "weightlife"):
            served.update(served.checkpoint(1))
        note = next(n for n in served.life.reports[-1].notes if "differs" in n)
        assert "1 names that did not come (gone.weight first)" in note
        assert any("gone.weight" in record.message for record in caplog.records)
        assert torch.equal(served.run(), served.expected())

    def test_an_announcement_that_disagrees_is_a_warning_and_no_refusal(self) -> None:
        served = self.started(Served(("packed", "fused", "dense", "norm")).weights)
        new = served.checkpoint(1)
        first = next(iter(new))
        short = {name: value for name, value in new.items() if name != first}
        handle = weightlife.session(served.model, partial="forbid", expected=short)
        with handle:
            served.send(short)
        assert handle.report is not None
        assert [v.code for v in handle.report.violations] == ["WL201"]
        assert handle.report.outcome == "committed"

    def test_a_loader_that_can_not_be_routed_costs_the_manifest_and_not_the_start(self) -> None:
        from weightlife._engine import routing

        served = Served(lambda: Broken(Branching), provisional=True)
        told = {**Served(("packed", "norm")).weights, "more.weight": torch.ones(4)}
        served.host.source = Source("a", headers={n: _header(v) for n, v in told.items()})
        with unchanged(served.model):
            said = routing.at_start(served.life)
        assert "no provisional manifest" in said
        assert "more.weight" in said
        assert weightlife.manifest(served.model).tensors == {}

    def test_no_files_or_no_wish(self) -> None:
        from weightlife._engine import routing

        served = Served(("norm",), provisional=True)
        assert routing.at_start(served.life) == ""
        served = self.started(Served(("packed", "fused", "dense", "norm")).weights, source="off")
        assert (self.said, served.life.routed) == ("", None)


class TestPlain:
    def test_a_plain_module_needs_its_loader(self, tmp_path: Path) -> None:
        model = Net()
        load(model, net_checkpoint(1))
        save_file(dict(net_checkpoint(2)), tmp_path / "model.safetensors")
        with pytest.raises(errors.RoutingError, match="not known"):
            weightlife.manifest(model, checkpoint=tmp_path)
        for loader in (copy_all, load):
            found = weightlife.manifest(model, checkpoint=tmp_path, loader=loader)
            assert not weightlife.manifest(model).diff(found)
        (tmp_path / "model.safetensors").write_bytes(b"1234567")
        with pytest.raises(errors.TruncatedSourceError):
            weightlife.manifest(model, checkpoint=tmp_path, loader=load)
        load(model, net_checkpoint(3))


def _header(value: torch.Tensor) -> Any:
    from weightlife._declared import Header

    return Header(str(value.dtype).removeprefix("torch."), tuple(value.shape))
