# SPDX-License-Identifier: Apache-2.0
"""On a real engine: the manifest, its smallest partial updates, broken checkpoints, wrong announcements."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from weightlife import errors, source_checks
from weightlife._declared import Known, problems
from weightlife.testing import _cold, checkpoints, oracle

pytestmark = pytest.mark.vllm

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1] / ".artifacts" / "checkpoints"

# Dense, dense with a tie, unquantised experts, repacked quantised weights, sinks and fused experts, state space.
FAMILIES = ("llama", "qwen2tied", "mixtral", "awq", "gpt_oss", "mamba2")

REFUSED = {
    "truncated": errors.TruncatedSourceError,
    "index": errors.SourceIndexError,
    "twice": errors.RepeatedSourceError,
    "stale": errors.RepeatedSourceError,
    "missing": errors.MissingTensorError,
    "shape": errors.ShapeMismatchError,
    "dtype": errors.DtypeMismatchError,
    "announced_shape": errors.ShapeMismatchError,
    "announced_dtype": errors.DtypeMismatchError,
    "announced_twice": errors.SurplusTensorError,
    "expected_half": errors.MissingTensorError,
}


STREAMS = {
    "missing": errors.MissingTensorError,
    "surplus": errors.SurplusTensorError,
    "unexpected": errors.UnexpectedTensorError,
    "shape": errors.ShapeMismatchError,
    "cast": errors.DtypeMismatchError,
    "half": errors.HalfTouchedLayerError,
    "bypass": errors.BypassError,
    "empty": errors.EmptyUpdateError,
    "nonfinite": errors.NonFiniteError,
}


@functools.cache
def found(family: str) -> dict[str, Any]:
    for folder in checkpoints.pair(family, ROOT):
        oracle.cold(folder)
    order = {
        "call": "_manifest_job:execute",
        "path": [str(HERE)],
        "arguments": {"family": family, "root": str(ROOT)},
        "environment": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "WEIGHTLIFE_TESTING_CACHE": os.environ.get("WEIGHTLIFE_TESTING_CACHE", ""),
        },
    }
    answer: dict[str, Any] = _cold.run(order, fresh=False, timeout=300.0)
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_manifest_is_true_and_travels(family: str) -> None:
    manifest = found(family)["manifest"]
    assert manifest["again"]
    assert manifest["remote"] == [True]
    assert manifest["names"]
    assert manifest["problems"] == []
    assert (manifest["left_out"] > 0) is (family != "mamba2")  # it has neither rotary caches nor padding


@pytest.mark.parametrize("family", FAMILIES)
def test_atomic_groups_are_the_smallest_legal_updates(family: str) -> None:
    groups = found(family)["groups"]
    assert groups["accepted"] == []
    assert groups["half"] == []
    assert groups["all"] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_before_anything_is_touched(family: str, case: str) -> None:
    verdict = found(family)[case]
    assert verdict["code"] == REFUSED[case].code, verdict
    assert verdict["received"] == 0
    assert verdict["outcome"] == ("aborted" if case.startswith("announced") else "refused")
    assert verdict["old"] == []
    assert verdict["next"] == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_is_refused_before_it_commits(family: str, case: str) -> None:
    verdict = found(family)[f"stream_{case}"]
    assert verdict["code"] == STREAMS[case].code, verdict
    assert verdict["outcome"] == "aborted"
    assert verdict["old"] == []
    assert verdict["next"] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_that_says_what_comes_is_exact(family: str) -> None:
    assert found(family)["expected"]["exact"] == []


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_no_false_alarm_on_any_family(family: str) -> None:
    """Headers only: a checkpoint is of one piece, and each stands for the other. The engine's part is in the matrix,
    where every family is reloaded by path with these checks on."""
    a, b = (source_checks.read(folder) for folder in checkpoints.pair(family, ROOT))
    assert a.headers
    assert (a.problems, b.problems) == ([], [])
    if set(a.headers) != set(b.headers):
        return  # a head that comes or goes: the ledger's business
    known = {n: Known(h.dtype, h.shape or (), (n,)) for n, h in a.headers.items()}
    assert problems(b.headers, known, partial="forbid", unexpected="refuse") == []
