# SPDX-License-Identifier: Apache-2.0
"""`weightlife verify` around an engine that stands in for vLLM's: arguments, exit codes, output."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import weightlife
from tests import plainnet
from tests.plainnet import nets
from weightlife import errors
from weightlife.cli import app as commands
from weightlife.hosts.vllm import start

__all__ = ["nets"]

Call = Callable[..., int]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for name, weights in (("a", plainnet.A), ("b", plainnet.B)):
        (tmp_path / name).mkdir()
        save_file(dict(weights), tmp_path / name / "model.safetensors")
    return {name: tmp_path / name for name in "ab"}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """Run the command line with an engine that is a plain net on checkpoint A."""
    started: list[tuple[str, dict[str, Any]]] = []

    def engine(model: str, **arguments: Any) -> Any:
        started.append((model, arguments))
        return plainnet.served()

    def run(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["weightlife", "verify", *map(str, words)])
        return commands.run()

    monkeypatch.setattr(start, "start", engine)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    run.started = started  # type: ignore[attr-defined]
    yield run
    weightlife.uninstall()


def test_equal_is_0(call: Any, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(folders["a"], "--engine", "dtype=bfloat16", "--engine", "max_num_seqs=4") == 0
    out = capsys.readouterr().out
    assert "equal to a cold load" in out and "6 tensors" in out
    assert call.started == [(str(folders["a"]), {"dtype": "bfloat16", "max_num_seqs": 4})]


def test_another_model_is_1_with_json(
    call: Any, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [folders["b"], "--model", folders["a"], "--layers", "0.5", "--seed", "3", "--json"]
    assert call(*words) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["schema_version"], said["ok"], said["exit_code"]) == (1, False, 1)
    assert said["ranks"][0]["seed"] == 3 and said["ranks"][0]["differences"]
    assert call.started[0][0] == str(folders["a"])


@pytest.mark.parametrize(
    "words", [["--engine", "nonsense"], ["--engine", "a b=1"], ["--layers", "2"], ["--layers", "0"]]
)
def test_wrong_usage_is_2(call: Any, folders: dict[str, Path], words: list[str]) -> None:
    assert call(folders["a"], *words) == 2


def test_a_folder_that_is_none_or_does_not_fit_is_2(
    call: Any, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path / "nowhere") == 2
    (tmp_path / "empty").mkdir()
    assert call(tmp_path / "empty", "--model", folders["a"]) == 2
    save_file({"x.weight": plainnet.A[0][1]}, tmp_path / "empty" / "model.safetensors")
    assert call(tmp_path / "empty", "--model", folders["a"]) == 2
    assert "next:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [ImportError("no vllm"), RuntimeError("no\x1b[2J memory"), errors.HandshakeError("x")]
)
def test_an_engine_that_does_not_start_is_2(
    call: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    error: Exception,
) -> None:  # fmt: skip
    def fails(model: str, **arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(start, "start", fails)
    assert call(folders["a"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("weightlife:") and "\x1b" not in told.err
