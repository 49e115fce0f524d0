# SPDX-License-Identifier: Apache-2.0
"""In place on a CUDA device: a layer's copy runs beside the current stream, and what serves is exact.

`python -m pytest -m gpu tests/gpu`. No other target collects this folder; the order of streams, with a stand-in for
them, is in `tests/unit/test_overlap.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import weightlife
from weightlife._engine import lifecycle, overlap
from weightlife.kernels import backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
WIDTH, LAYERS = 2048, 12


class Packed(nn.Module):
    """A weight that is transposed after the load, 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, device=CUDA), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        self.weight = nn.Parameter(self.weight.data.t().contiguous(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers])


@weightlife.wrap_loader
def load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data.copy_(tensor)


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (WIDTH, WIDTH)
    return {
        f"layers.{i}.weight": torch.randint(-8, 9, shape, generator=generator).float() for i in range(LAYERS)
    }


def served() -> tuple[Any, Any]:
    """A watched model after its first load, and its lifecycle."""
    model: Any = Model()
    weightlife.watch(model, isolation="in_place", storage="pinned", undo_budget_bytes=0)
    load(model, iter(checkpoint(0).items()))
    return model, lifecycle.of(model)


def test_a_copy_does_not_wait_for_the_current_stream_and_the_current_stream_waits_at_join() -> None:
    to = [torch.zeros(16 << 20, device=CUDA) for _ in range(4)]
    of = [torch.full_like(item, 3.0) for item in to]
    pairs = list(zip(to, of, strict=True))
    copies = overlap.SideCopies(backends.copy_pairs)
    copies(pairs)  # compiles
    copies.join()
    torch.cuda.synchronize()
    for item in to:
        item.zero_()
    torch.cuda.synchronize()
    copies(pairs)
    done, busy = torch.cuda.Event(), torch.cuda.Event()
    done.record(copies.streams[CUDA])
    torch.cuda._sleep(2_000_000_000)  # about a second of the current stream
    busy.record()
    done.synchronize()
    assert not busy.query(), "the copy waited for what the current stream was told after it"
    copies.join()
    assert all(bool((item == 3.0).all()) for item in to)


def test_memory_that_is_let_go_is_not_given_away_before_it_was_copied() -> None:
    to = torch.zeros(64 << 20, device=CUDA)
    of = torch.full_like(to, 5.0)
    copies = overlap.SideCopies(backends.copy_pairs)
    copies([(to, of)])
    copies.join()
    torch.cuda.synchronize()
    with torch.cuda.stream(copies.streams[CUDA]):
        torch.cuda._sleep(2_000_000_000)  # the copy comes late
    copies([(to.zero_(), of)])
    del of
    grabbed = [torch.full((64 << 20,), 9.0, device=CUDA) for _ in range(2)]
    copies.join()
    assert bool((to == 5.0).all())
    assert grabbed


def test_updates_in_place_are_exact_and_copy_beside() -> None:
    model, life = served()
    x = torch.eye(WIDTH, device=CUDA)[:64]
    addresses = [layer.weight.data_ptr() for layer in model.layers]
    for seed in (1, 2, 1):
        weights = checkpoint(seed)
        with weightlife.session(model):
            load(model, ((name, tensor.pin_memory()) for name, tensor in weights.items()))
            copies = life.session.side_copies
        assert CUDA in copies.streams
        want = torch.stack([x @ tensor.to(CUDA).t().contiguous() for tensor in weights.values()])
        assert torch.equal(model(x), want)
        assert [layer.weight.data_ptr() for layer in model.layers] == addresses
        assert {phase.name: phase.calls for phase in life.reports[-1].phases}["process_early"] == LAYERS
