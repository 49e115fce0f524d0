# SPDX-License-Identifier: Apache-2.0
"""What a name that nobody knows was meant to be: the nearest known one, and the prefix that is wrong. Pure.

A checkpoint of 94,000 names must not make an error slow: nothing here grows with the product of two sets.
Standard library only.
"""

from __future__ import annotations

import difflib
import heapq
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["PrefixChange", "nearest", "prefix_change", "prefix_clause"]

# difflib compares 11,712 names in 2.2 s. It only ever sees the best of a cheap ranking.
_COMPARED = 200
_LETTERS = 512  # its time grows with the square of a name's length, and names come out of files
_SAMPLE = 64
_CANDIDATES = 32


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that looks most like `name`, or ''.

    Names are ranked by the parts that they share with it (from both ends), which is linear; the best 200 are then
    compared letter by letter.
    """
    if len(name) > _LETTERS:
        return ""
    parts = name.split(".")
    short = (other for other in known if len(other) <= _LETTERS)
    best = heapq.nlargest(_COMPARED, short, key=lambda other: _shared(parts, other.split(".")))
    if best and best[0] != name and f".{best[0]}".endswith(f".{name}") | f".{name}".endswith(f".{best[0]}"):
        return best[0]  # the same place under another prefix
    return next(iter(difflib.get_close_matches(name, best, n=1, cutoff=0.6)), "")


def _shared(mine: list[str], theirs: list[str]) -> int:
    """Equal parts at the end and, after them, at the beginning."""
    shorter = min(len(mine), len(theirs))
    tail = 0
    while tail < shorter and mine[-1 - tail] == theirs[-1 - tail]:
        tail += 1
    head = 0
    while head < shorter - tail and mine[head] == theirs[head]:
        head += 1
    return 2 * tail + head


@dataclass(frozen=True)
class PrefixChange:
    """Taking `remove` from the front of names and putting `add` there makes `resolved` of `total` names known."""

    remove: str
    add: str
    resolved: int
    total: int

    def apply(self, name: str) -> str:
        """The name after the change; one without the prefix stays as it is."""
        return self.add + name[len(self.remove) :] if name.startswith(self.remove) else name

    def __str__(self) -> str:
        if self.remove and self.add:
            what = f"with prefix {self.add!r} in place of {self.remove!r}"
        elif self.remove:
            what = f"without the prefix {self.remove!r}"
        else:
            what = f"with the prefix {self.add!r}"
        return f"{what}, {self.resolved} of {self.total} names would be known"


def prefix_change(names: Collection[str], known: Collection[str]) -> PrefixChange | None:
    """The one change of prefix after which most of `names` are among `known`.

    Args:
        names: all names that arrived, or were announced.
        known: all names of a complete load.

    Returns:
        None where more than half of the names are known as they are, or no change makes more than half known.
        Of changes that resolve equally many, the one that touches the fewest letters.
    """
    wanted = set(known)
    strange = [name for name in names if name not in wanted]
    if not strange or 2 * len(strange) < len(names):
        return None
    best: PrefixChange | None = None
    for (remove, add), _ in _candidates(strange, wanted).most_common(_CANDIDATES):
        resolved = len(
            wanted & {add + name[len(remove) :] if name.startswith(remove) else name for name in names}
        )
        change = PrefixChange(remove, add, min(resolved, len(names)), len(names))
        if remove and add and resolved < 2:
            continue  # one name whose last part is known under another path says nothing
        if 2 * resolved > len(names) and (best is None or _rank(change) > _rank(best)):
            best = change
    return best


def _rank(change: PrefixChange) -> tuple[int, int, str, str]:
    return change.resolved, -len(change.remove) - len(change.add), change.remove, change.add


def _candidates(strange: list[str], known: set[str]) -> Counter[tuple[str, str]]:
    """(removed, added) prefixes that turn a sample of the names into known ones, with how often each does."""
    step = max(1, len(strange) // _SAMPLE)
    tails: dict[str, set[str]] = {}  # tail -> prefixes under which the sample has it
    for name in strange[::step][:_SAMPLE]:
        parts = name.split(".")
        for cut in range(len(parts)):
            tail = ".".join(parts[cut:])
            tails.setdefault(tail, set()).add(name[: len(name) - len(tail)])
    votes: Counter[tuple[str, str]] = Counter()
    for name in known:
        parts = name.split(".")
        # The longest tail that a sampled name has, too; shorter ones (`weight`) say nothing more.
        for cut in range(len(parts)):
            tail = ".".join(parts[cut:])
            prefixes = tails.get(tail)
            if prefixes is not None:
                votes.update((mine, name[: len(name) - len(tail)]) for mine in prefixes)
                break
    votes.pop(("", ""), None)
    return votes


def prefix_clause(names: Collection[str], known: Collection[str]) -> str:
    """`prefix_change` as a clause for a message, or ''."""
    change = prefix_change(names, known)
    return f"; {change}" if change is not None else ""
