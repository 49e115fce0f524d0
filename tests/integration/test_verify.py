# SPDX-License-Identifier: Apache-2.0
"""`weightlife.verify` on the real engine: clean runs find nothing, every seeded fault is found by path, nothing moves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _verify_job
from tests.integration._run import TWO_RANKS
from weightlife.testing import _cold, checkpoints
from weightlife.testing.checkpoints import FAMILIES

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).resolve().parents[2]
# Dense tied, experts, int8 with handles, packed integers, state space, MLA with experts, a head
# that vLLM ties late, padding.
CLEAN = (
    "qwen2tied", "mixtral", "w8a8static", "w4a16", "falcon_h1", "deepseek_v3", "tied_head_equal", "vocab_padded",
)  # fmt: skip
FAULTY = ("qwen2tied", "mixtral", "w8a8dyn", "awq", "gpt_oss", "mamba2", "deepseek_v3")
KNOWN_GAPS = (
    "native memory, compared by its kernel's answers",
    "no load writes it and no hook makes it",
    "a loader or a hook changes it, and which is not known",
    "elements that no load writes",
)
"""Reasons for which something may not be compared in these families. Anything else is a new gap."""

Job = Callable[..., dict[str, Any]]


@pytest.fixture
def job(checkpoint_root: Path) -> Job:
    def run(call: str, family: str, **more: Any) -> dict[str, Any]:
        checkpoints.pair(family, checkpoint_root)
        order = _verify_job.job(call, family=family, root=str(checkpoint_root))
        order["environment"].update(more.pop("environment", {}))
        answer: dict[str, Any] = _cold.run(order, **more)
        return answer

    return run


@pytest.mark.parametrize(
    "family", [f if f in CLEAN else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES]
)
def test_clean_runs_find_nothing_and_another_checkpoint_is_found(job: Job, family: str) -> None:
    found = job("clean", family)
    for step in ("first", "b", "sampled", "stream"):
        assert found[step]["differences"] == [], step
        assert found[step]["ok"], step
    assert found["own"] and found["back"]
    assert found["moved"] == []
    assert not found["a"]["ok"]
    assert found["b"]["layers_compared"] == found["b"]["layers"]
    assert 0 < found["sampled"]["layers_compared"] < found["b"]["layers"]
    assert not found["stream"]["random_access"]
    strange = [reason for reason in found["b"]["untold"] if not reason.startswith(KNOWN_GAPS)]
    assert strange == []


@pytest.mark.parametrize("family", FAULTY)
def test_every_seeded_fault_is_found_by_path(job: Job, family: str) -> None:
    found = job("faults", family)
    assert found["clean"] and found["after"]
    assert found["moved"] == [], "a verification changed what serves"
    assert len(found["faults"]) >= 6
    assert [fault for fault in found["faults"] if not fault[2]] == []
    heard = {case: text.partition(":")[0] for case, text in found["heard"].items()}
    assert heard == {
        "interrupt": "KeyboardInterrupt", "breaks_off": "OSError", "lacks": "MissingTensorError",
        "unknown": "UnexpectedTensorError", "shape": heard["shape"], "nowhere": "SourceError",
    }  # fmt: skip
    assert heard["shape"], "half of every matrix was taken for the whole"


def test_it_sees_what_a_stock_reload_leaves_behind(job: Job) -> None:
    """Stock vLLM does not pack experts again; the head of a tied model keeps its old kernel."""
    for family, what in (("mixtral", "experts"), ("qwen2tied", "lm_head")):
        found = job("observed", family)
        assert found["first"] and found["moved"] == []
        assert any(what in path for path in found["after"]), found["after"]


@pytest.mark.slow
def test_two_ranks_verify_a_shard_each(job: Job) -> None:
    found = job("ranks", "qwen2tied", fresh=True, environment=TWO_RANKS)
    assert [(rank["rank"], rank["world_size"], rank["ok"]) for rank in found["b"]["ranks"]] == [
        (0, 2, True),
        (1, 2, True),
    ]
    assert all(found["a"]) and found["own"] and found["tokens"] and found["round"]
    for rank, path, changed, told, text in found["alone"]:
        assert changed == 1
        assert [[r, ok] for r, ok, _ in told] == [[0, rank != 0], [1, rank != 1]]
        assert told[1 - rank][2] == []
        assert path in told[rank][2], told
        of_rank = text[text.index(f"rank         {rank} of 2") :]
        assert f"    {path}: value, 1 of " in of_rank
    assert "WL001" in found["refused"] and found["nowhere"] == "SourceError"


def test_the_command(checkpoint_root: Path) -> None:
    pair = checkpoints.pair("qwen2tied", checkpoint_root)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, "-m", "weightlife", "verify", str(pair.b), "--model", str(pair.a), "--json",
               "--layers", "0.5", "--engine", "dtype=bfloat16", "--engine", "num_gpu_blocks_override=64"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["exit_code"], said["ok"]) == (1, 1, False), done.stderr[-2000:]
    assert said["ranks"][0]["differences"]
