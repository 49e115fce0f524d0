# SPDX-License-Identifier: Apache-2.0
"""A vLLM that lacks a place which enforcing needs serves and reloads as stock, observed, and one line says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration._child import result_of
from weightlife.testing import checkpoints, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_without_a_required_seam_the_engine_is_vllms_own(checkpoint_root: Path) -> None:
    pair = checkpoints.pair("llama", checkpoint_root)  # a family whose reload by path is exact in stock vLLM
    for folder in pair:
        oracle.cold(folder)
    here, seam = result_of("_unproven_job", pair.a, pair.b), "finalize_layerwise_reload"
    assert (here["first"], here["update"]) == ([], [])
    for mode, asked, why in here["modes"]:  # of the front end, and of its worker
        assert (mode, asked) == ("observe", "enforce")
        assert seam in why
    (told,) = [line for line in here["lines"] if "only observes" in line]
    assert seam in told
    assert "vllm 0.32" in told
    assert "next: " in told
    assert all(seam in why for why in here["models"])
    outcome, opened_by, note = here["report"][:3]
    assert (outcome, opened_by) == ("observed", "reload_weights")
    assert seam in note
