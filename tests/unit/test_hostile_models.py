# SPDX-License-Identifier: Apache-2.0
"""Models in odd states: copied, pickled, loaded in parts, never loaded, half loaded, holding odd objects."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251 - what users do with their own models
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.plainnet import (
    INPUT,
    A,
    B,
    C,
    Net,
    Packed,
    cold,
    copy_all,
    life_of,
    load,
    nets,
    outcome,
    push,
    served,
    serves,
)
from tests.toyhost import Served, unchanged
from weightlife import errors
from weightlife._engine import lifecycle

__all__ = ["nets"]


class TestCopies:
    def copies(self, net: Any) -> Iterator[Any]:
        yield copy.deepcopy(net)
        yield pickle.loads(pickle.dumps(net))  # noqa: S301 - our own bytes
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        yield torch.load(buffer, weights_only=False)

    def test_a_pass_of_a_copy_does_not_end_the_originals_update(self) -> None:
        net = served()
        for other in self.copies(net):
            push(net, B)
            assert serves(other) == "A"
            assert life_of(net).session is not None
            weightlife.abort(net)

    def test_a_copy_runs_when_the_original_must_not(self) -> None:
        net = served()
        others = list(self.copies(net))
        life_of(net).poison("a test")
        for other in others:
            assert serves(other) == "A"
        with pytest.raises(errors.PoisonedModelError):
            net(INPUT)

    def test_a_copy_has_no_lifecycle_and_may_get_one(self) -> None:
        """The hooks of the original are in it: a second pair would enter each pass twice."""
        net = Net()
        weightlife.watch(net)
        for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):  # noqa: S301
            assert lifecycle.of(other) is None
            load(other, A)
            load(other, B)
            assert serves(other) == "B"
            assert len(other._forward_pre_hooks) == len(other._forward_hooks) == 1

    def test_torch_compile(self) -> None:
        net = served()
        compiled = torch.compile(net, backend="eager")
        assert torch.equal(compiled(INPUT), cold(A))
        push(net, B[:1])
        assert torch.equal(compiled(INPUT), cold(A))
        push(net, B[1:])
        assert torch.equal(compiled(INPUT), cold(B))


class TestOddAttributes:
    def test_a_constant_on_the_meta_device_does_not_stand_in_the_way(self) -> None:
        net = Net()
        net.constant = torch.zeros(2, device="meta")
        weightlife.watch(net)
        load(net, A)
        load(net, B)
        assert serves(net) == "B"
        assert net.constant.is_meta


class TestParts:
    @pytest.mark.parametrize("part", ["n", "a"])
    def test_a_part_of_a_watched_model_is_loaded_through_the_whole(self, part: str) -> None:
        net = served()
        sub = net.get_submodule(part)
        weights = [(name[2:], tensor) for name, tensor in B if name.startswith(f"{part}.")]
        for call in (lambda: load(sub, weights), lambda: weightlife.watch(sub)):
            with pytest.raises(errors.SessionStateError, match="part of Net"):
                call()
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"

    def test_a_model_with_a_watched_part_is_refused(self) -> None:
        part = served()
        whole = nn.Sequential(part, nn.Identity())
        with pytest.raises(errors.SessionStateError, match="watched already") as caught:
            weightlife.watch(whole)
        assert caught.value.layer == "0"
        assert lifecycle.of(whole) is None
        load(part, B)
        assert serves(part) == "B"

    def test_a_part_that_was_taken_out_is_a_model_of_its_own(self) -> None:
        net = served()
        part, net.n = net.n, nn.Identity()
        weightlife.watch(part)

    def test_a_scripted_module_is_refused_and_not_half_watched(self) -> None:
        scripted = torch.jit.script(nn.Linear(2, 2))
        for _ in range(2):
            with pytest.raises(errors.HostError, match="scripted"):
                weightlife.watch(scripted)


class TestFirstLoads:
    def test_a_session_before_it_says_so(self) -> None:
        net = Net()
        weightlife.watch(net)
        with pytest.raises(errors.SessionStateError, match="first load"), weightlife.session(net):
            pass
        assert lifecycle.OpenSessions.count == 0
        load(net, A)
        assert serves(net) == "A"

    def failing(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from A[:3]
        raise OSError("gone")

    def test_a_pass_after_a_failed_one_processes_nothing(self) -> None:
        """Half of the weights would be taken for all, and packed."""
        net = Net()
        with pytest.raises(OSError, match="gone"):
            load(net, self.failing())
        for _ in range(2):
            with pytest.raises(errors.SessionStateError, match="OSError: gone"):
                net(INPUT)
        assert not hasattr(net.a, "packed")
        load(net, A)
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"

    def test_nor_when_the_rest_comes_without_what_failed(self) -> None:
        net = Net()
        with pytest.raises(RuntimeError):
            push(net, [A[0], ("a.scale", torch.ones(7))])
        push(net, A[2:])
        with pytest.raises(errors.SessionStateError, match="first load failed"):
            net(INPUT)
        push(net, A[1:2])
        assert serves(net) == "A"

    def test_processing_that_fails_can_not_be_repeated(self) -> None:
        class Fails(Net):
            fails = True

            def process_weights_after_loading(self) -> None:
                if Fails.fails:
                    Fails.fails = False
                    raise RuntimeError("hook")

        net = Fails()
        with pytest.raises(RuntimeError, match="hook"):
            load(net, A)
        for call in (lambda: load(net, A), lambda: net(INPUT)):
            with pytest.raises(errors.SessionStateError, match="RuntimeError: hook") as caught:
                call()
            assert "build the model again" in caught.value.hint
        load(Fails(), A)

    def test_the_passes_of_two_threads_process_it_once(self) -> None:
        started, go, calls = threading.Event(), threading.Event(), []

        class Slow(Packed):
            def process_weights_after_loading(self) -> None:
                calls.append(1)
                started.set()
                assert go.wait(20)
                super().process_weights_after_loading()

        class Two(Net):
            def __init__(self) -> None:
                super().__init__()
                self.a = Slow()

        net, answers = Two(), []
        push(net, A)
        threads = [threading.Thread(target=lambda: answers.append(serves(net))) for _ in range(2)]
        threads[0].start()
        assert started.wait(20)
        threads[1].start()
        threads[1].join(0.2)
        go.set()
        for thread in threads:
            thread.join(20)
        assert (answers, calls) == (["A", "A"], [1])


class Behind:
    """What a proxy stands for."""


class Lazy:
    """An object that raises when its attributes are looked at."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not yet")


