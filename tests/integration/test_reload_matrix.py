# SPDX-License-Identifier: Apache-2.0
"""A reloaded engine equals one that was loaded cold: every family, every way, both storages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import _run, families
from tests.integration.ways import WAYS

pytestmark = pytest.mark.vllm

Engine = Callable[..., dict[str, Any]]


def _parameters() -> list[Any]:
    heavy = [pytest.mark.slow]
    out = []
    for cell in families.cells():
        quick = not cell.engine and not cell.environment
        marks = ([] if quick else heavy) + ([pytest.mark.full] if cell.full else [])
        out.append(pytest.param(cell, id=cell.name, marks=marks))
    return out


@pytest.mark.parametrize("cell", _parameters())
def test_every_way_equals_a_cold_load(cell: families.Cell, engine: Engine) -> None:
    compiled = cell.engine.get("enforce_eager") is False
    where = {"engine": dict(cell.engine), "environment": dict(cell.environment)}
    if compiled:  # whatever was cached before: from here on stock's compiled code is in the cache
        _run.require_exact(engine(cell.family, [], weightlife=None, **where))
    settings = {"mode": "enforce", "storage": cell.storage, "isolation": cell.isolation}
    result = engine(cell.family, cell.ways, weightlife=settings, start=cell.start, **where)
    _run.require_exact(result)
    done = [step["step"] for step in result["steps"]]
    assert done[-len(cell.ways) :] == list(cell.ways)
    if compiled:
        facts = result["facts"]
        assert facts.get("num_aot_artifacts_loaded", 0) >= 1, f"stock's compile cache was not hit: {facts}"
        assert not facts.get("num_aot_compiles"), f"compiled again: {facts}"


def test_the_cover_holds_every_pair() -> None:
    covered = [cell for cell in families.cells() if not cell.full]
    eager = [c for c in covered if not c.engine and not c.environment and c.start == "a"]
    assert {(c.family, w) for c in eager for w in c.ways} == {
        (f, w) for f in families.FAMILIES for w in families.ways_of(f)
    }
    assert {(c.storage, w) for c in eager for w in c.ways} == {
        (s, w) for s in families.STORAGES for w in WAYS
    }
    assert {c.family for c in eager} == set(families.FAMILIES)
    assert {(c.family, c.storage) for c in eager} == {
        (f, s) for f in families.FAMILIES for s in families.STORAGES
    }
    isolated = {(c.isolation, x) for c in eager for x in (c.family, c.storage, *c.ways)}
    names = (*families.FAMILIES, *families.STORAGES, *WAYS)
    assert {(i, n) for i in families.ISOLATIONS for n in names} == isolated
    assert {c.family for c in covered if c.start == "dummy"} == set(families.FAMILIES)
    assert len([c for c in covered if "tensor_parallel_size" in c.engine]) >= 2


@pytest.mark.parametrize("family", families.STOCK_EXACT)
def test_stock_is_called_exact_where_it_is(family: str, engine: Engine) -> None:
    _run.require_exact(engine(family, ["path", "iterator"], weightlife=None))


@pytest.mark.parametrize(("family", "word"), families.STOCK_WRONG.items())
def test_the_oracle_sees_where_stock_goes_wrong(family: str, word: str, engine: Engine) -> None:
    result = engine(family, ["path"], weightlife=None)
    first, reload = result["steps"][1], result["steps"][-1]
    assert first["step"] == "first_load"
    assert first["differences"] == []
    assert any(word in line for line in reload["differences"]), reload
