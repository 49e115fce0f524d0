# SPDX-License-Identifier: Apache-2.0
"""Random streams of weights, and what must become of each: a seeded generator and a judge that knows no engine.

A stream starts as a complete, legal one and is mutated: tensors dropped, sent twice, reordered, renamed, reshaped,
cast, the stream cut or broken off, split over calls, taken from A and B by turns, sent again after a failure. The
judge says from the list alone whether it may be accepted, must be refused, or may be either (where that is a model's
own business, such as names that nothing takes). Whatever happens, what serves afterwards is then fixed: what served
before, or exactly what arrived.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

ACCEPT: Final = "accept"
REFUSE: Final = "refuse"

ENTRIES: Final = ("iterator", "path", "layerwise", "session", "bare")
FORBID: Final = ("iterator", "path", "session")
"""Entries that must be complete; the others may leave whole layers out."""

# Changes of a tensor that must never pass, and those that a loader may undo (the result must be the same then).
WRONG: Final = ("int8", "float8", "transpose", "short", "longer", "one", "scalar", "half_row")
HARMLESS: Final = ("float32", "float64")
EITHER: Final = ("flat", "lead")


@dataclass(frozen=True)
class Fact:
    """What is known of a tensor of the checkpoint.

    Attributes:
        shape: as it is sent.
        floating: whether its dtype is a float of 16 bits or more.
        bits: of an element.
        taken: whether a complete load writes anything with it.
        group: number of the smallest set of names that must come together.
        shared: some of its elements are written by another name as well.
        bound: names that are one value (ties): they are taken from one side.
    """

    shape: tuple[int, ...]
    floating: bool
    bits: int
    taken: bool = True
    group: int = 0
    shared: bool = False
    bound: int = -1


@dataclass(frozen=True)
class Item:
    """One tensor of a stream: the name that it is sent under, where it is from, and what was done to it."""

    name: str
    side: str
    sent: str = ""
    change: str = ""

    @property
    def under(self) -> str:
        """The name that the receiver sees."""
        return self.sent or self.name

    def __str__(self) -> str:
        name = self.name if not self.sent else f"{self.name} as {self.sent}"
        return f"{self.side}:{name}{'!' + self.change if self.change else ''}"


@dataclass(frozen=True)
class Stream:
    """One update: tensors in calls.

    Attributes:
        entry: how it is sent (`ENTRIES`).
        items: in order.
        cuts: positions at which a new call begins.
        stop: the source raises before this position, or -1.
        peek: a batch runs before this call (of an explicit session), or -1.
        retry: how the complete update is sent at once after it, or "".
        target: the side that a retry sends.
        done: the mutations, for reports.
    """

    entry: str
    items: tuple[Item, ...]
    target: str
    cuts: tuple[int, ...] = ()
    stop: int = -1
    peek: int = -1
    retry: str = ""
    done: tuple[str, ...] = ()

    def calls(self) -> list[tuple[Item, ...]]:
        """Items by call."""
        bounds = [0, *self.cuts, len(self.items)]
        return [self.items[a:b] for a, b in itertools.pairwise(bounds)]

    def describe(self) -> str:
        """One line."""
        return (
            f"{self.entry} {'+'.join(self.done) or 'plain'} {len(self.items)} tensors in {len(self.cuts) + 1} calls"
            + (f" stop {self.stop}" if self.stop >= 0 else "")
            + (f" then {self.retry}" if self.retry else "")
        )


@dataclass
class Draft:
    """A stream while it is being mutated."""

    rng: random.Random
    facts: Mapping[str, Fact]
    ordered: bool
    entry: str
    target: str
    other: str
    items: list[Item]
    stop: int = -1
    done: list[str] = field(default_factory=list)

    def pick(self, where: Callable[[Fact], bool] = lambda fact: True) -> int | None:
        """A random position whose tensor is not shared and was not touched yet."""
        free = [
            i
            for i, item in enumerate(self.items)
            if not item.change
            and not item.sent
            and not self.facts[item.name].shared
            and where(self.facts[item.name])
        ]
        return self.rng.choice(free) if free else None


def drop(draft: Draft) -> None:
    """Some tensors do not come."""
    for _ in range(draft.rng.choice((1, 1, 1, 2, 3))):
        place = draft.pick()
        if place is not None:
            del draft.items[place]


def keep_layers(draft: Draft) -> None:
    """Only some whole layers come."""
    groups = sorted({fact.group for fact in draft.facts.values()})
    kept = set(draft.rng.sample(groups, draft.rng.randint(1, len(groups))))
    draft.items = [i for i in draft.items if draft.facts[i.name].group in kept]


def duplicate(draft: Draft) -> None:
    """A tensor comes twice, perhaps from the other side."""
    place = draft.pick()
    if place is not None:
        side = draft.rng.choice((draft.items[place].side, draft.items[place].side, draft.other))
        again = replace(draft.items[place], side=side)
        draft.items.insert(draft.rng.randint(0, len(draft.items)), again)


def reorder(draft: Draft) -> None:
    """Another order; tensors that overwrite each other keep theirs."""
    if draft.ordered:
        return
    places = [i for i, item in enumerate(draft.items) if not draft.facts[item.name].shared]
    moved = [draft.items[i] for i in places]
    if draft.rng.random() < 0.3:
        moved.reverse()
    else:
        draft.rng.shuffle(moved)
    for place, item in zip(places, moved, strict=True):
        draft.items[place] = item


def rename(draft: Draft) -> None:
    """A name that nobody has, or that of another tensor."""
    place = draft.pick()
    if place is None:
        return
    item = draft.items[place]
    names = [n for n, f in draft.facts.items() if f.shape != draft.facts[item.name].shape and not f.shared]
    ways = [f"zz_fuzz.{item.name}", f"{item.name}_zz"]
    if names and draft.rng.random() < 0.3:
        ways = [draft.rng.choice(names)]
    draft.items[place] = replace(item, sent=draft.rng.choice(ways))


def reshape(draft: Draft) -> None:
    """A tensor of another shape."""
    place = draft.pick(lambda fact: any(size > 1 for size in fact.shape))
    if place is None:
        return
    shape = draft.facts[draft.items[place].name].shape
    ways = ["short", "longer", "lead", "one", "scalar"]
    if len(shape) >= 2:
        ways.append("flat")
        if shape[-1] != shape[-2] and min(shape[-2:]) > 1:
            ways += ["transpose", "transpose"]
        if shape[-1] > 1:
            ways.append("half_row")
    draft.items[place] = replace(draft.items[place], change=draft.rng.choice(ways))


def cast(draft: Draft) -> None:
    """Some tensors of another dtype."""
    for _ in range(draft.rng.choice((1, 1, 2, 5))):
        place = draft.pick()
        if place is None:
            return
        fact = draft.facts[draft.items[place].name]
        if fact.floating:
            change = draft.rng.choice(
                ("int8", "float8", "float64", "float32" if fact.bits <= 32 else "float64")
            )
        elif draft.rng.random() < 0.5 and fact.shape:
            change = "as_float"
        else:
            continue
        draft.items[place] = replace(draft.items[place], change=change)


def cast_all(draft: Draft) -> None:
    """A trainer with wider floats."""
    for place, item in enumerate(draft.items):
        fact = draft.facts[item.name]
        if fact.floating and not item.change and fact.bits <= 32:
            draft.items[place] = replace(item, change="float32")


def truncate(draft: Draft) -> None:
    """The stream ends early, and nobody says so."""
    draft.items = draft.items[: draft.rng.randint(0, max(0, len(draft.items) - 1))]


def stop(draft: Draft) -> None:
    """The source raises."""
    if draft.entry != "path":
        draft.stop = draft.rng.randint(0, len(draft.items))


def mix(draft: Draft) -> None:
    """Each tensor from A or from B; what is one value, from one side."""
    share = draft.rng.random()
    sides: dict[int, str] = {}
    for place, item in enumerate(draft.items):
        bound = draft.facts[item.name].bound
        side = draft.target if draft.rng.random() < share else draft.other
        side = sides.setdefault(bound, side) if bound >= 0 else side
        draft.items[place] = replace(item, side=side)


MUTATIONS: Final[tuple[tuple[Callable[[Draft], None], int], ...]] = (
    (drop, 3), (keep_layers, 3), (duplicate, 3), (reorder, 4), (rename, 2), (reshape, 4), (cast, 3), (cast_all, 1),
    (truncate, 2), (stop, 2), (mix, 4),
)  # fmt: skip


_WEIGHTS: Final = {"iterator": 4, "path": 2, "layerwise": 4, "session": 2, "bare": 5}


def draw(
    seed: str,
    facts: Mapping[str, Fact],
    *,
    served: str,
    ordered: bool = False,
    staged: bool = True,
    entries: Sequence[str] = ENTRIES,
) -> Stream:
    """The stream of a seed.

    Args:
        seed: any text; the same gives the same stream.
        facts: by name, in file order.
        served: the side that serves, or "" for a mixture.
        ordered: tensors overwrite each other: their order stays.
        staged: batches may run inside an explicit session.
        entries: by which ways it may be sent.
    """
    rng = random.Random(seed)
    sides = ("a", "b")
    target = rng.choice(sides) if served not in sides or rng.random() < 0.1 else sides[served == "a"]
    other = sides[target == "a"]
    entry = rng.choices(entries, [_WEIGHTS[entry] for entry in entries])[0]
    draft = Draft(rng, facts, ordered, entry, target, other, [Item(name, target) for name in facts])
    for _ in range(rng.choices((0, 1, 2, 3), (1, 7, 4, 2))[0]):
        change = rng.choices([m for m, _ in MUTATIONS], [w for _, w in MUTATIONS])[0]
        change(draft)
        draft.done.append(change.__name__)
    draft.stop = min(draft.stop, len(draft.items))
    cuts: tuple[int, ...] = ()
    if entry not in ("iterator", "path") and len(draft.items) > 1 and rng.random() < 0.8:
        count = rng.choice((1, 2, 4, len(draft.items) - 1))
        cuts = tuple(sorted(rng.sample(range(1, len(draft.items)), min(count, len(draft.items) - 1))))
        draft.done.append("split")
    peek = (
        rng.randint(0, len(cuts))
        if staged and entry in ("layerwise", "session") and rng.random() < 0.3
        else -1
    )
    retry = rng.choice((*entries, "bare")) if rng.random() < 0.25 else ""
    return Stream(entry, tuple(draft.items), target, cuts, draft.stop, peek, retry, tuple(draft.done))


# -- the judge -------------------------------------------------------------------------------------------------


def judge(stream: Stream, facts: Mapping[str, Fact], *, must: bool) -> frozenset[str]:
    """What may become of a stream (without its retry): a set of ACCEPT and REFUSE.

    Args:
        stream: the stream.
        facts: by name.
        must: an implicit update failed before, so that the next one has to be complete.
    """
    if stream.stop >= 0:
        return frozenset({REFUSE})
    if _wrong(stream, facts) or _incomplete(stream, facts, must):
        return frozenset({REFUSE})
    return frozenset({ACCEPT, REFUSE} if _doubtful(stream, facts) else {ACCEPT})


def _wrong(stream: Stream, facts: Mapping[str, Fact]) -> bool:
    known = [i for i in stream.items if i.under in facts and facts[i.under].taken]
    if any(item.change in (*WRONG, "as_float") and not _same(item, facts) for item in known):
        return True
    if any(item.sent for item in known):  # another tensor's name: another shape
        return not all(
            _squeezed(facts[i.name].shape) == _squeezed(facts[i.under].shape) for i in known if i.sent
        )
    twice = [n for n, times in Counter(i.under for i in known).items() if times > 1 and not facts[n].shared]
    return bool(twice) and stream.entry != "bare"


def _same(item: Item, facts: Mapping[str, Fact]) -> bool:
    """A change that changes nothing: one element is as good as its first one."""
    size = 1
    for length in facts[item.name].shape:
        size *= length
    return size == 1 and item.change in ("one", "scalar")


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _incomplete(stream: Stream, facts: Mapping[str, Fact], must: bool) -> bool:
    came = {item.under for item in stream.items if item.under in facts}
    taken = {name for name, fact in facts.items() if fact.taken}
    if stream.entry in FORBID or (stream.entry == "bare" and must):
        return bool({n for n in taken - came if not facts[n].shared})
    if not came & taken:
        return True
    touched = {facts[name].group for name in came & taken}
    return any(facts[name].group in touched for name in taken - came if not facts[name].shared)


def _doubtful(stream: Stream, facts: Mapping[str, Fact]) -> bool:
    came = Counter(item.under for item in stream.items)
    for item in stream.items:
        fact = facts.get(item.under)
        if fact is None or item.change in EITHER or (item.change and not fact.taken):
            return True
    for name, fact in facts.items():
        # What nothing takes, what shares elements, and ties, are judged by loaders and by values.
        if (fact.shared or fact.bound >= 0 or not fact.taken) and came[name] != 1:
            return True
    if stream.entry == "bare" and any(times > 1 for times in came.values()):
        return True  # a repeat may begin a new epoch, in which its layers have to come again
    sides: dict[int, set[str]] = {}
    for item in stream.items:
        if item.under in facts and facts[item.under].bound >= 0:
            sides.setdefault(facts[item.under].bound, set()).add(item.side)
    return any(len(found) > 1 for found in sides.values())


def after(stream: Stream, facts: Mapping[str, Fact], serving: Mapping[str, str]) -> dict[str, str]:
    """Where each tensor that serves is from once the stream was accepted."""
    new = dict(serving)
    for item in stream.items:
        if item.under in facts:
            new[item.under] = item.side
    return new


__all__ = ["ACCEPT", "REFUSE", "Fact", "Item", "Stream", "after", "draw", "judge"]
