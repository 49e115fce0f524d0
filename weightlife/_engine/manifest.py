# SPDX-License-Identifier: Apache-2.0
"""The manifest: what a complete load of a model writes, kept from the last complete one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightlife._engine import ledger
from weightlife._engine.ledger import Region
from weightlife._engine.rules import Rules
from weightlife._engine.skeleton import Skeleton
from weightlife._engine.track import Track

if TYPE_CHECKING:
    from weightlife._engine.announce import Facts
    from weightlife._engine.cuts import Cut


class Received:
    """One source tensor of a session: where it went. Shape and dtype are the sender's.

    Kept 94,000 times for a large mixture of experts, and nearly always with one write: that has no list of its own, and
    what alike tensors have in common they share.

    `kind`: a number that alike names of a first load have in common; -1 where their writes are always observed.
    `cuts`: what each of its writes took of the tensor (`cuts.py`), one object for alike names; None: nobody noted it.
    """

    __slots__ = ("_more", "cuts", "digest", "kind", "like", "number", "part")

    def __init__(
        self, shape: tuple[int, ...], dtype: str, nbytes: int, like: tuple[Any, ...] | None = None
    ) -> None:
        self.like: tuple[Any, ...] = (shape, dtype, nbytes) if like is None else like
        self.kind = -1
        self.number = -1  # storage of its only write, -1: there are none, or more
        self.part: Region | None = None
        self._more: list[tuple[int, Region]] | None = None  # its writes, where there are several
        self.cuts: tuple[Cut | None, ...] | None = None
        self.digest = b""  # of a tied partner that the loader left out, in the parameter's dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        shape: tuple[int, ...] = self.like[0]
        return shape

    @property
    def dtype(self) -> str:
        """Of the tensor."""
        return str(self.like[1])

    @property
    def nbytes(self) -> int:
        """Of the tensor."""
        return int(self.like[2])

    @property
    def writes(self) -> list[tuple[int, Region]]:
        """Storage numbers and regions, in their order. Not to be changed: see `wrote`."""
        if self.part is not None:
            return [(self.number, self.part)]
        return [] if self._more is None else self._more

    def wrote(self, number: int, part: Region) -> None:
        """One more region was written under this name."""
        if self._more is not None:
            self._more.append((number, part))
        elif self.part is None:
            self.number, self.part = number, part
        else:
            self._more = [(self.number, self.part), (number, part)]
            self.number, self.part = -1, None


@dataclass(eq=False, repr=False)
class Manifest:
    """Expected regions by storage number, and by source name what it wrote.

    `provisional`: the first load was a dummy, so nothing is known to be required yet.
    """

    provisional: bool = True
    expected: dict[int, Counter[Region]] = field(default_factory=dict)
    names: dict[str, Received] = field(default_factory=dict)
    # (storage, dtype that became another one) -> regions for which a load did so
    casts: dict[tuple[int, str], set[Region]] = field(default_factory=dict)
    spread: set[int] = field(default_factory=set)  # storages that loaders fill with a smaller tensor
    reads_first: set[int] = field(
        default_factory=set
    )  # storages that loaders read before they have written them
    late: set[int] | None = None  # storages touched again after their layer was complete; None: not known
    rules: Rules | None = None  # what its load taught about the writes of each name
    custom: bool = True  # loaders call custom operators or ask for raw memory: watch for both
    facts: Facts | None = None  # what `announce` made of it
    _tiled: dict[int, bool] = field(default_factory=dict)  # storages that the expected regions fill

    def cast_accepted(self, number: int, source: str, part: Region) -> bool:
        """Whether a load that was taken as complete cast this dtype for this region.

        Of regions that no load wrote (a sender that cuts otherwise) any such cast on the storage speaks.
        """
        regions = self.casts.get((number, source))
        if not regions:
            return False
        return part in regions or part not in self.expected.get(number, ())

    def came(self, received: Mapping[str, Received]) -> Callable[[int, str], bool]:
        """Whether what a tensor is made of came: of its storage, and the path at which it hangs.

        That is so if its own name came, or all names that wrote its storage in the last complete load. Where that load
        tells none, or one came that nobody knows and that wrote nothing, it can't be denied.
        """
        writers: dict[int, list[str]] = {}
        strange = False

        def came(number: int, path: str) -> bool:
            nonlocal strange
            if not writers:
                for name, entry in self.names.items():
                    for storage, _ in entry.writes:
                        writers.setdefault(storage, []).append(name)
                strange = any(not e.writes and name not in self.names for name, e in received.items())
            return path in received or strange or all(name in received for name in writers.get(number, ()))

        return came

    def whole(self, number: int, track: Track) -> bool:
        """Whether a storage was written as a complete load writes it, and that leaves no element out."""
        expected = self.expected.get(number)
        if expected is None or not ledger.equal(expected, track.written):
            return False
        known = self._tiled.get(number)
        if known is None:
            known = self._tiled[number] = ledger.tiled(track.numel, expected)
        return known

    def layers(self, skeleton: Skeleton) -> set[int]:
        """Ids of the modules that a load writes to."""
        return {layer for number in self.expected for layer in skeleton.storages[number].layers}

    def uncovered_names(self, numbers: Iterable[int], tracks: dict[int, Track]) -> list[str]:
        """Source names of which some element on these storages did not arrive."""
        wanted = set(numbers)
        return [
            name
            for name, entry in self.names.items()
            if any(
                number in wanted and ledger.uncovered(part, tracks[number].numel, tracks[number].written)
                if number in tracks
                else number in wanted
                for number, part in entry.writes
            )
        ]


def expected_from(
    received: dict[str, Received], written: Mapping[int, Counter[Region]]
) -> dict[int, Counter[Region]]:
    """What a complete load writes, from one that was taken as complete.

    Counted by source name: a name that came twice (two syncs in one implicit session) counts once, and an element that
    several names write (a shape under q, k and v) counts for each. Writes that belong to no name are taken as they were.
    """
    expected: dict[int, Counter[Region]] = {}
    for entry in received.values():
        for number, part in entry.writes:
            expected.setdefault(number, Counter())[part] += 1
    for number, regions in written.items():
        known = expected.setdefault(number, Counter())
        for part, times in regions.items():
            if part not in known:
                known[part] = times
    return expected


def missing(
    manifest: Manifest,
    skeleton: Skeleton,
    tracks: dict[int, Track],
    numbers: Iterable[int],
) -> list[int]:
    """Those of the storages that a complete load writes and this session did not write completely."""
    short = []
    for number in numbers:
        expected = manifest.expected.get(number)
        if not expected:
            continue
        track = tracks.get(number)
        if track is None or (not track.written and not track.irregular):
            short.append(number)
        elif not track.irregular:
            numel = skeleton.storages[number].numel
            if ledger.compare(numel, expected, track.written).missing:
                short.append(number)
    return short


def surplus(manifest: Manifest, skeleton: Skeleton, tracks: dict[int, Track]) -> list[int]:
    """Storages with elements that were written more often than a complete load writes them."""
    out = []
    for number, track in tracks.items():
        expected = manifest.expected.get(number, Counter())
        if track.irregular or not track.written or ledger.equal(track.written, expected):
            continue
        # Legal: the same regions under other cuts, or fewer of them.
        if ledger.compare(skeleton.storages[number].numel, expected, track.written).surplus:
            out.append(number)
    return out


def repeated_names(
    manifest: Manifest, received: dict[str, Received], tracks: dict[int, Track], numbers: Iterable[int]
) -> list[str]:
    """Source names that wrote a region more often than expected; all names on the storages where none alone did."""
    wanted = set(numbers)
    on_them = {
        name: entry for name, entry in received.items() if any(number in wanted for number, _ in entry.writes)
    }
    repeated = [
        name
        for name, entry in on_them.items()
        if any(
            tracks[number].written[part] > max(1, manifest.expected.get(number, Counter()).get(part, 1))
            for number, part in entry.writes
            if number in wanted
        )
    ]
    return repeated or list(on_them)
