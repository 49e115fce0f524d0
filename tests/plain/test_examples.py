# SPDX-License-Identifier: Apache-2.0
"""The example for plain modules runs as a user would run it, and without a host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.plain

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "plain_module.py"

RUN = f"""
import runpy, sys
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
assert not any(name.partition(".")[0] == "vllm" for name in sys.modules), "a host was imported"
"""


def example(*, poison: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTLIFE")}
    environment = {**clean, "WEIGHTLIFE_POISON": poison, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", RUN], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


@pytest.mark.parametrize("poison", ["0", "1"])
def test_the_plain_example_holds(poison: str) -> None:
    done = example(poison=poison)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [line for line in done.stdout.splitlines() if line.startswith(("yes", "NO"))]
    assert len(checks) == 13
    assert all(line.startswith("yes") for line in checks)
    assert "committed: the new weights serve" in done.stdout
