# SPDX-License-Identifier: Apache-2.0
"""Engines that LoRA is enabled on: base weights are updated under the wrapped layers, and adapters keep working.

vLLM wraps the layers after the first load, so names, modules and hooks are no longer where they were learned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration._child import result_of
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", name="cold")
def _cold(checkpoint_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = checkpoints.pair("qwen2tied", checkpoint_root)
    return result_of("_lora_job", pair.a, pair.b, tmp_path_factory.mktemp("adapter"), "cold", 1)["b"]


@pytest.mark.parametrize("way", ["path", "bare_shuffled"])
def test_answers_with_an_adapter_and_without_equal_those_of_a_cold_load(
    cold: dict[str, Any], way: str, checkpoint_root: Path, tmp_path: Path
) -> None:
    pair = checkpoints.pair("qwen2tied", checkpoint_root)
    found = result_of("_lora_job", pair.a, pair.b, tmp_path, way, 1)
    assert found["b"] == cold
    assert found["reports"] == [["committed", found["reports"][0][1]]]
    assert isinstance(errors.from_message(found["error"]), errors.HalfTouchedLayerError), found["error"]
    assert found["a again"] == found["a"]
    said = [[tokens[0] for tokens in found[when]["adapted"]] for when in ("a", "b")]
    assert said[0] != said[1]
    assert [tokens[0] for tokens in found["b"]["adapted"]] != found["b"]["plain"][0]
