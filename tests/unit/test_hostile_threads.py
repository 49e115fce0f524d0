# SPDX-License-Identifier: Apache-2.0
"""Passes, loads and aborts of several threads on one plain net, and sessions whose owner is gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weightlife
from tests.plainnet import INPUT, A, B, C, Net, life_of, load, nets, outcome, push, served, serves
from weightlife import errors
from weightlife._engine import lifecycle

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["nets"]

WAIT = 20.0


class Gated(Net):
    """A pass that stops in its middle while a gate is set: (arrived, may go on)."""

    gate: tuple[threading.Event, threading.Event] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, gate = self.a(x), Gated.gate
        if gate is not None:
            gate[0].set()
            assert gate[1].wait(WAIT)
        return torch.cat([first, self.b(x), self.n(x)])


class Running:
    """A call in another thread; `join` gives its result or raises its exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.call = call
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:  # noqa: BLE001 - raised by join
            self.error = error

    def join(self) -> Any:
        self.thread.join(WAIT)
        assert not self.thread.is_alive(), "it hangs"
        if self.error is not None:
            raise self.error
        return self.result


def stopped_pass(net: Any) -> tuple[Running, threading.Event]:
    """A pass that stands in its middle, and what lets it go on. Later passes don't stop."""
    gate = Gated.gate = (threading.Event(), threading.Event())
    running = Running(lambda: serves(net))
    assert gate[0].wait(WAIT)
    Gated.gate = None
    return running, gate[1]


def slow(weights: Any, after: int = 1) -> tuple[Iterator[Any], threading.Event, threading.Event]:
    """A source that stops after some items: the iterator, "it stands", and what lets it go on."""
    stands, go = threading.Event(), threading.Event()

    def source() -> Iterator[Any]:
        yield from weights[:after]
        stands.set()
        assert go.wait(WAIT)
        yield from weights[after:]

    return source(), stands, go


class TestPassesAndLoads:
    def test_a_load_waits_for_the_pass_that_began_before_it(self) -> None:
        """Else one pass would see the first layer of A and the last of B."""
        net = served(Gated)
        passing, go = stopped_pass(net)
        loading = Running(lambda: load(net, B))
        loading.thread.join(0.2)
        assert loading.thread.is_alive()
        go.set()
        assert passing.join() == "A"
        loading.join()
        assert serves(net) == "B"

    def test_so_does_a_chunk(self) -> None:
        net = served(Gated)
        passing, go = stopped_pass(net)
        pushing = Running(lambda: push(net, B[:2]))
        go.set()
        assert passing.join() == "A"
        pushing.join()
        push(net, B[2:])
        assert serves(net) == "B"

    def test_a_chunk_that_meets_a_pass_on_a_is_written_to_b(self) -> None:
        net = served(Gated)
        with weightlife.session(net):
            push(net, B[:2])
            passing, go = stopped_pass(net)
            pushing = Running(lambda: push(net, B[2:]))
            go.set()
            assert passing.join() == "A"
            pushing.join()
        assert serves(net) == "B"

    def test_passes_of_two_threads_leave_in_their_own_order(self) -> None:
        """Each takes down what it put up itself: the last that leaves must not show the wrong generation."""
        net = served(Gated)
        first, go = stopped_pass(net)
        opening = Running(lambda: weightlife.session(net).prepare())
        second = Running(lambda: serves(net))
        go.set()
        assert first.join() == "A"
        handle = opening.join()
        assert second.join() == "A"
        push(net, B[:2])
        assert Running(lambda: serves(net)).join() == "A"
        push(net, B[2:])
        handle.finish()
        assert Running(lambda: serves(net)).join() == "B"

    def test_a_pass_that_raises_leaves_no_lock(self) -> None:
        class Raises(Net):
            fails = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Raises.fails:
                    raise KeyboardInterrupt
                return super().forward(x)

        net = served(Raises)
        Raises.fails = True
        with pytest.raises(KeyboardInterrupt):
            net(INPUT)
        Raises.fails = False
        Running(lambda: load(net, B)).join()
        assert serves(net) == "B"

    def test_a_load_from_inside_a_pass_is_refused_and_does_not_hang(self) -> None:
        class Loads(Net):
            again = False

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if Loads.again:
                    Loads.again = False
                    load(self, B)
                return super().forward(x)

        net = served(Loads)
        Loads.again = True
        with pytest.raises(errors.SessionConflictError, match="inside a pass"):
            net(INPUT)
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"


