# SPDX-License-Identifier: Apache-2.0
"""Ties that come and go with the checkpoint: one memory for two values is refused or told apart, never mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration._child import result_of
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run(checkpoint_root: Path) -> Any:
    tied = checkpoints.pair("tied_head_equal", checkpoint_root).a
    untied = checkpoints.pair("tied_head_other", checkpoint_root).b

    def child(case: str) -> dict[str, Any]:
        return result_of("_tie_job", case, tied, untied)

    return child


def test_pinned_refuses_a_head_that_left_its_tie(run: Any) -> None:
    """Embeddings and head had one address; both values can't go there."""
    found = run("pinned")
    assert isinstance(errors.from_message(found["heard"]), errors.StorageMovedError), found
    assert found["old"]
    assert (found["then"], found["then_exact"]) == ("", True)


def test_auto_gives_it_memory_of_its_own_where_nothing_holds_an_address(run: Any) -> None:
    found = run("auto")
    assert (found["heard"], found["new"], found["storage"]) == ("", True, "adopted"), found
    assert (found["then"], found["then_exact"]) == ("", True)


def test_a_head_that_a_tied_model_would_drop_is_refused(run: Any) -> None:
    """A dummy start reads no checkpoint and builds the model tied: stock drops the head and says nothing."""
    found = run("dummy")
    heard = errors.from_message(found["heard"])
    assert isinstance(heard, errors.UnexpectedTensorError), found
    assert "lm_head.weight" in str(heard)
    assert found["old"]
