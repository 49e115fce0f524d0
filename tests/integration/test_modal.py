# SPDX-License-Identifier: Apache-2.0
"""Images and audio: what an encoder made of an input before an update answers for no new weights.

Families with an encoder go through all ways in test_reload_matrix.py. Here no client resets a cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration import _modal_job
from tests.integration._child import result_of
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def ask(checkpoint_root: Path) -> Any:
    def child(mode: str, processes: int = 0) -> dict[str, Any]:
        pair = checkpoints.pair("idefics3", checkpoint_root)
        return result_of("_modal_job", mode, processes, pair.a, pair.b)

    return child


@pytest.fixture(scope="module")
def cold(ask: Any) -> Any:
    return ask("cold")["answer"]


def test_stock_answers_with_old_embeddings_or_dies(ask: Any, cold: Any) -> None:
    """What weightlife is held against: if a later vLLM mends this, the wrapper can go."""
    assert ask("stock")["answer"] != cold
    assert "Encoder cache miss" in ask("stock-iterator")["heard"]


@pytest.mark.parametrize("processes", [0, 1], ids=["in-process", "processes"])
def test_every_way_forgets_what_the_old_encoder_made(ask: Any, cold: Any, processes: int) -> None:
    found = ask("weightlife", processes)["ways"]
    assert set(found) == set(_modal_job.WAYS)
    wrong = {
        way: {"there": seen["there"] == cold, "in_flight": seen["in_flight"], "back": seen["back"]}
        for way, seen in found.items()
        if not (seen["there"] == cold and seen["in_flight"] and seen["back"])
    }
    assert wrong == {}
