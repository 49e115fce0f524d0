# SPDX-License-Identifier: Apache-2.0
"""Loaders that mislead what a first load taught: none may end as a wrong answer that serves."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from tests.plainnet import nets
from weightlife import errors
from weightlife._engine import lifecycle

__all__ = ["nets"]

Weights = Iterable[tuple[str, torch.Tensor]]
LAYERS = 3

# What the loaders here depend on besides their arguments: what a closure holds would be part of a loader's identity.
HIDDEN: dict[str, Any] = {}


def _hole(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, -1.0), requires_grad=False)


class Layer(nn.Module):
    """A layer that processing transposes, or leaves alone."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.w, self.v, self.packed = _hole(4, 4), _hole(4), packed

    def process_weights_after_loading(self) -> None:
        if self.packed:
            self.w = nn.Parameter(self.w.data.t().contiguous(), requires_grad=False)


class Net(nn.Module):
    """Three layers, and views of two of them that were taken when they were made (as a flat buffer's are)."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(packed) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"layers.{i}.{name}", torch.randint(1, 900, shape, generator=generator).float())
        for i in range(LAYERS)
        for name, shape in (("w", (4, 4)), ("v", (4,)))
    ]


def serves(net: Net, given: list[tuple[str, torch.Tensor]]) -> bool:
    held = {}
    for i, layer in enumerate(net.layers):
        held[f"layers.{i}.w"] = layer.w.data.t() if layer.packed else layer.w.data
        held[f"layers.{i}.v"] = layer.v.data
    return all(torch.equal(held[name], tensor) for name, tensor in given)


def poisoned(net: nn.Module) -> bool:
    life = lifecycle.of(net)
    assert life is not None
    return bool(life.poisoned)


@pytest.mark.parametrize("isolation", ["staged", "in_place"])
@pytest.mark.parametrize("storage", ["pinned", "adopted"])
@pytest.mark.parametrize("explicit", [True, False])
def test_what_was_made_ready_and_not_written_keeps_its_values(
    isolation: str, storage: str, explicit: bool
) -> None:
    """The second part is written where it is not zero; its storage was staged and marked before that was known."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.k = _hole(4, 4), _hole(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def loader(model: Any, stream: Weights) -> None:
        for name, tensor in stream:
            if name == "k1":
                model.k.data[1].copy_(tensor)
                continue
            model.w.data.copy_(tensor[:4])
            if bool(tensor[4].any()):
                model.k.data[0].copy_(tensor[4])

    net = Two()
    settings = {"isolation": isolation, "storage": storage, "log_level": "error"}
    a = torch.arange(1.0, 21.0).reshape(5, 4)
    weightlife.wrap_loader(**settings)(loader)(net, [("fused", a), ("k1", torch.ones(4))])
    b = a + 100
    b[4] = 0
    if explicit:
        load = weightlife.wrap_loader(**settings)(loader)
        with weightlife.session(net):
            load(net, [("fused", b)])
    else:
        weightlife.wrap_loader(chunked=True, **settings)(loader)(net, [("fused", b)])
        net(torch.ones(1))
    assert torch.equal(net.w, b[:4])
    assert torch.equal(net.k, torch.stack([a[4], torch.ones(4)]))


