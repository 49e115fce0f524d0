# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks commit together or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = checkpoints.pair("qwen2", tmp_path_factory.mktemp("ranks"))
    child = subprocess.run(
        [sys.executable, "-m", "tests.integration._rank_job", str(pair.a), str(pair.b)],
        cwd=ROOT, capture_output=True, text=True, timeout=420, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, child.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


@pytest.mark.parametrize(
    "case",
    [
        "missing on one rank, by iterator", "missing on one rank, by start and finish",
        "a direct tensor missing on one rank", "one rank's loader raises",
    ],
)  # fmt: skip
def test_ranks_that_disagree_keep_the_old_weights(found: dict[str, Any], case: str) -> None:
    heard = found[case]["heard"]
    assert all(heard), f"a rank committed alone: {heard}"
    assert isinstance(errors.from_message(heard[0]), errors.RankMismatchError), heard
    assert found[case]["a_serves"]


def test_ranks_that_agree_commit(found: dict[str, Any]) -> None:
    assert found["agreed"] == {"heard": ["", ""], "changed": True}
    assert found["back"]["a_serves"]
