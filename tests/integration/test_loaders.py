# SPDX-License-Identifier: Apache-2.0
"""Loaders that somebody registered with vLLM need nothing of us, whatever they do about processing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration._child import result_of
from weightlife.testing import checkpoints, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LOADERS = ("once", "never", "twice")


@pytest.fixture(scope="module")
def found(checkpoint_root: Path) -> dict[str, Any]:
    pair = checkpoints.pair("mixtral", checkpoint_root)  # experts that are packed in place of the loaded ones
    for folder in pair:
        oracle.cold(folder)
    return result_of("_loader_job", pair.a, pair.b)


@pytest.mark.parametrize("name", LOADERS)
def test_the_first_load_and_an_update_equal_cold_loads(found: dict[str, Any], name: str) -> None:
    here = found[name]
    assert (here["status"], here["training"]) == ("ready", False)
    assert (here["first"], here["update"]) == ([], [])


@pytest.mark.parametrize("name", LOADERS)
def test_one_that_can_not_reload_a_path_says_so_and_changes_nothing(found: dict[str, Any], name: str) -> None:
    here = found[name]
    (note,) = [note for note in here["notes"] if "reload by path is not possible" in note]  # at the start
    assert f"load_format=weightlife_{name}" in note
    assert "weights_iterator" in note
    assert (
        here["by_path"] == "ReloadUnsupportedError NotImplementedError"
    )  # in process the host's kind as well
    outcome, error = here["refused"]
    assert outcome == "refused"
    assert "WL015" in error
    assert f"load_format=weightlife_{name}" in error
    assert here["after_path"] == []


def test_a_begin_and_an_end_inside_of_a_load_are_one_update(found: dict[str, Any]) -> None:
    """As vLLM's decorator for TorchAO has them; TorchAO itself has no build for this machine."""
    here = found["once"]
    assert here["decorated"] == [[], []]
    assert here["open"] is False  # it ended with the call, not with the next batch
    assert here["decorated_short"] == "HalfTouchedLayerError"
    assert here["decorated_after"] == []
    assert here["decorated_reports"] == ["committed", "committed", "aborted"]


def test_experts_that_may_have_moved_refuse_updates(found: dict[str, Any]) -> None:
    """The refusal; that experts move at all needs a GPU."""
    here = found["once"]
    assert here["eplb"] == "RefusedLayerError"
    assert here["after_eplb"] == []
