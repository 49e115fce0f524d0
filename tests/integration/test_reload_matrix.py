# SPDX-License-Identifier: Apache-2.0
"""A reloaded engine equals one that was loaded cold: every family, every way, both storages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _run, families
from tests.integration.ways import WAYS
from weightlife.testing.checkpoints import MORE

pytestmark = pytest.mark.vllm

Engine = Callable[..., dict[str, Any]]


def _parameters(*, compiled: bool) -> list[Any]:
    heavy = [pytest.mark.slow]
    out = []
    for cell in families.cells():
        if (cell.engine.get("enforce_eager") is False) is not compiled:
            continue
        quick = not cell.engine and not cell.environment
        marks = ([] if quick else heavy) + ([pytest.mark.full] if cell.full else [])
        out.append(pytest.param(cell, id=cell.name, marks=marks))
    return out


@pytest.mark.parametrize("cell", _parameters(compiled=False))
def test_every_way_equals_a_cold_load(cell: families.Cell, engine: Engine) -> None:
    _require_every_way(cell, engine(cell.family, cell.ways, **_arguments(cell)))


@pytest.mark.parametrize("cell", _parameters(compiled=True))
def test_every_way_equals_a_cold_load_and_the_compile_cache_is_hit(
    cell: families.Cell, engine: Engine, checkpoint_root: Path
) -> None:
    # A cache of our own: nobody else adds keys to it meanwhile.
    cache = checkpoint_root.parent / "vllm"
    arguments = _arguments(cell)
    arguments["environment"] = {**arguments["environment"], "VLLM_CACHE_ROOT": str(cache)}
    stock = {**arguments, "weightlife": None}
    cold = engine(cell.family, [], **stock)
    _run.require_exact(cold)
    before = _compile_keys(cache)
    assert before
    result = engine(cell.family, cell.ways, **arguments)
    _require_every_way(cell, result)
    assert _compile_keys(cache) == before, "weightlife changed the key of vLLM's compile cache"
    if result["facts"] != cold["facts"]:  # that run filled the cache
        cold = engine(cell.family, [], **stock)
    # vLLM 0.32 fails to read its own artifact back on a CPU, with and without us: what the compiler had to do
    # must be the same.
    assert result["facts"] == cold["facts"]


def _arguments(cell: families.Cell) -> dict[str, Any]:
    return {
        "weightlife": {"mode": "enforce", "storage": cell.storage, "isolation": cell.isolation},
        "start": cell.start,
        "engine": dict(cell.engine),
        "environment": dict(cell.environment),
    }


def _require_every_way(cell: families.Cell, result: dict[str, Any]) -> None:
    _run.require_exact(result)
    done = [step["step"] for step in result["steps"]]
    assert done[-len(cell.ways) :] == list(cell.ways)


def _compile_keys(cache: Path) -> set[str]:
    return {str(p.relative_to(cache)) for p in cache.glob("torch_compile_cache/*/*") if p.is_dir()}


def test_the_cover_holds_every_pair() -> None:
    covered = [cell for cell in families.cells() if not cell.full]
    plain = [c for c in covered if not c.engine and not c.environment and c.start == "a"]
    eager = [c for c in plain if c.family not in MORE]
    assert {c.family for c in plain} - {c.family for c in eager} == set(families.MET)
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
    assert {c.family for c in covered if c.start == "dummy"} == {
        f for f in families.FAMILIES if families.ways_of(f, "dummy")
    }
    assert [f for f in families.FAMILIES if not families.ways_of(f, "dummy")] == ["tied_head_other"]
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
