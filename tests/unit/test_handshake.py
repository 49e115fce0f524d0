# SPDX-License-Identifier: Apache-2.0
"""Workers that run something else, or nothing, are heard of; so is an install that comes too late."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import weightlife
from weightlife import errors
from weightlife._version import __version__
from weightlife.config import Settings
from weightlife.hosts import runtime
from weightlife.hosts.vllm import remote, seams


class Engine:
    """What a front end asks: each answer is one rank's, or an exception."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = answers, []

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        self.asked.append((method, args))
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
        return list(self.answers)


def hello(rank: int, version: str = __version__, **settings: Any) -> dict[str, Any]:
    wanted = Settings(**settings) if settings else runtime.settings()
    return {"weightlife": version, "digest": wanted.digest(), "rank": rank}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WEIGHTLIFE", "WEIGHTLIFE_HANDSHAKE", "WEIGHTLIFE_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    weightlife.install()
    yield
    weightlife.uninstall()


WRONG = {
    "other settings": lambda: [hello(0), hello(1, storage="adopted")],
    "another version": lambda: [hello(0), hello(1, "0.0.1")],
    "no weightlife": lambda: [NotImplementedError("Method '_weightlife_rpc' is not implemented.")],
    "no weightlife, as text": lambda: [RuntimeError("Worker has no attribute '_weightlife_rpc'")],
}


class TestWorkers:
    @pytest.mark.parametrize("wrong", WRONG)
    def test_strict_raises(self, wrong: str) -> None:
        with pytest.raises(errors.HandshakeError):
            remote.shake_hands(Engine(*WRONG[wrong]()), "strict")

    @pytest.mark.parametrize("wrong", WRONG)
    def test_warn_is_one_error_line(self, wrong: str, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level("ERROR", "weightlife"):
            remote.shake_hands(Engine(*WRONG[wrong]()), "warn")
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "WL013" in record.getMessage()

    def test_the_rank_that_differs_is_named(self) -> None:
        with pytest.raises(errors.HandshakeError, match="rank 1 runs"):
            remote.shake_hands(Engine(*WRONG["other settings"]()), "strict")

    def test_off_asks_nobody_and_good_ones_are_no_news(self, caplog: pytest.LogCaptureFixture) -> None:
        silent = Engine(*WRONG["no weightlife"]())
        remote.shake_hands(silent, "off")
        assert silent.asked == []
        good = Engine(hello(0), hello(1))
        remote.shake_hands(good, "strict")
        assert len(good.asked) == 1
        assert caplog.records == []

    def test_an_error_of_the_engine_is_its_own(self) -> None:
        with pytest.raises(RuntimeError, match="dead"):
            remote.shake_hands(Engine(RuntimeError("engine is dead")), "strict")

    def test_they_are_asked_when_an_engine_stands(self) -> None:
        engine = Engine(*WRONG["other settings"]())
        weightlife.install(handshake="strict")
        made: list[str] = []
        with pytest.raises(errors.HandshakeError):
            seams.after_engine(lambda: made.append("made"), engine, (), {})
        assert made == ["made"]


class TestTooLate:
    TEXT = "after an engine was built"

    def test_an_engine_in_this_process(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        import sys

        name = "vllm.distributed.parallel_state"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(_WORLD=None))
        weightlife.install()
        assert self.TEXT not in caplog.text
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(_WORLD=object()))
        weightlife.install()
        assert self.TEXT in caplog.text

    @pytest.mark.parametrize(
        ("name", "told"), [("EngineCore", True), ("VllmWorker-1", True), ("Other", False)]
    )
    def test_an_engine_in_a_child(
        self, name: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(name=name)])
        weightlife.install()
        assert (self.TEXT in caplog.text) is told
