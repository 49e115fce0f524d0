# SPDX-License-Identifier: Apache-2.0
"""`testing.layers.prove` is not fooled by state that outlives a layer, however it is keyed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from weightlife.testing.layers import prove

PACKED: dict[Any, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    yield
    PACKED.clear()


class Remembering(nn.Module):
    """Packs once a process and key."""

    key: Callable[[Remembering], Any]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.packed = PACKED.setdefault(type(self).key(self), self.weight.data.t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.packed


class ByIdentity(Remembering):
    key = id


class ByName(Remembering):
    key = staticmethod(lambda layer: "packed")


def load(model: nn.Module, weights: Any) -> None:
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


def show(layer: type[nn.Module], scale: float = 2.0) -> None:
    """Prove `layer` with an identity and a multiple of it."""
    a = torch.eye(4)
    prove(layer, load, {"weight": a}, {"weight": scale * a}, lambda model: model(torch.ones(1, 4)))


# A dead instance's address is given to the next one, as it happens: many tries, so that luck shows.
def test_a_cache_by_instance_is_found_each_time() -> None:
    for _ in range(20):
        PACKED.clear()
        with pytest.raises(AssertionError, match=r"update to B: .*WL305.* first packed"):
            show(ByIdentity)


def test_entries_of_dead_instances_do_not_hide_it() -> None:
    for _ in range(20):
        with pytest.raises(AssertionError):
            show(ByIdentity)


def test_a_layer_that_draws_numbers_is_told() -> None:
    class Drawing(Remembering):
        def process_weights_after_loading(self) -> None:
            self.packed = self.weight.data + len(PACKED)
            PACKED[len(PACKED)] = self.packed

    with pytest.raises(AssertionError, match="two cold loads of B differ"):
        show(Drawing)


def test_a_cache_by_name_spoils_the_cold_loads_and_is_told() -> None:
    with pytest.raises(AssertionError, match="cold loads of A and B give the same result"):
        show(ByName)


def test_weights_that_make_no_difference_prove_nothing() -> None:
    class Plain(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, bias=False)

    show(Plain)
    with pytest.raises(AssertionError, match="cold loads of A and B give the same result"):
        show(Plain, scale=1.0)