def pumped(stream: Weights, first: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """A source that is read by a thread, from its item `first` on."""
    source, ready = iter(stream), queue.Queue[Any](2)
    for _ in range(first):
        yield next(source)

    def pump() -> None:
        try:
            for item in source:
                ready.put(item)
        except ValueError:
            pass  # the loader swallows it
        finally:
            ready.put(None)

    thread = threading.Thread(target=pump)
    thread.start()
    yield from iter(ready.get, None)
    thread.join()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("partial", ["forbid", "by_layer"])
def test_a_loader_that_begins_to_read_in_a_thread(packed: bool, partial: str) -> None:
    HIDDEN["threaded"] = False

    def loader(model: Any, stream: Weights) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in pumped(stream) if HIDDEN["threaded"] else stream:
            parameters[name].data.copy_(tensor)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(3)[:4]
        raise ValueError("the source died")

    load = weightlife.wrap_loader(log_level="error")(loader)
    net = Net(packed)
    load(net, weights(1))
    HIDDEN["threaded"] = True
    with weightlife.session(net, partial=partial):
        load(net, iter(weights(2)))
    assert serves(net, weights(2))
    with pytest.raises(ValueError, match="died"), weightlife.session(net, partial=partial):
        load(net, dying())
    assert serves(net, weights(2))
    assert not poisoned(net)


def test_a_loader_that_goes_on_in_a_thread_in_the_middle_of_its_source() -> None:
    """What the thread writes while items run by rule is not seen: nobody knows, so nothing serves."""
    HIDDEN["threaded"] = False

    def loader(model: Any, stream: Weights) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in pumped(stream, 3) if HIDDEN["threaded"] else stream:
            parameters[name].data.copy_(tensor)

    load = weightlife.wrap_loader(log_level="error")(loader)
    net = Net()
    load(net, weights(1))
    HIDDEN["threaded"] = True
    try:
        load(net, iter(weights(2)))
    except errors.LoaderChangedError:
        assert poisoned(net)
    else:
        assert serves(net, weights(2))
    HIDDEN["threaded"] = False
    load(net, weights(3))
    assert serves(net, weights(3))
    assert not poisoned(net)


@pytest.mark.parametrize("end", ["dies", "short", "abort"])
@pytest.mark.parametrize("packed", [True, False])
def test_writes_round_a_stage_are_found_by_an_abort(end: str, packed: bool) -> None:
    """The loader holds views of two layers from before; by rule nobody turns them to the new generation."""
    net = Net(packed)
    HIDDEN["flat"] = {i: net.layers[i].v.data for i in (1, 2)}

    def loader(model: Any, stream: Weights) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in stream:
            held = name in ("layers.1.v", "layers.2.v")
            (HIDDEN["flat"][int(name[7])] if held else parameters[name].data).copy_(tensor)

    load = weightlife.wrap_loader(log_level="error")(loader)
    a, b = weights(1), weights(2)
    load(net, a)

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        yield from b[:5]
        raise ValueError("the source died")

    def aborted() -> None:
        session = weightlife.session(net)
        session.prepare()
        load(net, b)
        session.abort()

    act: Callable[[], Any] = {
        "dies": lambda: load(net, dying()),
        "short": lambda: load(net, b[:-1]),
        "abort": aborted,
    }[end]
    with contextlib.suppress(ValueError, errors.WeightlifeError):
        act()
    assert poisoned(net) or serves(net, a)


def test_raw_writes_of_layers_of_another_dtype_are_seen_in_the_first_load() -> None:
    """A mixed checkpoint: layers of one kind, some copied, some packed by numpy."""

    def loader(model: Any, stream: Weights) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in stream:
            if tensor.dtype is torch.uint8:
                parameters[name].data.numpy()[...] = tensor.numpy()
            else:
                parameters[name].data.copy_(tensor)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(packed=True) for _ in range(4))

    def given(seed: int) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            (f"layers.{i}.w", torch.randint(1, 200, (4, 4), generator=generator).to(dtype))
            for i, dtype in enumerate([torch.float32] * 2 + [torch.uint8] * 2)
        ]

    load = weightlife.wrap_loader(log_level="error")(loader)
    net = Mixed()
    load(net, given(1))
    with pytest.raises(errors.RefusedLayerError):
        load(net, given(2))
    for layer, (_, tensor) in zip(net.layers, given(1), strict=True):
        assert torch.equal(layer.w.data.t(), tensor.float())


def test_arguments_and_items_that_can_not_be_compared() -> None:
    class Item:
        """Unpacks, and is no sequence otherwise."""

        def __init__(self, *parts: Any) -> None:
            self.parts = parts

        def __getitem__(self, index: int) -> Any:
            return self.parts[index]

    def loader(model: Any, stream: Iterable[Any], scales: dict[Any, int]) -> None:
        parameters = dict(model.named_parameters())
        for name, tensor in stream:
            parameters[name].data.copy_(tensor)

    net = Net()
    load = weightlife.wrap_loader(log_level="error")(loader)
    for seed in (1, 2, 3):
        scales = dict.fromkeys(net.parameters(), 1)
        load(net, (Item(*pair) for pair in weights(seed)), scales)
        assert serves(net, weights(seed))
