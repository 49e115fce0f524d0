# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/kernel-authors.md are run as a user would run them, and the plugin is inert."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
    )  # fmt: skip


def test_every_block_passes_as_it_stands(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "kernel-authors.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n# (test_\w+\.py)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == text.count("```python")
    for name, block in blocks:
        (tmp_path / name).write_text(block, encoding="utf-8")
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(blocks)} passed" in done.stdout


def test_the_plugin_imports_nothing_and_registers_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_inert.py").write_text(
        "import sys\n"
        "pytest_plugins = ['weightlife.testing.pytest_plugin']\n"
        "def test(request):\n"
        "    assert 'torch' not in sys.modules and 'weightlife._engine' not in sys.modules\n",
        encoding="utf-8",
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
