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


FIXTURES = """
import torch
from torch import nn
import pytest

pytest_plugins = ["weightlife.testing.pytest_plugin"]

def test_poison(weightlife_poison):
    assert torch.empty(4).isnan().all()
    assert (torch.empty(4, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()

def test_poison_ends():
    assert not torch.are_deterministic_algorithms_enabled()

@pytest.mark.parametrize("moves", [False, True])
def test_addresses_and_captured(weightlife_addresses, weightlife_captured, moves):
    layer = nn.Linear(4, 4, bias=False)
    before = weightlife_addresses(layer)
    graph = weightlife_captured(lambda: layer(torch.ones(1, 4)), layer)
    if moves:
        layer.weight.data = layer.weight.data.clone()
    else:
        layer.weight.data.mul_(2)
    assert bool(before.moved(layer)) is moves
    assert bool(graph.problems()) is moves
"""


def test_the_other_fixtures_do_what_they_say(tmp_path: Path) -> None:
    (tmp_path / "test_fixtures.py").write_text(FIXTURES, encoding="utf-8")
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
