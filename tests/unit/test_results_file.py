# SPDX-License-Identifier: Apache-2.0
"""Each benchmark writes its own section of RESULTS.md, and nothing else of the file is lost."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def results() -> Any:
    spec = importlib.util.spec_from_file_location("_results", ROOT / "benchmarks" / "_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_section_is_replaced_and_everything_else_stays(results: Any, tmp_path: Path) -> None:
    place = tmp_path / "R.md"
    place.write_text("# Head\n\n<!-- begin ledger -->\nold\n<!-- end ledger -->\n\n## By hand\n\ntext\n")
    results.write("ledger", "new\n", place)
    assert place.read_text() == (
        "# Head\n\n<!-- begin ledger -->\nnew\n<!-- end ledger -->\n\n## By hand\n\ntext\n"
    )


def test_a_new_section_finds_its_place(results: Any, tmp_path: Path) -> None:
    place = tmp_path / "R.md"
    for name in ("telemetry", "stock", "ledger"):
        results.write(name, name, place)
    place.write_text(place.read_text() + "\n## By hand\n")
    results.write("verify", "verify", place)
    text = place.read_text()
    order = [text.index(f"begin {name}") for name in ("stock", "verify", "ledger", "telemetry")]
    assert order == sorted(order) and text.rstrip().endswith("## By hand")
    with pytest.raises(ValueError, match="no section"):
        results.write("other", "", place)


def test_the_file_itself_survives_being_written_again(results: Any, tmp_path: Path) -> None:
    before = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    place = tmp_path / "R.md"
    place.write_text(before)
    for name in ("stock", "verify", "ledger", "telemetry"):
        body = before.split(f"<!-- begin {name} -->\n")[1].split(f"\n<!-- end {name} -->")[0]
        results.write(name, body, place)
    assert place.read_text() == before
