# SPDX-License-Identifier: Apache-2.0
"""Copies on a side stream, ordered against a stand-in for streams that does nothing before it has to.

An operation of a stand-in stream runs when somebody waits for it, and only then: whoever reads the model's memory
without having waited sees old values, as on a device that is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.toyhost import KINDS, Boom, Served, Snapshot, cold, faults
from weightlife import errors
from weightlife._engine import overlap
from weightlife.kernels import backends

LEAN: dict[str, Any] = {"isolation": "in_place", "storage": "pinned"}
EVERYTHING = (*sorted(KINDS), ("packed", "tied"))


class Stream:
    """A queue of work. `main` is where everything else of this process happens, so it is never behind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: list[Callable[[], object]] = []
        self.after: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other.name)
        if self.name == "main":
            other.drain()
        else:
            assert not other.work, "the main stream's work is done at once here"

    def drain(self) -> None:
        while self.work:
            self.work.pop(0)()


class Device:
    """Streams for CPU tensors, and what was asked of them."""

    def __init__(self) -> None:
        self.main = Stream("main")
        self.made: list[Stream] = []
        self.stack = [self.main]
        self.recorded: list[tuple[int, str]] = []

    def new(self, device: torch.device) -> Stream:
        self.made.append(Stream("side"))
        return self.made[-1]

    def current(self, device: torch.device) -> Stream:
        return self.stack[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.recorded.append((tensor.data_ptr(), stream.name))

    @property
    def waiting(self) -> int:
        return sum(len(stream.work) for stream in self.made)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """CPU memory has streams, and what is copied while one of them is current is copied later."""
    found = Device()
    monkeypatch.setitem(overlap._KINDS, "cpu", found)
    real = backends.copy_pairs

    def copy_pairs(pairs: Any, backend: str = "auto") -> Any:
        stream = found.current(torch.device("cpu"))
        if stream is found.main:
            return real(pairs, backend)
        stream.work.append(lambda: real(pairs, backend))
        return None

    monkeypatch.setattr(backends, "copy_pairs", copy_pairs)
    yield found
    faults.clear()
    Served.close_all()


def test_a_layer_is_copied_while_the_next_one_comes(device: Device) -> None:
    served = Served(("packed", "packed"), **LEAN)
    weights = served.checkpoint(1)
    packed = served.model.get_submodule("body.inner.0").quant_method.kernel.packed
    a, address = packed.clone(), packed.data_ptr()
    served.open()
    items = list(weights.items())
    served.send([items[0]])
    assert (device.waiting, device.made[0].after) == (1, ["main"])
    assert torch.equal(packed, a), "nothing waited, so nothing was copied"
    assert (address, "side") in device.recorded
    served.send(items[1:])
    assert device.waiting > 1
    served.finish()
    assert device.waiting == 0
    assert device.main.after == ["side"]
    served.weights = dict(weights)
    assert torch.equal(served.run(), served.expected())
    assert torch.equal(
        packed, cold(("packed", "packed"), weights).get_submodule("body.inner.0").quant_method.kernel.packed
    )


@pytest.mark.parametrize("budget", [None, 0])
def test_every_kind_is_exact_there_and_back(device: Device, budget: int | None) -> None:
    served = Served(EVERYTHING, **LEAN, undo_budget_bytes=budget)
    first = dict(served.weights)
    for weights in (served.checkpoint(1), first, served.checkpoint(2)):
        served.update(weights)
        assert device.waiting == 0
        assert torch.equal(served.run(), served.expected())
    assert device.recorded


def test_both_ends_of_every_copy_are_kept_until_it_is_done(device: Device) -> None:
    pairs = [(torch.zeros(5), torch.arange(5.0)), (torch.zeros(3)[1:], torch.ones(2))]
    copies = overlap.SideCopies(backends.copy_pairs)
    copies(pairs)
    assert sorted(device.recorded) == sorted((t.data_ptr(), "side") for pair in pairs for t in pair)
    copies.join()
    assert all(torch.equal(a, b) for a, b in pairs)
    copies(pairs)
    assert len(device.made) == 1, "one stream a session"


def test_a_copy_that_raises_is_recorded_and_waited_for(device: Device) -> None:
    done: list[str] = []

    def copy(pairs: Any) -> None:
        device.current(torch.device("cpu")).work.append(lambda: done.append("the first half"))
        raise Boom("the second half")

    copies = overlap.SideCopies(copy)
    pairs = [(torch.zeros(1), torch.ones(1))]
    with pytest.raises(Boom):
        copies(pairs)
    assert device.stack == [device.main]
    assert len(device.recorded) == 2
    copies.join()
    assert done == ["the first half"]


@pytest.mark.parametrize("fault", ["hook", "missing"])
def test_an_abort_waits_before_it_undoes(device: Device, fault: str) -> None:
    """Else a copy that is still under way lands on the old weights that the undo log brought back."""
    served = Served(("packed", "packed", "scaled", "dense"), **LEAN)
    a = Snapshot(served.model)
    weights = served.checkpoint(1)
    served.open()
    served.send(list(weights.items())[:1])
    assert device.waiting == 1
    rest = list(weights.items())[1:] if fault == "hook" else []
    if fault == "hook":
        faults.arm("hook", 0)
    with pytest.raises((Boom, errors.MissingTensorError)):
        served.send(rest), served.finish()
    assert device.waiting == 0
    assert a.differences(Snapshot(served.model)) == []
    faults.clear()
    served.update(served.checkpoint(2))
    assert torch.equal(served.run(), served.expected())


def test_without_undo_a_failure_poisons_and_the_next_update_heals(device: Device) -> None:
    served = Served(("packed", "scaled"), **LEAN, undo_budget_bytes=0)
    faults.arm("hook", 1)
    with pytest.raises(Boom):
        served.update(served.checkpoint(1))
    assert served.life.poisoned
    assert device.waiting == 0
    faults.clear()
    served.update(served.checkpoint(2))
    assert torch.equal(served.run(), served.expected())


def test_a_cpu_has_no_streams() -> None:
    assert "cpu" not in overlap._KINDS
    to, of = torch.zeros(3), torch.ones(3)
    copies = overlap.SideCopies(backends.copy_pairs)
    copies([(to, of)])
    assert torch.equal(to, of)
    assert copies.streams == {}
    copies.join()


def test_staged_updates_and_late_layers_use_no_side_stream(device: Device) -> None:
    for settings in ({}, {**LEAN, "processing": "at_finish"}):
        served = Served(EVERYTHING, **settings)
        served.update(served.checkpoint(1))
        assert device.made == []
        assert torch.equal(served.run(), served.expected())
