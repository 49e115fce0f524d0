# SPDX-License-Identifier: Apache-2.0
"""The leanest mode on real engines: exact, layer by layer, and never a mixture that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration._child import result_of
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("family", ["qwen2", "mixtral", "awq", "w8a8dyn"])
def test_in_place_without_undo(family: str, checkpoint_root: Path) -> None:
    pair = checkpoints.pair(family, checkpoint_root)
    found = result_of("_lean_job", pair.a, pair.b)
    assert (found["good"], found["wrong"]) == ("", [])
    assert found["early"] > 0, "no layer was processed before the finish"
    assert isinstance(errors.from_message(found["bad"]), errors.MissingTensorError), found["bad"]
    assert found["served"] == ["error", []], "a mixture must not answer"
    assert (found["healed"], found["wrong_after"]) == ("", [])
