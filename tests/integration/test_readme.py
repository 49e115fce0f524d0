# SPDX-License-Identifier: Apache-2.0
"""The README's table holds: each way of it is the *first* update of its engine, in every family."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _run, families
from weightlife.testing.checkpoints import FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Engine = Callable[..., dict[str, Any]]
README = Path(__file__).resolve().parents[2] / "README.md"
WAYS = ("path", "bare_shuffled")


# Those whose first pass or first update once was special; the matrix has every family, this all of them as firsts.
ALWAYS = ("gpt_oss", "mixtral", "awq")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ALWAYS else [pytest.mark.full]) for f in FAMILIES]
)
def test_under_weightlife_the_first_update_of_an_engine_is_exact(
    family: str, way: str, engine: Engine
) -> None:
    if way not in families.ways_of(family):
        way = "bare_one_by_one"  # its tensors overwrite each other: only their own order has a result
    _run.require_exact(engine(family, [way], weightlife={}))


def test_the_table_counts_every_family() -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"\*\*exact, of (\d+)\*\* \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", text)
    assert found is not None
    total, by_path, ours, bare, ours_bare = map(int, found.groups())
    assert total == ours == ours_bare == len(FAMILIES)
    assert bare < by_path < total
