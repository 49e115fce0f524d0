# SPDX-License-Identifier: Apache-2.0
"""Which engines the matrix starts, and by which ways each is reloaded: data, no code of a test.

A cell is one engine in one child process. It is reloaded by its ways in turn, alternating between checkpoints A
and B, and must be exact after each. Cells outside the committed cover carry `full`.

The cover: every family x every way x both storages, eager and in process (a reload costs hundredths of a second,
an engine one). Isolation alternates, so that each pair of (way, isolation), (storage, isolation) and (family,
isolation) occurs. The order of ways is rotated from family to family, so that each way follows and precedes each
other one somewhere. Dummy first loads, compilation, separate processes and two ranks are covered by fewer cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.integration._run import SEPARATE, TWO_RANKS
from tests.integration.ways import WAYS
from weightlife.testing.checkpoints import FAMILIES, MORE

STORAGES: Final = ("pinned", "adopted")
ISOLATIONS: Final = ("staged", "in_place")

COMPILED: Final = ("qwen2tied", "mixtral")
PROCESSES: Final = ("qwen2tied", "w8a8dyn")
RANKED: Final = ("qwen2tied", "mixtral")
ADAPTED: Final = ("qwen2tied", "awq", "gemma3", "falcon_h1", "phi3", "w4a16", "tied_head_other")
MET: Final = ("doge", "gemma3n", "idefics3", "whisper")
"""Rows of `MORE` that `make test` runs; the other ones are left to the full product."""

STOCK_EXACT: Final = ("qwen2", "llama", "deepseek_dense", "awq", "gptq")
"""Families that stock vLLM 0.32 reloads exactly, by path: the oracle must call them so."""

STOCK_WRONG: Final[Mapping[str, str]] = {
    "qwen2tied": "token",  # the head stays A; no tensor's digest differs
    "mixtral": "token",  # experts are not packed again
    "gpt_oss": "token",  # experts and sinks stay A
    "w8a8dyn": "token",  # the kernel handle points to freed scales: NaN, or whatever lies there by now
    "w8a8static": "process ended",  # the handle writes wide values into narrow memory
}
"""Families that stock vLLM 0.32 reloads wrongly, by path, and a word of the verdict."""


@dataclass(frozen=True)
class Cell:
    """One engine of the matrix.

    Attributes:
        family: row of `checkpoints.FAMILIES`.
        ways: names of `WAYS`, in the order in which they run.
        storage, isolation: settings of `weightlife.install`.
        start: "a", or "dummy" for `load_format="dummy"`.
        engine: arguments of `LLM`, for the cold load too.
        environment: variables, for the cold load too.
        full: whether only the full product runs it.
    """

    family: str
    ways: tuple[str, ...]
    storage: str
    isolation: str
    start: str = "a"
    engine: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    full: bool = False

    @property
    def name(self) -> str:
        """What pytest shows."""
        extra = [f"{k}" for k in self.engine] + (["processes"] if self.environment else [])
        parts = [self.family, self.start, self.storage, self.isolation, *extra]
        return "-".join(parts)


def cells() -> list[Cell]:
    """The whole matrix; those with `full` are left out of `make test`."""
    return [*_eager(), *_dummy(), *_compiled(), *_separate(), *_adapted(), *_more()]


def ways_of(family: str, start: str = "a") -> tuple[str, ...]:
    """The ways that have a defined result for `family`.

    Where tensors overwrite each other, a shuffled stream has no cold load to be compared with. After a dummy start a
    model whose configuration says tied is built tied: a head of its own can't be represented (test_ties.py holds
    that it is refused).
    """
    row = FAMILIES.get(family) or MORE[family]
    return tuple(
        name
        for name, way in WAYS.items()
        if not ("order" in row.tags and way.shuffles)
        and not (start == "dummy" and not way.dummy)
        and not (start == "dummy" and row.head == "other")
    )


def _rotated(index: int, names: tuple[str, ...]) -> tuple[str, ...]:
    # Odd rows run backwards: rotation alone would give each way the same predecessor everywhere.
    turned = names[index % len(names) :] + names[: index % len(names)]
    return turned[::-1] if index % 2 else turned


def _eager() -> Iterator[Cell]:
    for row, family in enumerate(FAMILIES):
        ways = _rotated(row, ways_of(family))
        for column, storage in enumerate(STORAGES):
            for turn, isolation in enumerate(ISOLATIONS):
                covered = (row + column + turn) % 2 == 0
                yield Cell(family, ways, storage, isolation, full=not covered)


def _dummy() -> Iterator[Cell]:
    for row, family in enumerate(FAMILIES):
        if not ways_of(family, "dummy"):
            continue
        ways = _rotated(row, ways_of(family, "dummy"))
        for column, storage in enumerate(STORAGES):
            isolation = ISOLATIONS[(row // 2 + column) % 2]
            yield Cell(family, ways, storage, isolation, start="dummy", full=(row + column) % 2 == 1)


def _compiled() -> Iterator[Cell]:
    for row, family in enumerate(COMPILED):
        for column, storage in enumerate(STORAGES):
            engine = {"enforce_eager": False}
            yield Cell(family, tuple(WAYS), storage, "staged", engine=engine, full=(row + column) % 2 == 1)


def _separate() -> Iterator[Cell]:
    names = tuple(name for name, way in WAYS.items() if way.remote)
    ranked = {"tensor_parallel_size": 2}
    for engine, environment, families in (({}, SEPARATE, PROCESSES), (ranked, TWO_RANKS, RANKED)):
        for row, family in enumerate(families):
            for column, storage in enumerate(STORAGES):
                isolation = ISOLATIONS[(row + column) % 2]
                full = (row + column) % 2 == 1
                yield Cell(
                    family, names, storage, isolation, engine=engine, environment=environment, full=full
                )


def _adapted() -> Iterator[Cell]:
    """Engines that LoRA may be used on: their layers are wrapped after the first load."""
    engine = {"enable_lora": True, "max_lora_rank": 8}
    for row, family in enumerate(ADAPTED):
        for column, storage in enumerate(STORAGES):
            isolation = ISOLATIONS[(row + column) % 2]
            yield Cell(
                family, ways_of(family), storage, isolation, engine=engine, full=row > 1 or row == column
            )
    names = tuple(name for name, way in WAYS.items() if way.remote)
    ranked = {**engine, "tensor_parallel_size": 2}
    yield Cell("qwen2tied", names, "pinned", "staged", engine=ranked, environment=TWO_RANKS, full=True)


def _more() -> Iterator[Cell]:
    for row, family in enumerate(MORE):
        for column, storage in enumerate(STORAGES):
            isolation = ISOLATIONS[(row + column) % 2]
            full = family not in MET or column != row % 2
            yield Cell(family, ways_of(family), storage, isolation, full=full)