class TestAbortFromElsewhere:
    @pytest.mark.parametrize("how", ["handle", "weightlife.abort"])
    def test_it_is_refused_while_a_call_is_inside_and_the_call_goes_on(self, how: str) -> None:
        net = served()
        handle = weightlife.session(net).prepare()
        source, stands, go = slow(B)
        pushing = Running(lambda: push(net, source))
        assert stands.wait(WAIT)
        with pytest.raises(errors.SessionConflictError, match="load_weights in thread"):
            handle.abort() if how == "handle" else weightlife.abort(net)
        go.set()
        pushing.join()
        handle.finish()
        assert (serves(net), outcome(net)) == ("B", "committed")

    def test_between_two_calls_it_ends_the_update(self) -> None:
        net = served()

        def update() -> None:
            with weightlife.session(net):
                push(net, B[:3])
                assert Running(lambda: weightlife.abort(net, "the trainer died")).join() is True
                assert weightlife.abort(net) is False
                push(net, B[3:])

        with pytest.raises(errors.SessionStateError, match="aborted on request: the trainer died"):
            update()
        assert serves(net) == "A"
        load(net, B)
        assert serves(net) == "B"

    def test_the_report_says_so(self) -> None:
        net = served()
        push(net, B[:3])
        assert weightlife.abort(net, "\x1b[2Jwhy") is True
        report = weightlife.last_report(net)
        assert report is not None
        assert report.outcome == "aborted"
        assert "aborted on request" in (report.error or "")
        assert "\x1b" not in report.summary_line()
        assert serves(net) == "A"

    def test_of_a_model_that_is_not_watched(self) -> None:
        with pytest.raises(errors.NotInstalledError):
            weightlife.abort(Net())
        with pytest.raises(errors.HostError):
            weightlife.abort(object())

    def test_of_an_engine_every_rank_is_asked(self) -> None:
        asked = []

        class Engine:
            def collective_rpc(self, method: str, args: Any) -> list[bool]:
                asked.append((method, args))
                return [False, True]

        assert weightlife.abort(Engine(), "why") is True
        assert asked == [("_weightlife_rpc", ("abort", {"reason": "why"}))]

    def test_a_worker_answers_and_knows_that_no_update_runs(self) -> None:
        from types import SimpleNamespace

        from weightlife.hosts.vllm import remote

        net = served()
        push(net, B[:3])
        reset = []
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(get_model=lambda: net),
            _weight_update_active=True,
            weight_transfer_engine=SimpleNamespace(reset_weight_update_target=lambda: reset.append(1)),
        )
        assert remote.answer(worker, "abort", {"reason": "why"}) is True
        assert worker._weight_update_active is False
        assert reset == [1]
        assert remote.answer(worker, "abort") is False
        assert serves(net) == "A"


class TestLostOwners:
    def test_a_lost_handle_does_not_close_the_model_for_ever(self) -> None:
        net = served()
        weightlife.session(net).prepare()
        gc.collect()
        weightlife.session(net).abort()  # another handle: not its session
        with pytest.raises(errors.SessionConflictError):
            weightlife.session(net).prepare()
        assert weightlife.abort(net) is True
        load(net, B)
        assert serves(net) == "B"

    def test_a_handle_is_good_for_one_update(self) -> None:
        net = served()
        handle = weightlife.session(net, partial="forbid")
        with handle:
            push(net, B)
        with pytest.raises(errors.SessionStateError), handle:
            push(net, A[:3])
        assert life_of(net).session is None
        assert serves(net) == "B"

    def test_a_model_that_is_dropped_in_the_middle_of_an_update_does_not_count_any_more(self) -> None:
        net = served()
        weightlife.session(net).prepare()
        assert lifecycle.OpenSessions.count == 1
        del net
        gc.collect()
        assert lifecycle.OpenSessions.count == 0

    def test_nor_does_one_that_is_poisoned(self) -> None:
        net = served()
        life_of(net).poison("a test")
        assert lifecycle.OpenSessions.count == 1
        del net
        gc.collect()
        assert lifecycle.OpenSessions.count == 0

    def test_sessions_hand_over_between_threads(self) -> None:
        net = served()
        handle = Running(lambda: weightlife.session(net).prepare()).join()
        for chunk in (C[:2], C[2:]):
            Running(lambda chunk=chunk: push(net, chunk)).join()
        Running(handle.finish).join()
        assert serves(net) == "C"


def test_passes_of_many_threads_while_garbage_is_collected_do_not_stop_the_process() -> None:
    """A waiting thread once looked at the frames of the one that has the turn: it hung, or met freed ones."""
    script = """
import gc, sys, threading, time
sys.setswitchinterval(1e-5)
gc.set_threshold(30, 2, 2)
import torch
from tests import plainnet
net = plainnet.served()
end = time.monotonic() + 3

class Ring:
    def __init__(self):
        self.me, self.tensor = self, torch.zeros(2)

def serve():
    while time.monotonic() < end:
        net(plainnet.INPUT)
        [Ring() for _ in range(20)]

threads = [threading.Thread(target=serve) for _ in range(4)]
[thread.start() for thread in threads]
count = 0
while time.monotonic() < end:
    plainnet.load(net, plainnet.B if count % 2 == 0 else plainnet.A)
    count += 1
[thread.join() for thread in threads]
print("updates", count)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 1
