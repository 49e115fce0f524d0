# SPDX-License-Identifier: Apache-2.0
"""Digests on the real engine: clean runs find nothing, every seeded fault is found with its path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration._child import result_of
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# A tied head in an engine of its own process, experts, quantised weights with kernel handles, state space.
FAMILIES = {"qwen2tied": "1", "mixtral": "0", "w8a8dyn": "0", "mamba2": "0"}


@pytest.fixture(scope="module", params=FAMILIES)
def found(request: pytest.FixtureRequest, checkpoint_root: Path) -> dict[str, Any]:
    pair = checkpoints.pair(request.param, checkpoint_root)
    return result_of("_digest_job", pair.a, pair.b, FAMILIES[request.param])


def test_clean_runs_find_nothing(found: dict[str, Any]) -> None:
    """After the first load, a reload, an aborted and a good update, with requests between them all."""
    assert found["clean"] == [[]] * 5
    assert found["changed"] > 0


def test_a_tensor_that_is_not_the_senders_is_named_and_not_committed(found: dict[str, Any]) -> None:
    problem = errors.from_message(found["heard"][0])
    assert isinstance(problem, errors.DigestMismatchError), found["heard"]
    assert problem.tensors == (found["spoilt"],)
    assert found["then"] == [""]


def test_going_back_gives_every_digest_back(found: dict[str, Any]) -> None:
    assert found["back"] == []


def test_every_seeded_fault_is_found_by_path(found: dict[str, Any]) -> None:
    kinds = [kind for _, kind, _, _ in found["faults"]]
    assert kinds.count("bit") >= 10
    assert kinds.count("swap") >= 3
    missed = [fault for fault in found["faults"] if not fault[2]]
    assert missed == []
