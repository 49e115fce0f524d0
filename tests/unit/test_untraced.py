# SPDX-License-Identifier: Apache-2.0
"""Compiled code under our modes: it runs as it is, its writes are seen, and no mode is ever compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from weightlife._engine import untraced
from weightlife._engine.lifecycle import Lifecycle
from weightlife._engine.operators import WriteObserver
from weightlife._engine.receive import Receiver
from weightlife._engine.untraced import UntracedMode
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost


@pytest.fixture
def compiled() -> Iterator[Any]:
    """A function that the compiler takes, and the codes that it compiled."""
    torch._dynamo.reset()
    met: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        met.append(graph.code)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False)
    def double(value: torch.Tensor) -> torch.Tensor:
        return (value * 2).sin()

    double.met = met
    yield double
    torch._dynamo.reset()


class Layer(nn.Module):
    """A layer whose hook runs compiled code on its weight, and whose loader may do so, too."""

    def __init__(self, double: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.double = double
        self.in_loader = False

    def load(self, value: torch.Tensor) -> None:
        """Write the weight."""
        self.weight.data.copy_(self.double(value) if self.in_loader else value)

    def process_weights_after_loading(self) -> None:
        """Make what a pass uses."""
        self.weight = nn.Parameter(self.double(self.weight.data), requires_grad=False)


class Model(nn.Module):
    """One layer."""

    def __init__(self, double: Any, in_loader: bool) -> None:
        super().__init__()
        self.layer = Layer(double)
        self.layer.in_loader = in_loader

    def load_weights(self, weights: Any) -> None:
        """The usual loop."""
        for _, value in weights:
            self.layer.load(value)


def _untouched(mode: type) -> bool:
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(mode.__torch_dispatch__.__code__)
    return not entries


@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_compiled_code_in_a_hook_and_in_a_loader(compiled: Any, in_loader: bool, reset: bool) -> None:
    """First load and two reloads are what the plain functions give; the receiver has no compiled code of its own."""
    compiled(torch.ones(4, 4))  # compiled, and warm, outside of any mode
    assert compiled.met
    model = Model(compiled, in_loader)
    life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))

    def expected(value: torch.Tensor) -> torch.Tensor:
        loaded = (value * 2).sin() if in_loader else value
        return (loaded * 2).sin()

    first = torch.randn(4, 4)
    life.load_weights(model.load_weights, [("layer.weight", first)])
    assert life.first is not None
    life.first.process(lambda: model.layer.process_weights_after_loading())
    assert torch.equal(model.layer.weight, expected(first))
    for _ in range(2):
        if reset:
            torch._dynamo.reset()
            compiled(torch.ones(4, 4))
        value = torch.randn(4, 4)
        with life.owned("test"):
            life.open("test", "update", True, "forbid")
        life.load_weights(model.load_weights, [("layer.weight", value)])
        life.finish("test")
        assert torch.equal(model.layer.weight, expected(value))
    assert not any("copy_" in code for code in compiled.met)
    assert _untouched(Receiver) and _untouched(WriteObserver)


def test_our_modes_do_without_the_wrapper_of_torch() -> None:
    """This torch can be told. Its own wrapper would add a fifth to each operation."""
    for mode in (Receiver, WriteObserver):
        assert mode.__torch_dispatch__.__module__ == mode.__module__
        assert not hasattr(mode.__torch_dispatch__, "__wrapped__")


def test_a_torch_that_cannot_be_told_keeps_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the call, or with another signature: the compiler is switched off for each call, as for any mode."""
    from torch._C._dynamo import eval_frame

    def refuses(*_: Any) -> None:
        raise TypeError

    for change in (
        lambda: monkeypatch.delattr(eval_frame, "set_code_exec_strategy"),
        lambda: monkeypatch.setattr(eval_frame, "set_code_exec_strategy", refuses, raising=False),
    ):
        change()

        class Mode(UntracedMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        assert not untraced.leave_alone(lambda: None)
        assert hasattr(Mode.__torch_dispatch__, "__wrapped__")
        with Mode():
            assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
