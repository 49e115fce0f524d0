# SPDX-License-Identifier: Apache-2.0
"""Run one of the job modules here in a process of its own, and take the result that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def stop(child: subprocess.Popen[Any]) -> None:
    """End a server: asked first, killed after half a minute."""
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def result_of(
    job: str,
    *arguments: object,
    timeout: float = 300,
    env: Mapping[str, str] | None = None,
    package: str = "tests.integration",
) -> dict[str, Any]:
    """The JSON after the last `RESULT ` that `<package>.<job>` printed.

    Args:
        job: name of the module.
        arguments: its command line.
        timeout: seconds.
        env: all variables; by default those of this process.
        package: where the job is.

    Raises:
        AssertionError: it printed no result; the end of what it said is in the message.
    """
    child = subprocess.run(
        [sys.executable, "-m", f"{package}.{job}", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)} if env is None else dict(env),
    )  # fmt: skip
    lines = [line for line in child.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (child.stdout + child.stderr)[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result