class TestOddObjects:
    @pytest.mark.parametrize("kind", ["proxy", "lazy"])
    def test_a_model_that_holds_one(self, kind: str) -> None:
        class Holds(Net):
            def __init__(self) -> None:
                super().__init__()
                self.odd = weakref.proxy(behind[0]) if kind == "proxy" else Lazy()
                self.nested = Behind()
                self.nested.odd = self.odd  # type: ignore[attr-defined]

        behind = [Behind()]
        net = Holds()
        behind.clear()  # what the proxy stands for is gone, and it raises at whatever is done with it
        load(net, A)
        odd = net.odd
        for weights, want in ((B, "B"), (C, "C")):
            load(net, weights)
            assert serves(net) == want
        with pytest.raises(errors.MissingTensorError):
            load(net, A[:3])
        assert net.odd is odd
        assert net.nested.odd is odd

    def test_names_that_are_no_text(self) -> None:
        @weightlife.wrap_loader
        def tolerant(model: Any, weights: Iterable[tuple[Any, torch.Tensor]]) -> None:
            known = dict(model.named_parameters())
            copy_all(model, [(name, tensor) for name, tensor in weights if name in known])

        net = Net()
        tolerant(net, A)
        hostile = ["\x1b[31m\n<script>\u202e" + "z" * 100_000, "\ud800", None, b"x", ("a", 1), 1.5]
        for name in hostile:
            tolerant(net, [(name, torch.ones(1)), *B])
            report = weightlife.last_report(net)
            assert report is not None
            text = str(report) + report.summary_line() + report.to_json()
            assert len(text) < 20_000
            assert not any(ord(c) < 32 and c != "\n" for c in text)
            assert "\u202e" not in text
            text.encode()
        assert (serves(net), outcome(net)) == ("B", "committed")


class TestHooksAndReplacedParameters:
    """Found by attacks on the real engine; each served a mixture without an error, or after one."""

    def test_a_hook_that_loads_is_refused(self) -> None:
        """What it wrote stood in the new generation, uncounted, and was committed."""
        toy = Served(("packed", "dense"))
        old = dict(toy.weights)
        layer = toy.model.get_submodule("body.inner.0")
        process = type(layer).process

        def loads(self: Any) -> None:
            process(self)
            toy.send({name: value for name, value in old.items() if ".1." in name})

        with unchanged(toy.model), pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(layer), "process", loads)
            with pytest.raises(errors.SessionConflictError, match="by a hook"):
                toy.update(toy.checkpoint(1))
        assert torch.equal(toy.run(), toy.expected())
        toy.update(toy.checkpoint(1))
        assert torch.equal(toy.run(), toy.expected())

    @pytest.mark.parametrize("kind", ["dense", "swapped", "renamed"])
    @pytest.mark.parametrize("how", ["object", "data"])
    def test_a_clone_in_the_place_of_a_parameter_is_no_client_at_work(self, kind: str, how: str) -> None:
        toy = Served((kind, "norm"))
        for module in toy.model.modules():
            for name, value in list(module._parameters.items()):
                if kind == "swapped" and value.shape == (4, 4):
                    continue  # processed to the shape that it was made with: can't be told from one made anew
                if how == "data":
                    value.data = value.data.clone()
                    continue
                module._parameters[name] = nn.Parameter(value.data.clone(), requires_grad=False)
                module._parameters[name].__dict__.update(value.__dict__)
        weights = toy.checkpoint(1)
        toy.send(weights)
        assert toy.life.session is not None, "the load was left to itself"
        toy.weights = dict(weights)
        assert torch.equal(toy.run(), toy.expected())

    def test_a_load_left_to_its_caller_that_fails_half_way_does_not_serve(self) -> None:
        toy = Served(("scaled", "dense"))
        layer = toy.model.get_submodule("body.inner.0")

        def remade() -> None:
            made = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
            made.__dict__.update(layer.weight.__dict__, weight_loader=layer.copy)
            layer.weight = made

        remade()
        weights = toy.checkpoint(1)

        def fails() -> Iterator[tuple[str, torch.Tensor]]:
            yield from list(weights.items())[:1]
            raise ValueError("the trainer went away")

        with pytest.raises(ValueError, match="went away"):
            toy.send(fails())
        with pytest.raises(errors.PoisonedModelError, match="half way"):
            toy.run()
        remade()
        toy.send(weights)  # the caller's own path again, to its end
        layer.process()
        toy.weights = dict(weights)
        assert torch.equal(toy.run(), toy.expected())
        remade()
        with pytest.raises(ValueError, match="went away"):
            toy.send(fails())
        toy.update(toy.checkpoint(2))
        assert torch.equal(toy.run(), toy.expected())
