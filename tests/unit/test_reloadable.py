# SPDX-License-Identifier: Apache-2.0
"""A loader that can't read a checkpoint again is heard of at the start, and refused before anything is touched."""

from __future__ import annotations

import logging
import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from tests.toyhost import Served
from weightlife import errors
from weightlife.hosts.vllm import reloadable, seams


class Reads:
    def get_all_weights(self) -> None: ...


class Once: ...


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's table of loaders, and how it makes one."""
    module: Any = types.ModuleType("vllm.model_executor.model_loader")
    module._LOAD_FORMAT_TO_MODEL_LOADER = {"auto": Reads, "tensorizer": Once}
    module.get_model_loader = lambda config: module._LOAD_FORMAT_TO_MODEL_LOADER[config.load_format]()
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm.model_executor"].model_loader = module  # type: ignore[attr-defined]


def served(load_format: str) -> Served:
    made = Served(("packed",))
    made.host.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))  # type: ignore[attr-defined]
    return made


def config(load_format: str) -> Any:
    return SimpleNamespace(load_format=load_format)


@pytest.mark.parametrize("load_format", ["auto", "unheard_of"])
def test_one_that_can_or_is_not_known_is_no_news(load_format: str) -> None:
    assert reloadable.no_path(config(load_format)) == ""
    reloadable.require_path(served(load_format).life)


def test_one_that_can_not_is_refused_with_a_way_out() -> None:
    with pytest.raises(errors.ReloadUnsupportedError, match=r"load_format=tensorizer \(Once\)") as caught:
        reloadable.require_path(served("tensorizer").life)
    assert isinstance(caught.value, NotImplementedError)
    assert "weights_iterator" in caught.value.hint


def test_an_object_may_have_what_its_class_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["vllm.model_executor.model_loader"]
    monkeypatch.setattr(module, "get_model_loader", lambda config: Reads())
    reloadable.require_path(served("tensorizer").life)


def test_other_hosts_have_no_such_loader() -> None:
    reloadable.require_path(Served(("packed",)).life)


def test_what_is_said_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    notes: list[str] = []
    first = SimpleNamespace(report=SimpleNamespace(notes=notes))
    life = served("tensorizer").life
    life.first = first  # type: ignore[assignment]
    try:
        with caplog.at_level(logging.INFO, "weightlife"):
            reloadable.say_no_path(life, config("tensorizer"))
            reloadable.say_no_path(life, config("auto"))
    finally:
        life.first = None
    (note,) = notes
    assert "a reload by path is not possible" in note
    assert "start the engine with a load_format that can" in note
    assert [record.levelno for record in caplog.records if note in record.getMessage()] == [logging.INFO]


@pytest.mark.parametrize(("load_format", "told"), [("tensorizer", True), ("auto", False)])
def test_a_level_2_sleep_says_what_brings_the_weights_back(load_format: str, told: bool) -> None:
    life = served(load_format).life
    seams.weights_sleep(life, 2)
    assert ("send all tensors" in life.poisoned) is told
