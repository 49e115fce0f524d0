# SPDX-License-Identifier: Apache-2.0
"""Random streams of weights on real engines: never a wrong answer that serves, never a refusal of a legal stream.

`_fuzz_job.py` is the same as a command, over as many seeds as one likes.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _fuzz_job
from tests.integration.fuzz_streams import ACCEPT, MUTATIONS, REFUSE, Fact, Item, Stream, draw, judge
from weightlife.testing.checkpoints import FAMILIES

ROOT = Path(__file__).resolve().parents[2] / ".artifacts"

SHORT = 20
"""Streams a family in `make test`: 780 in all."""
STREAMS = 60  # 39 families and 4 rounds: 9,360 in all; 2,340 more without undo, 480 compiled and on two ranks


def require_right(family: str, number: int, seeds: range, **more: Any) -> list[dict[str, Any]]:
    found = _fuzz_job.run(family, number, list(seeds), ROOT / "checkpoints", ROOT / "oracle", **more)
    wrong = [
        f"{row['number']} {row['stream']} {row.get('items')}: {row['wrong']}" for row in found if row["wrong"]
    ]
    assert wrong == [], "\n".join([f"{len(wrong)} of {len(found)} streams are wrong", *wrong])
    assert len(found) == len(seeds)
    return found


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_streams(family: str) -> None:
    number = list(FAMILIES).index(family) % len(_fuzz_job.PLAIN)
    outcomes = Counter(row["outcome"] for row in require_right(family, number, range(SHORT)))
    assert {ACCEPT, REFUSE} <= set(outcomes)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2tied", "mixtral", "awq", "gpt_oss", "mamba2"])
def test_random_streams_without_undo(family: str) -> None:
    """A failure poisons, or the old weights serve: never anything else, and a complete update heals."""
    found = require_right(family, _fuzz_job.LEAN, range(SHORT))
    assert {ACCEPT, REFUSE} <= {row["outcome"] for row in found}
    assert any(row.get("poisoned") for row in found)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("number", [_fuzz_job.COMPILED[0], _fuzz_job.RANKED[1]], ids=["compiled", "ranks"])
def test_random_streams_on_other_engines(number: int) -> None:
    """Compiled code, and two ranks, which must stand alike after each stream."""
    outcomes = Counter(row["outcome"] for row in require_right("qwen2tied", number, range(10)))
    assert {ACCEPT, REFUSE} <= set(outcomes)


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize("number", range(_fuzz_job.LEAN + 1))
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_streams(family: str, number: int) -> None:
    require_right(family, number, range(STREAMS))


@pytest.mark.vllm
@pytest.mark.full
@pytest.mark.parametrize("number", [*_fuzz_job.COMPILED, *_fuzz_job.RANKED])
@pytest.mark.parametrize("family", _fuzz_job.FEW)
def test_many_random_streams_on_other_engines(family: str, number: int) -> None:
    require_right(family, number, range(STREAMS))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("off", ["casts", "surplus", "partial_disk"])
def test_a_check_that_is_off_is_found_out(off: str) -> None:
    """The harness can fail: without the check something wrong serves, and is named."""
    value = "allow" if off == "partial_disk" else "off"
    found = _fuzz_job.run(
        "mixtral", 0, list(range(100)), ROOT / "checkpoints", ROOT / "oracle", settings={off: value}
    )
    wrong = [row["wrong"] for row in found if row["wrong"]]
    assert wrong
    assert len(wrong) < len(found)
    assert all("accept" in text for text in wrong), wrong


# -- the generator and the judge ---------------------------------------------------------------------------------

FACTS = {
    "q": Fact((4, 8), True, 16, group=0),
    "k": Fact((2, 8), True, 16, group=0),
    "norm": Fact((8,), True, 16, group=1),
    "codes": Fact((4, 4), False, 32, group=2),
    "unused": Fact((3,), True, 16, taken=False, group=-1),
}


def stream(*names: str, entry: str = "iterator", **more: Any) -> Stream:
    return Stream(entry, tuple(Item(name, "b") for name in names), "b", **more)


def may(made: Stream, **more: Any) -> set[str]:
    return set(judge(made, FACTS, **{"must": False, **more}))


def test_a_seed_gives_the_same_stream_in_any_process() -> None:
    assert [draw(f"x:{n}", FACTS, served="a") for n in range(50)] == [
        draw(f"x:{n}", FACTS, served="a") for n in range(50)
    ]


def test_every_mutation_and_every_verdict_occur() -> None:
    streams = [draw(f"x:{n}", FACTS, served=random.Random(n).choice("ab")) for n in range(800)]
    done = {name for made in streams for name in made.done}
    assert done == {change.__name__ for change, _ in MUTATIONS} | {"split"}
    assert {frozenset(may(made)) for made in streams} == {
        frozenset({ACCEPT}), frozenset({REFUSE}), frozenset({ACCEPT, REFUSE}),
    }  # fmt: skip


def test_verdicts() -> None:
    whole = ("q", "k", "norm", "codes", "unused")
    assert may(stream(*whole)) == {ACCEPT}
    assert may(stream(*reversed(whole))) == {ACCEPT}
    assert may(stream(*whole[1:])) == {REFUSE}
    assert may(stream(*whole, "q")) == {REFUSE}
    assert may(stream(*whole, stop=2)) == {REFUSE}
    assert may(stream(*whole[:-1])) == {ACCEPT, REFUSE}
    assert may(stream("norm", entry="layerwise")) == {ACCEPT, REFUSE}  # the unused one is not there
    assert may(stream("norm", "unused", entry="layerwise")) == {ACCEPT}
    assert may(stream("q", "unused", entry="layerwise")) == {REFUSE}
    assert may(stream("unused", entry="layerwise")) == {REFUSE}
    assert may(stream("norm", "unused", entry="bare"), must=True) == {REFUSE}
    assert may(stream(*whole, "q", entry="bare")) == {ACCEPT, REFUSE}


@pytest.mark.parametrize(
    ("change", "verdict"),
    [("int8", {REFUSE}), ("transpose", {REFUSE}), ("float32", {ACCEPT}), ("flat", {ACCEPT, REFUSE})],
)
def test_verdicts_of_changes(change: str, verdict: set[str]) -> None:
    items = [Item(name, "b", change=change if name == "q" else "") for name in FACTS]
    assert may(Stream("iterator", tuple(items), "b")) == verdict
