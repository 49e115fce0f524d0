# SPDX-License-Identifier: Apache-2.0
"""Ways of writing weights that go round `copy_` into a parameter: followed, or refused while A is whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.plainnet import INPUT, A, B, C, Net, Pairs, copy_all, life_of, load, nets, outcome, push, serves
from weightlife import errors

__all__ = ["nets"]

Loader = Callable[[Any, Iterable[tuple[str, torch.Tensor]]], None]


def by_state_dict(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    model.load_state_dict(dict(weights), strict=False)


def assigned(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    model.load_state_dict(dict(weights), strict=False, assign=True)


def registered(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.Parameter(tensor, requires_grad=False))


def given_data(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data = tensor.clone()


def lent_data(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As `given_data`, and the memory stays the sender's."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data = tensor


def given_and_cloned(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Ends with a line over all parameters, whatever came."""
    lent_data(model, weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def copied_and_cloned(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    copy_all(model, weights)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def copied_and_registered(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    copy_all(model, weights)
    registered(model, [(name, tensor.data.clone()) for name, tensor in model.named_parameters()])


RENEWING = (given_and_cloned, copied_and_cloned, copied_and_registered)
REPLACING = (assigned, registered)
LOADERS: tuple[Loader, ...] = (copy_all, by_state_dict, assigned, registered, given_data)


class TestAssigned:
    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    @pytest.mark.parametrize("again", LOADERS, ids=lambda f: f.__name__)
    @pytest.mark.parametrize("first", LOADERS, ids=lambda f: f.__name__)
    def test_whoever_loaded_first(self, first: Loader, again: Loader, storage: str) -> None:
        net = Net()
        weightlife.wrap_loader(first, storage=storage)(net, A)
        assert serves(net) == "A"
        for weights, want in ((B, "B"), (C, "C"), (A, "A")):
            weightlife.wrap_loader(again)(net, weights)
            assert (serves(net), outcome(net)) == (want, "committed")

    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    @pytest.mark.parametrize("loader", RENEWING, ids=lambda f: f.__name__)
    def test_whoever_renews_every_parameter(self, loader: Loader, storage: str) -> None:
        net, wrapped = Net(), weightlife.wrap_loader(loader, storage=storage)
        for weights, want in ((A, "A"), (B, "B"), (C, "C"), (A, "A")):
            wrapped(net, weights)
            assert (serves(net), outcome(net)) == (want, "committed")

    @pytest.mark.parametrize("loader", [*REPLACING, given_data, *RENEWING], ids=lambda f: f.__name__)
    def test_what_is_missing_is_named(self, loader: Loader) -> None:
        net, wrapped = Net(), weightlife.wrap_loader(loader)
        wrapped(net, A)
        for index, (name, _) in enumerate(B):
            with pytest.raises(errors.MissingTensorError) as caught:
                wrapped(net, B[:index] + B[index + 1 :])
            assert caught.value.tensors == (name,)
            assert serves(net) == "A"

    @pytest.mark.parametrize("loader", [*REPLACING, given_data], ids=lambda f: f.__name__)
    def test_addresses_stay(self, loader: Loader) -> None:
        net, wrapped = Net(), weightlife.wrap_loader(loader)
        wrapped(net, A)
        before = {name: p.data_ptr() for name, p in net.named_parameters()}
        wrapped(net, B)
        assert {name: p.data_ptr() for name, p in net.named_parameters()} == before

    @pytest.mark.parametrize("storage", ["pinned", "adopted"])
    @pytest.mark.parametrize("loader", [*REPLACING, lent_data], ids=lambda f: f.__name__)
    def test_the_senders_tensors_are_never_written(self, loader: Loader, storage: str) -> None:
        """They became the model's parameters: a commit into them would change what the sender has."""
        mine = [[(name, tensor.clone()) for name, tensor in weights] for weights in (A, B)]
        net, wrapped = Net(), weightlife.wrap_loader(loader, storage=storage)
        for weights in mine:
            wrapped(net, weights)
        for weights in (C, A):
            load(net, weights)
        for sent, original in zip(mine, (A, B), strict=True):
            assert all(torch.equal(a[1], b[1]) for a, b in zip(sent, original, strict=True))

    @pytest.mark.parametrize("loader", [*REPLACING, lent_data], ids=lambda f: f.__name__)
    def test_a_sender_may_use_its_buffer_again_when_the_call_returns(self, loader: Loader) -> None:
        buffers = [(name, tensor.clone()) for name, tensor in B]
        net, wrapped = Net(), weightlife.wrap_loader(loader, chunked=True)
        wrapped(net, A)
        assert serves(net) == "A"
        for part in (buffers[:3], buffers[3:]):
            wrapped(net, part)
            for _, tensor in part:
                tensor.fill_(7.0)
        assert serves(net) == "B"

    @pytest.mark.parametrize("loader", [*REPLACING, lent_data], ids=lambda f: f.__name__)
    def test_so_may_that_of_a_first_load(self, loader: Loader) -> None:
        """It is processed when its last chunk has come: long after the buffer held the first."""
        net = Net()
        wrapped = weightlife.wrap_loader(loader, chunked=True)
        buffers = [(name, tensor.clone()) for name, tensor in A]
        for part in (buffers[:1], buffers[1:3], buffers[3:]):
            wrapped(net, part)
            for _, tensor in part:
                tensor.fill_(7.0)
        assert serves(net) == "A"
        for weights, want in ((B, "B"), (A, "A")):
            weightlife.wrap_loader(copy_all)(net, weights)
            assert (serves(net), outcome(net)) == (want, "committed")

    def test_in_chunks_a_half_is_not_the_end(self) -> None:
        net, wrapped = Net(), weightlife.wrap_loader(assigned, chunked=True)
        wrapped(net, A)
        assert serves(net) == "A"
        wrapped(net, B[:1])
        assert serves(net) == "A"
        wrapped(net, B[1:])
        assert serves(net) == "B"

    def test_a_failed_one_is_undone(self) -> None:
        def fails(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            assigned(model, list(weights)[:3])
            raise OSError("gone")

        net = Net()
        weightlife.wrap_loader(assigned)(net, A)
        before = dict(net.named_parameters())
        with pytest.raises(OSError, match="gone"):
            weightlife.wrap_loader(fails)(net, B)
        assert serves(net) == "A"
        assert all(before[name] is p for name, p in net.named_parameters())

    def test_a_tie_that_the_loader_makes_is_no_weight_that_came(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.e = nn.Linear(4, 4, bias=False).requires_grad_(False)
                self.o = nn.Linear(4, 4, bias=False).requires_grad_(False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.o(self.e(x))

        @weightlife.wrap_loader
        def tying(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                model.e.weight.data.copy_(tensor)
            model.o.weight = model.e.weight

        net = Tied()
        tying(net, [("e", torch.eye(4))])
        for value in (2.0, 3.0):
            tying(net, [("e", torch.eye(4) * value)])
            assert torch.equal(net(INPUT), INPUT * value * value)
            assert net.o.weight.data_ptr() == net.e.weight.data_ptr()

    def test_another_dtype_than_the_first_loads_did_not_arrive(self) -> None:
        net, wrapped = Net(), weightlife.wrap_loader(assigned)
        wrapped(net, A)
        with pytest.raises(errors.DtypeMismatchError) as caught:
            wrapped(net, [*B[:5], ("n.bias", torch.ones(4, dtype=torch.int8))])
        assert caught.value.tensors == ("n.bias",)
        assert serves(net) == "A"


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * 1


@weightlife.wrap_loader
def bytewise(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        start = int(name.partition(":")[2])
        model.w.data.view(torch.uint8)[start : start + tensor.numel()].copy_(tensor)


def bytes_of(value: float, start: int, stop: int) -> tuple[str, torch.Tensor]:
    return f"w:{start}", torch.full((8,), value).view(torch.uint8)[start:stop]


class TestBytes:
    def test_whole_elements_written_as_bytes_are_followed(self) -> None:
        net = Flat()
        bytewise(net, [bytes_of(1.0, 0, 16), bytes_of(1.0, 16, 32)])
        bytewise(net, [bytes_of(2.0, 0, 16), bytes_of(2.0, 16, 32)])
        assert net(INPUT).tolist() == [2.0] * 8
        with pytest.raises(errors.MissingTensorError) as caught:
            bytewise(net, [bytes_of(3.0, 0, 16)])
        assert caught.value.tensors == ("w:16",)
        assert net(INPUT).tolist() == [2.0] * 8

    def test_parts_of_elements_are_refused(self) -> None:
        net = Flat()
        bytewise(net, [bytes_of(1.0, 0, 16), bytes_of(1.0, 16, 32)])
        with pytest.raises(errors.BypassError, match="smaller than its elements"):
            bytewise(net, [bytes_of(2.0, 0, 16), bytes_of(2.0, 14, 32)])
        assert net(INPUT).tolist() == [1.0] * 8

    def test_a_model_that_was_loaded_in_parts_of_elements_refuses_updates(self) -> None:
        net = Flat()
        bytewise(net, [bytes_of(1.0, 0, 14), bytes_of(1.0, 14, 32)])
        assert net(INPUT).tolist() == [1.0] * 8
        with pytest.raises(errors.RefusedLayerError, match="parts of elements"):
            bytewise(net, [bytes_of(2.0, 0, 14), bytes_of(2.0, 14, 32)])
        assert net(INPUT).tolist() == [1.0] * 8

    def test_a_storage_that_is_no_multiple_of_its_first_dtype(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                raw = torch.zeros(10, dtype=torch.uint8)
                self.register_buffer("floats", raw[:8].view(torch.float32))
                self.register_buffer("raw", raw)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.raw.clone()

        @weightlife.wrap_loader
        def into(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                model.raw.copy_(tensor)

        net = Odd()
        into(net, [("raw", torch.ones(10, dtype=torch.uint8))])
        with pytest.raises(errors.WeightlifeError):
            into(net, [("raw", torch.full((10,), 2, dtype=torch.uint8))])
        assert net(INPUT).tolist() == [1] * 10

    def test_a_model_that_was_converted_after_its_first_load(self) -> None:
        @weightlife.wrap_loader
        def halves(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in weights:
                start = int(name.partition(":")[2])
                model.w.data[start : start + 4].copy_(tensor)

        def parts(value: float) -> Pairs:
            return [("w:0", torch.full((4,), value)), ("w:4", torch.full((4,), value))]

        net = Flat()
        halves(net, parts(1.0))
        net.bfloat16()
        with pytest.raises(errors.RefusedLayerError, match="another size"):
            halves(net, parts(2.0))
        assert net(INPUT).tolist() == [1.0] * 8


def test_memory_that_no_load_writes_is_the_hosts_to_exchange() -> None:
    """A key-value cache is bound after the first load, in another size than the constructor's stub."""

    class Cached(Net):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(0)

    net = Cached()
    load(net, A)
    net.cache = cache = torch.ones(64)
    load(net, B)
    assert serves(net) == "B"
    assert net.cache is cache


class Wrapper(torch.Tensor):
    """A wrapper subclass: its outer storage has no memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [value.held if isinstance(value, Wrapper) else value for value in args]
        out = func(*plain, **(kwargs or {}))
        return Wrapper(out) if func is torch.ops.aten.detach.default else out


class TestWithoutMemory:
    def test_wrapper_subclasses_are_refused_by_name(self) -> None:
        class Holds(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(Wrapper(torch.zeros(4)), requires_grad=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.weight

        @weightlife.wrap_loader
        def into(model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                model.weight.data.held.copy_(tensor)

        net = Holds()
        into(net, [("w", torch.ones(4))])
        want = net(INPUT).clone()
        with pytest.raises(errors.RefusedLayerError, match="weight"):
            into(net, [("w", torch.full((4,), 2.0))])
        assert torch.equal(net(INPUT), want)

    @pytest.mark.filterwarnings("ignore")
    def test_quantised_tensors_are_refused_by_name(self) -> None:
        class Holds(Flat):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("q", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

        net = Holds()
        load(net, [("w", torch.ones(8))])
        with pytest.raises(errors.RefusedLayerError, match="q"):
            load(net, [("w", torch.ones(8))])


class TestInferenceMode:
    @pytest.mark.parametrize("loader", LOADERS, ids=lambda f: f.__name__)
    def test_a_first_load_under_it_can_be_reloaded(self, loader: Loader) -> None:
        """Its hooks would make tensors that no commit can write: the second load poisoned the model."""
        net, wrapped = Net(), weightlife.wrap_loader(loader)
        with torch.inference_mode():
            wrapped(net, A)
            assert serves(net) == "A"
        assert not any(p.is_inference() for p in net.parameters())
        wrapped(net, B)
        assert serves(net) == "B"
        with torch.inference_mode():
            wrapped(net, C)
            assert serves(net) == "C"

    def test_a_model_built_under_it_is_loaded_and_then_refused_by_name(self) -> None:
        with torch.inference_mode():
            net = Net()
            load(net, A)
            assert serves(net) == "A"
        for context in (torch.no_grad, torch.inference_mode):
            with context(), pytest.raises(errors.RefusedLayerError, match=r"torch\.inference_mode"):
                load(net, B)
        with torch.inference_mode():
            assert serves(net) == "A"
        assert not life_of(net).poisoned

    def test_chunks_under_it(self) -> None:
        net = Net()
        load(net, A)
        with torch.inference_mode():
            push(net, B[:3])
            assert serves(net) == "A"
            push(net, B[3:])
            assert serves(net) == "B"
