# SPDX-License-Identifier: Apache-2.0
"""`weightlife audit` on the installed vLLM: real hooks, run twice, none of them unsafe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("qwen2tied", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.fixture(scope="module")
def document(checkpoint_root: Path) -> dict[str, Any]:
    folders = [str(checkpoints.pair(family, checkpoint_root).a) for family in FAMILIES]
    options = [word for folder in folders for word in ("--checkpoint", folder)]
    done = subprocess.run(
        [sys.executable, "-m", "weightlife", "audit", "--json", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "code": done.returncode}


def test_nothing_that_runs_here_is_unsafe(document: dict[str, Any]) -> None:
    bad = [
        (r["recipe"], r["why"])
        for r in document["recipes"]
        if r.get("verdict") == "unsafe" or r.get("crashed")
    ]
    assert bad == []
    assert (document["code"], document["exit_code"], document["error"]) == (0, 0, None)


def test_whole_models_are_run(document: dict[str, Any]) -> None:
    models = [r for r in document["recipes"] if r["recipe"].startswith("checkpoint ")]
    assert [r.get("verdict") for r in models] == ["rebuild"] * len(FAMILIES), models


def test_what_is_known_of_some_classes_holds(document: dict[str, Any]) -> None:
    verdicts = {row["name"].partition(":")[2]: row for row in document["classes"]}
    for name in (
        "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod", "CompressedTensorsW8A8Int8", "CPUWNA16LinearKernel",
        "MLAAttention", "CPUInt8ScaledMMLinearKernel",
    ):  # fmt: skip
        assert verdicts[name]["verdict"] == "rebuild", verdicts[name]
        assert verdicts[name]["how"] == "ran"
    ran = [row for row in document["classes"] if row["how"] == "ran"]
    assert len(ran) >= 60
    assert all(row["why"] for row in document["classes"])


def test_a_kernel_of_another_device_is_marked_as_forced(document: dict[str, Any]) -> None:
    (row,) = [row for row in document["classes"] if row["name"].endswith(":CutlassInt8ScaledMMLinearKernel")]
    assert (row["verdict"], row["how"]) == ("rebuild", "ran")
    assert "is_supported" in row["forced"]
