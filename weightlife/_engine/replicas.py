# SPDX-License-Identifier: Apache-2.0
"""Values across ranks: what every rank gets whole is equal on all of them, and shards that differed still differ.

What is compared is what loaders wrote, before hooks make something else of it: by storage of the constructor, which
every rank numbers alike. That needs no table of first values, and sees weights that a hook then hides in a handle.

A storage counts as *replicated* where the same names wrote the same regions of it on all ranks and each of these
tensors went into the model with all of its elements. If its loaders also did nothing but copy in the first load (they
have a rule), and what came then began and ended alike on all ranks, a difference is an error at once. Else it may be
meant (a bias that all ranks but the first set to zero, a source that cuts before it sends), and what the last
committed update showed is what the next one is held to. So it is for shards, of which 16 blocks are looked at: that two
of them differ can't be demanded (kept heads, zeros), but those that differed in the last update, or in the first load,
and are now equal were cut in one place by all ranks. Storages that hold one constant say nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightlife import errors
from weightlife._engine import ledger
from weightlife._engine.skeleton import Skeleton, storage_key, view_on
from weightlife.kernels import digest

if TYPE_CHECKING:
    from weightlife._engine.manifest import Manifest, Received
    from weightlife._engine.session import WeightLoadSession
    from weightlife._engine.track import Track

Seen = dict[int, tuple[int, bool]]
"""Storage number -> who wrote it, and whether all ranks held the same. Of the last commit that wrote it."""


@dataclass
class Memory:
    """What is kept of one model from update to update."""

    seen: Seen = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)  # shards of the first load: digests of this rank's
    whole: tuple[Manifest, dict[int, bool]] | None = None  # storages that come whole in a complete load


_WHOLE, _COPIED, _CONSTANT, _SAMPLED = 1, 2, 4, 8
_BITS = 4
# A digest of all of a 1.26 GB model was 54 to 72 ms of a reload of 308 to 357; of 16 blocks of each shard, 2 to 3 of 273.
_BLOCKS, _BLOCK = 16, 4096
_FIELDS = 4  # words a storage: number, writers and flags, sample of the first load, digest


class _Storage(NamedTuple):
    writers: int  # a sum over the names, shapes and regions of what wrote it
    flags: int
    sample: int  # of the first load: of what came, or of a shard that it left
    digest: int


def shards(skeleton: Skeleton, names: Mapping[str, Received], numbers: Iterable[int]) -> dict[int, int]:
    """Digests of what a first load left in shards, before hooks make something else of it.

    Args:
        skeleton: of the model that was loaded.
        names: what came, and where it went.
        numbers: storages that were written.

    Returns:
        storage -> digest, as `Held.take` would take it of what is no replica.
    """
    whole = _come_whole(names.values())
    taken: list[int] = []
    memory: list[torch.Tensor] = []
    for number in numbers:
        made = skeleton.storages[number]
        live = (skeleton.tensors[index].ref() for index in made.tensors)
        tensor = next((t for t in live if t is not None), None)
        if (
            whole.get(number, True)
            or tensor is None
            or skeleton.storage_of(tensor) != number
            or not made.nbytes
        ):
            continue
        taken.append(number)
        memory.append(_looked_at(view_on(tensor.untyped_storage(), torch.uint8, 0, (made.nbytes,), (1,))))
    pending = digest.Pending()
    pending.add(memory)
    return dict(zip(taken, pending.values(), strict=True))


class Held:
    """The storages that one session wrote completely, and their digests.

    Args:
        session: prepared, of a model with several ranks.
        memory: what earlier updates showed.
    """

    def __init__(self, session: WeightLoadSession, memory: Memory) -> None:
        self.session = session
        self.memory = memory
        self.seen = memory.seen
        self._pending = digest.Pending()
        self._taken: dict[int, int] = {}  # storage number -> flags: sampled, of one value
        self._shown: Seen = {}
        self.words: list[int] = []

    def take(self, numbers: Iterable[int] | None = None) -> None:
        """Begin the digests of what is complete, while it is still what loaders wrote.

        Args:
            numbers: only these storages (their layer is going to be processed); by default all that are left.
        """
        stage = self.session.stage
        assert stage is not None
        wanted = stage.by_number if numbers is None else [n for n in numbers if n in stage.by_number]
        replaced = {
            stage.skeleton.tensors[index].storage
            for index, tensor in stage.placeholders.items()
            if (track := stage.by_number.get(stage.skeleton.tensors[index].storage)) is not None
            and storage_key(tensor) != int(track.storage._cdata)
        }
        memory: list[torch.Tensor] = []
        sizes: list[int] = []
        for number in wanted:
            track = stage.by_number[number]
            if number in self._taken or number in replaced or not self._complete(number, track):
                continue
            flat = view_on(track.current, torch.uint8, 0, (track.nbytes,), (1,))
            sampled = not self._comes_whole(number) and track.nbytes > _BLOCKS * _BLOCK
            self._taken[number] = _SAMPLED if sampled else 0
            memory.append(_sampled(flat) if sampled else flat)
            sizes.append(track.dtype.itemsize)
        self._pending.add(memory)
        new = list(self._taken)[len(self._taken) - len(memory) :]
        for number, constant in zip(new, _constants(memory, sizes), strict=True):
            self._taken[number] |= _CONSTANT * constant

    def _comes_whole(self, number: int) -> bool:
        """Whether what a complete load brings for a storage goes into it with all elements."""
        manifest, known = self.session.life.manifest, self.memory.whole
        if known is None or known[0] is not manifest:
            names = self.session.intake.received if manifest.provisional else manifest.names
            known = self.memory.whole = (manifest, _come_whole(names.values()))
        return known[1].get(number, False)

    def _complete(self, number: int, track: Track) -> bool:
        if track.retired or track.irregular or not track.numel or not track.written:
            return False
        known = {int(track.storage._cdata), int(track.current._cdata)}
        if any(storage_key(tensor) not in known for tensor, _ in track.tensors):
            return False  # a loader gave it other memory
        return self.session.life.manifest.whole(number, track) or ledger.tiled(track.numel, track.written)

    def close(self) -> None:
        """Nothing more is taken: wait for the digests, and make `words`, four numbers a storage for the vote."""
        manifest = self.session.life.manifest
        rules = manifest.rules if manifest.rules is not None and not manifest.rules.off else None
        samples = {} if rules is None else rules.samples
        writers: dict[int, int] = {}
        flags: dict[int, int] = {}
        for name, entry in self.session.intake.received.items():
            known = manifest.names.get(name)
            here = (
                _WHOLE * _whole(entry)
                | _COPIED * (rules is not None and known is not None and known.kind >= 0)
            )  # fmt: skip
            for number, part in entry.writes:
                if number not in self._taken:
                    continue
                text = f"{name}\0{entry.shape}\0{part.offset}\0{part.shape}\0{part.strides}"
                code = zlib.crc32(text.encode("utf-8", "surrogatepass"))
                writers[number] = (writers.get(number, 0) + code) & 0xFFFFFFFF
                flags[number] = flags.get(number, _WHOLE | _COPIED) & here
        self.words.clear()
        for (number, own), value in zip(self._taken.items(), self._pending.values(), strict=True):
            if number in writers:  # else what wrote it belongs to no name
                kind = writers[number] << _BITS | flags[number] | own
                first = self.memory.first.get(number, samples.get(number, -1))
                self.words += [number, kind, first, value]

    def problem(self, everyone: Sequence[Sequence[int]]) -> errors.RankMismatchError | None:
        """The error for what the ranks hold. All ranks come to the same answer.

        Args:
            everyone: each rank's `words`.
        """
        tables = [_table(words) for words in everyone]
        apart: dict[int, str] = {}
        alike: list[int] = []
        unsure: list[int] = []
        self._shown = {}
        for number in tables[0]:
            if not all(number in table for table in tables):
                continue
            rows = [table[number] for table in tables]
            if len({row.flags & _SAMPLED for row in rows}) > 1:
                continue
            writers = sum(row.writers for row in rows) & 0xFFFFFFFF
            equal = len({row.digest for row in rows}) == 1
            before = self.seen.get(number)
            before = before if before is not None and before[0] == writers else None
            replicated = len({row.writers for row in rows}) == 1 and all(row.flags & _WHOLE for row in rows)
            if replicated and not equal:
                alike_at_first = len({row.sample for row in rows}) == 1 and rows[0].sample >= 0
                copied = alike_at_first and all(row.flags & _COPIED for row in rows)
                if copied or (before is not None and before[1]):
                    apart[number] = _groups([row.digest for row in rows])
                    continue
                if before is None:
                    unsure.append(number)
            if before is None and not replicated and len({row.sample for row in rows}) > 1:
                # What the first load left tells it, if each rank looked.
                before = None if any(row.sample < 0 for row in rows) else (writers, False)
            if equal and rows[0].flags & _CONSTANT:
                continue  # zeros are alike wherever they are cut
            if equal and before is not None and not before[1]:
                alike.append(number)
                continue
            self._shown[number] = (writers, equal)
        if unsure:
            self.session.report.notes.append(
                f"{len(unsure)} tensors that every rank got whole differ between ranks: taken as meant, since nothing"
                f" is known of them yet; the first: {self._path(unsure[0])}"
            )
        if apart:
            first, groups = next(iter(apart.items()))
            return self._error(
                f"{len(apart)} tensors that every rank gets whole have other values on other ranks; the first,"
                f" {self._path(first)}: {groups}", list(apart),
                "find the rank whose sender differs: weightlife.expect(llm, table) with the sender's digests names it;"
                " then send the update again. rank_values='warn' lets it pass",
            )  # fmt: skip
        if alike:
            return self._error(
                f"{len(alike)} tensors that were another shard on each rank are equal on ranks"
                f" {list(range(len(tables)))}; the first: {self._path(alike[0])}", alike,
                "look for a loader or a sender that cuts by the wrong rank, then send the update again;"
                " rank_values='warn' lets it pass",
            )  # fmt: skip
        return None

    def learn(self) -> None:
        """The update has committed: the next one is held to what it showed."""
        self.seen.update(self._shown)

    def _path(self, number: int) -> str:
        skeleton = self.session.life.skeleton
        return errors.clean(skeleton.tensors[skeleton.storages[number].tensors[0]].path)

    def _error(self, message: str, numbers: list[int], hint: str) -> errors.RankMismatchError:
        session, wanted = self.session, set(numbers)
        names = [
            name
            for name, entry in session.intake.received.items()
            if any(number in wanted for number, _ in entry.writes)
        ]
        layer = self._path(numbers[0]).rpartition(".")[0]
        return errors.RankMismatchError(
            message, model=session.life.name, layer=layer, tensors=names, session=session.id, hint=hint
        )


def _whole(entry: Received) -> bool:
    """Whether a tensor went into the model with all of its elements."""
    return sum(part.numel for _, part in entry.writes) == math.prod(entry.shape)


def _come_whole(entries: Iterable[Received]) -> dict[int, bool]:
    """Storage -> whether all that is written to it comes of tensors that go in with all elements."""
    whole: dict[int, bool] = {}
    for entry in entries:
        for number, _ in entry.writes:
            whole[number] = whole.get(number, True) and _whole(entry)
    return whole


def _looked_at(flat: torch.Tensor) -> torch.Tensor:
    """What is digested of a shard."""
    return _sampled(flat) if flat.numel() > _BLOCKS * _BLOCK else flat


def _sampled(flat: torch.Tensor) -> torch.Tensor:
    """Blocks from the first to the last of many bytes; each begins with an element of any dtype."""
    step = (flat.numel() - _BLOCK) // (_BLOCKS - 1) // 16 * 16
    return flat.as_strided((_BLOCKS, _BLOCK), (step, 1)).reshape(-1)


def _constants(memory: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[bool]:
    """Whether each range of bytes holds one element over and over. `sizes`: bytes an element.

    Most do not within their first 64 elements: that is asked of all, a device being waited for once.
    """
    heads: dict[torch.device, list[torch.Tensor]] = {}
    for flat, size in zip(memory, sizes, strict=True):
        head = flat[: 64 * size]
        heads.setdefault(flat.device, []).append((head[size:] == head[:-size]).all())
    likely = {device: iter(torch.stack(found).tolist()) for device, found in heads.items()}
    return [
        next(likely[flat.device]) and torch.equal(flat[size:], flat[:-size])
        for flat, size in zip(memory, sizes, strict=True)
    ]


def _table(words: Sequence[int]) -> dict[int, _Storage]:
    rows = (words[start : start + _FIELDS] for start in range(0, len(words), _FIELDS))
    return {number: _Storage(kind >> _BITS, kind & (1 << _BITS) - 1, *rest) for number, kind, *rest in rows}


def _groups(digests: Sequence[int]) -> str:
    by_value: dict[int, list[int]] = {}
    for rank, value in enumerate(digests):
        by_value.setdefault(value, []).append(rank)
    return ", ".join(f"ranks {ranks} hold {value:016x}" for value, ranks in by_value.items())


__all__ = ["Held", "Memory", "shards"]
