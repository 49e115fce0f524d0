# SPDX-License-Identifier: Apache-2.0
"""The leanest mode on real engines: exact, layer by layer, and never a mixture that serves."""

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

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "awq", "w8a8dyn"])
def test_in_place_without_undo(family: str, checkpoint_root: Path) -> None:
    pair = checkpoints.pair(family, checkpoint_root)
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration._lean_job", str(pair.a), str(pair.b)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    assert (found["good"], found["wrong"]) == ("", [])
    assert found["early"] > 0, "no layer was processed before the finish"
    assert isinstance(errors.from_message(found["bad"]), errors.MissingTensorError), found["bad"]
    assert found["served"] == ["error", []], "a mixture must not answer"
    assert (found["healed"], found["wrong_after"]) == ("", [])
