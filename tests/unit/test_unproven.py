# SPDX-License-Identifier: Apache-2.0
"""A version of the host that can't be enforced is observed, with one clear line; one that nobody tested is named."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weightlife
from tests.toyhost import Served
from weightlife import errors
from weightlife._engine import lifecycle
from weightlife.config import Settings
from weightlife.hosts import runtime
from weightlife.hosts.patching import Patcher, Seam
from weightlife.hosts.vllm import remote, seams, taking

HOST = "stubhost"


def passing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A host of one module with one function, of version 9.9."""
    host, module = types.ModuleType(HOST), types.ModuleType(f"{HOST}.loader")
    vars(host).update(__version__="9.9", __path__=[])
    vars(module)["load"] = lambda: "loaded"
    monkeypatch.setitem(sys.modules, HOST, host)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    yield module
    if runtime.installed():
        runtime.patcher().undo()
    runtime.set_runtime(None, None)


def use(*attributes: str, tested: tuple[str, ...] = (), required: bool = True, **settings: Any) -> None:
    table = [Seam(name, f"{HOST}.loader", name, passing, required, why="a test") for name in attributes]
    patcher = Patcher(table, HOST, tested)
    runtime.set_runtime(Settings(**settings), patcher)
    patcher.apply()


@pytest.mark.usefixtures("stub")
class TestMode:
    def test_all_there_is_enforced(self, caplog: pytest.LogCaptureFixture) -> None:
        use("load", tested=("9.9",))
        assert (runtime.mode(), runtime.unproven(decide=True)) == ("enforce", "")
        runtime.say_untested()
        assert caplog.records == []

    def test_a_required_seam_that_is_missing_is_one_line_and_observed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        use("load", "gone", tested=("9.8",))
        assert [runtime.mode() for _ in range(3)] == ["observe"] * 3
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        for part in ("only observes", "stubhost 9.9", "gone (absent in this version", "next: ", "9.8"):
            assert part in record.getMessage()
        status = weightlife.status()
        assert (status["mode"], status["mode_asked"]) == ("observe", "enforce")
        assert "gone" in status["mode_why"]
        assert (status["host"], status["host_tested"]) == ("stubhost 9.9", False)
        runtime.say_untested()  # it does not enforce: not a second line
        weightlife.observe()
        assert len(caplog.records) == 1
        weightlife.observe(on=False)  # asked again, told again
        assert [runtime.mode(), len(caplog.records)] == ["observe", 2]

    def test_an_optional_one_is_not_needed(self) -> None:
        use("load", "gone", required=False)
        assert runtime.mode() == "enforce"

    def test_who_asked_to_observe_is_not_told(self, caplog: pytest.LogCaptureFixture) -> None:
        use("gone", mode="observe")
        assert runtime.mode() == "observe"
        assert "gone" in runtime.unproven()
        assert caplog.records == []

    def test_it_ends_with_the_installation(self) -> None:
        use("gone")
        assert runtime.mode() == "observe"
        runtime.set_runtime(None, None)
        assert runtime.unproven(decide=True) == ""

    def test_what_is_nowhere_to_be_imported_is_missing_when_a_model_is_built(self) -> None:
        patcher = Patcher([Seam("far", f"{HOST}.absent.deep", "f", passing, True)], HOST)
        runtime.set_runtime(Settings(), patcher)
        patcher.apply()
        assert runtime.mode() == "enforce"
        assert "module absent in this version: stubhost.absent.deep" in runtime.unproven(decide=True)
        assert runtime.mode() == "observe"

    def test_an_untested_version_is_enforced_and_named_once(self, caplog: pytest.LogCaptureFixture) -> None:
        use("load", tested=("9.8",))
        runtime.say_untested()
        runtime.say_untested()
        assert runtime.mode() == "enforce"
        (record,) = caplog.records
        assert "enforces on stubhost 9.9" in record.getMessage()

    def test_a_handler_that_raises_does_not_end_the_hosts_start(self) -> None:
        class Broken(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                raise RuntimeError("no log here")

        handler = Broken()
        logging.getLogger("weightlife").addHandler(handler)
        try:
            use("gone")
            assert runtime.mode() == "observe"
        finally:
            logging.getLogger("weightlife").removeHandler(handler)


class TestModels:
    """What the wrappers of vLLM do with models in such a process."""

    def test_one_built_under_it_is_only_observed(self) -> None:
        weightlife.install()
        runtime.degrade("this version lacks a seam")
        model = torch.nn.Linear(2, 2)
        taking.watch(model, SimpleNamespace(), None, passing, passing)
        life = lifecycle.of(model)
        assert life is not None
        assert (life.status, life.observed) == ("observed", "this version lacks a seam")
        seams.reload_weights(lambda: "host", SimpleNamespace(get_model=lambda: model), (), {})
        (report,) = life.reports
        assert report.outcome == "observed"
        assert report.notes == ["the host's own path: this version lacks a seam"]

    def test_a_version_that_reads_otherwise_is_observed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its configuration has another form: nothing is raised into the host."""
        weightlife.install()
        monkeypatch.setattr(runtime, "is_tested", lambda: False)
        model = torch.nn.Linear(2, 2)
        taking.watch(model, SimpleNamespace(), None, passing, passing)
        life = lifecycle.of(model)
        assert life is not None
        assert "can't read a model of vllm" in str(life.observed)
        assert "load_config" in str(life.observed)
        assert runtime.mode() == "observe"

    def test_in_a_tested_version_that_is_a_fault_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weightlife.install()
        monkeypatch.setattr(runtime, "is_tested", lambda: True)
        with pytest.raises(AttributeError, match="load_config"):
            taking.watch(torch.nn.Linear(2, 2), SimpleNamespace(), None, passing, passing)

    def test_one_that_could_not_be_seen_when_it_was_built(self) -> None:
        weightlife.install()
        model = torch.nn.Linear(2, 2)
        seams.load_model(lambda *_: model, None, (SimpleNamespace(), None), {})
        assert lifecycle.of(model) is None  # a model of somebody's: nothing is wrong with this version
        runtime.degrade("initialize_model is missing")
        seams.load_model(lambda *_: model, None, (SimpleNamespace(), None), {})
        life = lifecycle.of(model)
        assert life is not None
        assert life.observed == "initialize_model is missing"

    def test_a_seam_that_is_found_missing_late_ends_nothing_half_way(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The model was loaded under enforcement, and an update is open: that one ends as it began."""
        weightlife.install()
        served = Served(("packed", "dense"))
        life = served.life
        session = served.open()
        runtime.degrade("found when it was imported")
        assert seams._ready(served.model) is life
        served.send(served.checkpoint(1))
        life.finish("test")
        assert life.reports[-1].outcome == "committed"
        assert life.session is None
        assert session.report is life.reports[-1]
        assert seams._ready(served.model) is None
        out = seams.reload_weights(lambda: "host", SimpleNamespace(get_model=lambda: served.model), (), {})
        assert out == "host"
        assert life.reports[-1].outcome == "observed"
        assert life.reports[-1].notes == ["the host's own path: found when it was imported"]
        assert caplog.text.count("only observes") == 1

    def test_a_model_that_must_not_serve_is_healed_first(self) -> None:
        weightlife.install()
        served = Served(("packed",))
        served.life.poison("an update failed half way")
        runtime.degrade("late")
        assert seams._ready(served.model) is served.life
        served.update(served.checkpoint(1))
        assert not served.life.poisoned
        assert seams._ready(served.model) is None

    def test_plain_modules_need_nothing_of_the_host(self) -> None:
        weightlife.install()
        served = Served(("packed",))
        assert served.life.host.name != "vllm"
        runtime.degrade("a seam of vLLM is missing")
        assert runtime.mode_for(served.life) == "enforce"
        assert runtime.mode_for(SimpleNamespace(host=SimpleNamespace(name="vllm"))) == "observe"


class Engine:
    def __init__(self, *unproven: str) -> None:
        self.unproven, self.asked = unproven, []

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        self.asked.append(args)
        digest = runtime.settings().digest()
        return [
            {"weightlife": weightlife.__version__, "digest": digest, "rank": rank, "unproven": why}
            for rank, why in enumerate(self.unproven)
        ]


class TestHandshake:
    def test_a_worker_that_only_observes_is_heard_of_and_all_ranks_do(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        weightlife.install()
        engine = Engine("", "vllm 9.9 lacks execute_model")
        remote.shake_hands(engine, "warn")
        (record,) = caplog.records
        assert "rank 1 only observes: vllm 9.9 lacks execute_model" in record.getMessage()
        assert runtime.mode() == "observe"
        question, payload = engine.asked[1]
        assert question == "observe"
        assert "rank 1" in payload["why"]
        remote.shake_hands(engine, "warn")
        assert len(caplog.records) == 1

    def test_a_worker_is_told(self) -> None:
        weightlife.install()
        worker = SimpleNamespace(rank=0)
        assert remote.answer(worker, "hello")["unproven"] == ""
        remote.answer(worker, "observe", {"why": "rank 1 only observes"})
        assert runtime.mode() == "observe"
        assert remote.answer(worker, "hello")["unproven"] == "rank 1 only observes"

    def test_where_all_do_nobody_needs_to_be_told(self) -> None:
        weightlife.install()
        engine = Engine("a", "a")
        remote.shake_hands(engine, "warn")
        assert len(engine.asked) == 1

    def test_strict_raises(self) -> None:
        weightlife.install(handshake="strict")
        with pytest.raises(errors.HandshakeError, match="only observes"):
            remote.shake_hands(Engine("lacks a seam"), "strict")

    def test_who_asked_to_observe_is_content(self) -> None:
        weightlife.install(mode="observe", handshake="strict")
        remote.shake_hands(Engine("lacks a seam"), "strict")
