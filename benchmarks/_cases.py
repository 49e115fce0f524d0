# SPDX-License-Identifier: Apache-2.0
"""What is measured: the cases, and how each takes its samples from a pair of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from _pair import SIDES, Child, ChildError

if TYPE_CHECKING:
    from pathlib import Path

MODES: Final[list[tuple[str, str, str]]] = [
    (isolation, storage, "") for isolation in ("staged", "in_place") for storage in ("pinned", "adopted")
] + [("in_place", "pinned", "no undo")]
SOURCES: Final = ("path", "iterator")
CASES: Final = ("startup", "load", "reload")
WHOLE: Final = "process start and imports included"
GOALS: Final = {"startup": 1.02, "load": 1.15, "reload": 1.3}


@dataclass
class Row:
    """Samples of one measurement, stock and weightlife pair by pair."""

    model: str
    case: str
    variant: str = ""
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {side: [] for side in SIDES})
    exact: dict[str, bool] = field(default_factory=dict)
    memory: dict[str, int | None] = field(default_factory=dict)
    error: str = ""

    def add(self, pair: dict[str, dict[str, Any]], expected: str = "") -> None:
        """One alternation. `expected` is the answer of a cold load by stock, where the samples carry an answer."""
        for side in SIDES:
            self.samples[side].append(pair[side])
            if expected:
                self.exact[side] = self.exact.get(side, True) and pair[side]["answer"] == expected

    def values(self, side: str, key: str) -> list[float]:
        """One quantity over all alternations, where it is known."""
        return [s[key] for s in self.samples[side] if s.get(key) is not None]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        """What `to_dict` made."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "case": self.case,
            "variant": self.variant,
            "samples": self.samples,
            "exact": self.exact,
            "memory": self.memory,
            "error": self.error,
        }


Say = Callable[[str], None]


@dataclass
class Plan:
    """How much is measured."""

    rounds: int
    cases: frozenset[str]
    log: Path
    say: Say
    threads: int | None = None


def run(name: str, folders: dict[str, Path], plan: Plan) -> tuple[list[Row], dict[str, Any]]:
    """All cases of one model: fresh processes for start-up; the last two live on for the rest.

    Every start is a cold load of A or of B in turn, so stock's answers to both are known from the start, and
    everything that follows is held against them.
    """
    paths = {side: str(folder) for side, folder in folders.items()}
    cold: dict[str, str] = {}
    rounds = plan.rounds if plan.cases & {"startup"} else 2
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        startup, first = Row(name, "startup"), Row(name, "load", "fresh process")
        whole = Row(name, "startup", WHOLE)
        children: dict[str, Child] = {}
        for number in range(rounds):
            which = "ab"[number % 2]
            plan.say(f"{name}: start-up {number + 1}/{rounds}")
            pair: dict[str, dict[str, Any]] = {}
            boot: dict[str, float] = {}
            for side in SIDES:
                child = Child(side, plan.log, plan.threads)
                boot[side] = child.boot_seconds
                with contextlib.ExitStack() as alone:
                    alone.enter_context(child)
                    pair[side] = child.measure("start", model=paths[which])
                    if number == rounds - 1:
                        children[side] = child
                        stack.push(alone.pop_all())
            expected = cold.setdefault(which, pair["stock"]["answer"])
            startup.add(pair, expected)
            whole.add(
                {
                    side: {"seconds": boot[side] + pair[side]["seconds"], "answer": pair[side]["answer"]}
                    for side in SIDES
                },
                expected,
            )
            first.add(
                {side: {**pair[side]["load_phase"], "answer": pair[side]["answer"]} for side in SIDES},
                expected,
            )
        if cold["a"] == cold["b"]:
            raise ChildError(f"{name}: checkpoints A and B give the same answers, nothing could be checked")
        if "startup" in plan.cases:
            rows += [startup, whole]
        if "load" in plan.cases:
            rows.append(_warm_loads(name, children, plan))
            if "startup" in plan.cases:
                rows.append(first)
        if "reload" in plan.cases:
            rows += _reloads(name, children, paths, cold, plan)
        return rows, children["stock"].ask("versions")


def _warm_loads(name: str, children: dict[str, Child], plan: Plan) -> Row:
    plan.say(f"{name}: load phase")
    row = Row(name, "load", "warm process")
    for number in range(plan.rounds + 2):
        last = number > plan.rounds
        pair = {side: children[side].measure("load", release=last) for side in SIDES}
        if last:
            row.memory = {side: pair[side]["peak_bytes"] for side in SIDES}
        elif number:  # the first call in each process warms it up
            row.add(pair)
    return row


def _reloads(
    name: str, children: dict[str, Child], paths: dict[str, str], cold: dict[str, str], plan: Plan
) -> Iterator[Row]:
    for source in SOURCES:
        if source == "iterator":
            for side in SIDES:
                children[side].ask("hold", paths=[paths["a"], paths["b"]])
        for mode in MODES:
            variant = ", ".join(filter(None, (source, *mode)))
            plan.say(f"{name}: reload by {variant}")
            row = Row(name, "reload", variant)
            try:
                _reload_row(row, children, paths, cold, plan, source, mode)
            except ChildError as error:
                row.error = str(error)
                plan.say(f"{name}: {row.variant}: {row.error}")
            yield row
        for side in SIDES:
            children[side].ask("hold", paths=[])


def _reload_row(
    row: Row,
    children: dict[str, Child],
    paths: dict[str, str],
    cold: dict[str, str],
    plan: Plan,
    source: str,
    mode: tuple[str, str, str],
) -> None:
    """One untimed round (memory of the mode before is let go), the timed ones, and one for memory."""
    for number in range(plan.rounds + 2):
        which, last = "ab"[number % 2], number > plan.rounds
        arguments = {"path": paths[which], "source": source, "mode": list(mode)}
        pair = {side: children[side].measure("reload", release=last, **arguments) for side in SIDES}
        if last:
            row.memory = {side: pair[side]["peak_bytes"] for side in SIDES}
        elif number:
            row.add(pair, cold[which])
