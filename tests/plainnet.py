# SPDX-License-Identifier: Apache-2.0
"""A plain net with a home-made quantised layer, under `wrap_loader`: what a user without any framework has.

All numbers are small integers and powers of two, so that equal weights give equal bits. What a test builds is closed
after it by the fixture `nets`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from weightlife._engine import lifecycle

WIDTH = 4
INPUT = torch.arange(1, WIDTH + 1, dtype=torch.float32)

Pairs = list[tuple[str, torch.Tensor]]


class Packed(nn.Module):
    """A weight that the hook folds its scale into, transposes and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.packed = nn.Parameter((self.weight * self.scale[:, None]).t().contiguous(), requires_grad=False)
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed + self.scale


class Bias(nn.Module):
    """A layer that processing leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.bias


class Net(nn.Module):
    """Two layers that are rebuilt and one that is not, side by side: none hides another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = Packed(), Packed(), Bias()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.a(x), self.b(x), self.n(x)])


def copy_all(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A loader as anybody writes it."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data.copy_(tensor)


load = weightlife.wrap_loader(copy_all)
push = weightlife.wrap_loader(chunked=True)(copy_all)


def checkpoint(seed: int) -> Pairs:
    """Six tensors of small integers; scales are powers of two."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(1, 90, shape, generator=generator).to(torch.float32)

    out: Pairs = []
    for layer in "ab":
        out += [(f"{layer}.weight", numbers(WIDTH, WIDTH)), (f"{layer}.scale", 2.0 ** (numbers(WIDTH) % 4))]
    return [*out, ("n.weight", numbers(WIDTH)), ("n.bias", numbers(WIDTH))]


A, B, C = checkpoint(1), checkpoint(2), checkpoint(3)


def cold(weights: Pairs) -> torch.Tensor:
    """What a net that was loaded without weightlife answers."""
    net = Net()
    copy_all(net, weights)
    net.a.process_weights_after_loading()
    net.b.process_weights_after_loading()
    return net(INPUT)


def serves(model: nn.Module) -> str:
    """Which checkpoint answers: A, B, C, or neither."""
    answer = model(INPUT)
    return next((n for n, w in (("A", A), ("B", B), ("C", C)) if torch.equal(answer, cold(w))), "neither")


def outcome(model: nn.Module) -> str:
    """How the last load ended."""
    report = weightlife.last_report(model)
    assert report is not None
    return report.outcome


def life_of(model: Any) -> lifecycle.Lifecycle:
    """The lifecycle of a net."""
    life = lifecycle.of(model)
    assert life is not None
    return life


def served(kind: type[nn.Module] = Net, weights: Pairs = A) -> Any:
    """A net after its first load."""
    net = kind()
    load(net, weights)
    return net


@pytest.fixture(autouse=True)
def nets() -> Iterator[None]:
    """Nothing that a test left open is open for the next one."""
    before = {id(life) for life in lifecycle.all_lifecycles()}
    yield
    for life in lifecycle.all_lifecycles():
        if id(life) not in before:
            life.abort()
            lifecycle.forget(life.model)
    if lifecycle.OpenSessions.count:
        gc.collect()  # a model that a test dropped may be in a cycle
    assert lifecycle.OpenSessions.count == 0
