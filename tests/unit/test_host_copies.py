# SPDX-License-Identifier: Apache-2.0
"""Time of copies from the host to a device, on a machine that has none.

The meta device is one to which a copy from the host is legal: the operators that reach it are told apart by it. In
whole sessions the source's storages play the host's memory and everything else the device's, through `on_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.toyhost import Served, ToyHost, ToyModel, process_all, weights_of
from weightlife._engine import host_copies, lifecycle, trust
from weightlife._engine.host_copies import HostCopies
from weightlife._engine.lifecycle import Lifecycle
from weightlife._engine.receive import Receiver
from weightlife.config import Settings
from weightlife.report import LoadReport

LAYERS = ("dense",) * 4 + ("packed",) * 3


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    Served.close_all()


@pytest.fixture(name="ticks")
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second after the one before."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(host_copies, "perf_counter", lambda: float(next(seconds)))


@pytest.fixture(name="hosted")
def _hosted(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Storages that are in the host's memory; every other one is on a device."""
    hosted: set[int] = set()
    monkeypatch.setattr(host_copies, "on_host", lambda t: t.untyped_storage()._cdata in hosted)
    return hosted


def observed(act: Callable[[], Any]) -> float:
    """Seconds in copies to a device, of what is done under a receiver."""
    receiver = Receiver({}, lambda *_: None, lambda _: None)
    receiver.copies = HostCopies()
    with receiver:
        act()
    return receiver.copies.seconds


class TestOperators:
    HOST, DEVICE = torch.ones(4), torch.empty(4, device="meta")

    @pytest.mark.parametrize(
        "act",
        [
            lambda host, device: device.copy_(host),
            lambda host, device: device[:2].copy_(host[:2]),
            lambda host, device: device.copy_(host, non_blocking=True),
            lambda host, device: host.to("meta"),
            lambda host, device: host.to("meta", torch.bfloat16),
            lambda host, device: torch._foreach_copy_([device], [host]),
        ],
    )
    @pytest.mark.usefixtures("ticks")
    def test_that_cross(self, act: Callable[..., Any]) -> None:
        assert observed(lambda: act(self.HOST, self.DEVICE)) == 1.0

    @pytest.mark.parametrize(
        "act",
        [
            lambda host, device: host.clone().copy_(host),
            lambda host, device: host.to(torch.bfloat16),
            lambda host, device: device.copy_(torch.empty(4, device="meta")),
            lambda host, device: device.fill_(1.0),
            lambda host, device: device.to(torch.bfloat16),
            lambda host, device: device.add_(1.0),
        ],
    )
    @pytest.mark.usefixtures("ticks")
    def test_that_do_not(self, act: Callable[..., Any]) -> None:
        assert observed(lambda: act(self.HOST, self.DEVICE)) == 0.0

    def test_what_an_operator_raises_and_returns_is_its_own(self) -> None:
        device = torch.empty(4, device="meta")

        def act() -> None:
            assert device.copy_(self.HOST) is device
            with pytest.raises(NotImplementedError, match="no data"):
                torch.empty(4).copy_(device)

        assert observed(act) > 0.0


@pytest.mark.parametrize(("device", "timed"), [("cpu", False), ("meta", True)])
def test_a_model_in_the_hosts_memory_has_nothing_to_time(device: str, timed: bool) -> None:
    assert (HostCopies.of(nn.Linear(2, 2, device=device)) is not None) == timed
    assert HostCopies.of(nn.Module()) is None


def whole(report: LoadReport) -> bool:
    """Whether what time went into adds up to the phase that it is of."""
    spent = report.attributed
    (receiving,) = (phase.seconds for phase in report.phases if phase.name == "receive")
    parts = ("source", "host_to_device", "loaders", "between_calls")
    return sum(spent[part] for part in parts) == pytest.approx(receiving)


def send(served: Served, hosted: set[int], seed: int, of_a_device: int = 0) -> LoadReport:
    """One update, of which the first few tensors come from a device."""
    new = served.checkpoint(seed)
    hosted |= {value.untyped_storage()._cdata for value in list(new.values())[of_a_device:]}
    served.update(new)
    return served.life.reports[-1]


class TestSessions:
    @pytest.mark.parametrize("watch", ["all", "sampled"])
    def test_are_charged_for_what_came_from_the_host(
        self, watch: str, ticks: None, hosted: set[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By rule or observed: one copy a tensor, a second each, and none for tensors that were on the device."""
        taken: list[str] = []
        take = trust.Trust.fold
        monkeypatch.setattr(trust, "SAMPLE_ONE_IN", 10**9)
        monkeypatch.setattr(
            trust.Trust, "fold", lambda self: (taken.extend(map(str, self.pending)), take(self))[1]
        )
        served = Served(LAYERS, watch_writes=watch)
        report = send(served, hosted, 7)
        assert report.attributed["host_to_device"] == report.tensors_received == len(served.weights)
        assert (len(taken) > 0) == (watch == "sampled")
        hosted.clear()
        report = send(served, hosted, 8, of_a_device=3)
        assert report.attributed["host_to_device"] == len(served.weights) - 3

    @pytest.mark.parametrize("watch", ["all", "sampled"])
    def test_share_the_seconds_between_copies_and_the_rest(self, watch: str, hosted: set[int]) -> None:
        served = Served(LAYERS, watch_writes=watch)
        report = send(served, hosted, 7)
        assert report.attributed["host_to_device"] > 0.0
        assert report.attributed["loaders"] > 0.0
        assert whole(report)

    def test_on_the_host_have_none(self) -> None:
        served = Served(LAYERS)
        served.update(served.checkpoint(7))
        report = served.life.reports[-1]
        assert report.attributed["host_to_device"] == 0.0
        assert "host_to_device" not in str(report)
        assert whole(report)

    def test_of_first_loads_too(self, ticks: None, hosted: set[int]) -> None:
        model = ToyModel(LAYERS)
        life = Lifecycle(model, ToyHost(model), Settings())
        weights = weights_of(model, 1)
        hosted |= {value.untyped_storage()._cdata for value in weights.values()}
        life.load_weights(model.load_weights, iter(weights.items()))
        assert life.first is not None
        life.first.process(lambda: process_all(model))
        assert life.reports[-1].attributed["host_to_device"] == len(weights)
        lifecycle.forget(model)
