# SPDX-License-Identifier: Apache-2.0
"""Sessions of a real engine are kept by variables alone, survive its death, and become a report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from weightlife import errors
from weightlife.runs import view
from weightlife.runs.reader import Run, read_run
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
LOST = "model.layers.1.mlp.down_proj.weight"


def weightlife(*args: object) -> subprocess.CompletedProcess[str]:
    """The command line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WEIGHTLIFE", "OTEL"))}
    return subprocess.run(
        [sys.executable, "-m", "weightlife", *map(str, args)],
        capture_output=True, text=True, timeout=300, check=False, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture(name="folder", scope="module")
def _folder(checkpoint_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one engine with two ranks left, the driver and all workers killed with SIGKILL right after an update."""
    good = checkpoints.pair("qwen2", checkpoint_root).b
    broken = tmp_path_factory.mktemp("broken") / "checkpoint"
    shutil.copytree(good, broken)
    for shard in checkpoints.shards(broken):
        kept = {name: tensor for name, tensor in load_file(shard).items() if name != LOST}
        save_file(kept, shard, metadata={"format": "pt"})
    for index in broken.glob("*.index.json"):
        index.unlink()
    folder = tmp_path_factory.mktemp("runs") / "run"
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("WEIGHTLIFE")},
        "PYTHONPATH": str(ROOT), "WEIGHTLIFE": "1", "WEIGHTLIFE_RUNS_DIR": str(folder), "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration._run_job", str(good), str(broken)],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=env,
    )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert said, done.stderr[-3000:]
    (heard,) = json.loads(said[0].removeprefix("RESULT "))
    assert isinstance(errors.from_message(heard), errors.MissingTensorError), heard
    assert done.returncode == -9
    return folder


@pytest.fixture(name="run")
def _run(folder: Path) -> Run:
    return read_run(folder)


def test_every_rank_kept_every_session_with_its_spans(run: Run) -> None:
    assert run.problems == []
    found = view.updates(run)
    assert [(u.first.operation, u.outcome, len(u.ranks)) for u in found] == [
        ("first_load", "committed", 2), ("reload", "committed", 2), ("reload", "refused", 2),  # the folder's headers show it
    ]  # fmt: skip
    assert len({session.pid for session in run.sessions}) == 2
    for session in run.sessions:
        assert session.ended
        assert (
            next(s for s in session.spans if s.is_root).attributes["weightlife.rank"] == session.report.rank
        )
        assert {p.name for p in session.report.phases} == {s.name for s in session.spans if not s.is_root}
        for phase in session.report.phases:  # two clocks of one process, read one after the other
            drawn = sum(s.seconds for s in view.segments(session) if s.name == phase.name)
            assert drawn == pytest.approx(phase.seconds, abs=0.005)


def test_the_report_names_what_was_lost_and_the_next_step(folder: Path) -> None:
    done = weightlife("report", folder)
    assert done.returncode == 1
    assert LOST in done.stdout
    assert "refused, the old weights serve; nothing was touched" in done.stdout
    assert "next: send the missing tensors" in done.stdout
    found: dict[str, Any] = json.loads(weightlife("report", folder, "--json").stdout)
    assert [load["outcome"] for load in found["loads"]] == ["committed", "committed", "refused"]


def test_the_page_has_both_ranks_and_the_tensor(folder: Path, tmp_path: Path) -> None:
    done = weightlife(
        "report", folder, "-o", tmp_path / "r.html", "--perfetto", tmp_path / "t.json", "--compare", folder
    )
    assert done.returncode == 1, done.stderr
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert len(re.findall(r'class="track"', text)) == 6
    assert LOST in text
    assert "No spans are stored" not in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_tail_prints_one_line_a_session_and_rank(folder: Path) -> None:
    done = weightlife("trace", "tail", folder, "--once")
    assert len(done.stdout.splitlines()) == 6
    assert done.stdout.count("REFUSED") == 2


def test_doctor_finds_the_host_that_the_suite_runs_on_in_order() -> None:
    done = weightlife("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == 0, found
    seams = found["host"]["seams"]
    assert len(seams) > 20
    assert all(seam["found"] for seam in seams)
