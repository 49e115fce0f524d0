# SPDX-License-Identifier: Apache-2.0
"""Source tensors that fill a storage together, each a part of it: experts of a layer, parts of a fused matrix.

A rehearsal puts such a storage together of pages of their file (`pages.py`), and gives its loader views of it: what the
loader copies then is there already, and `copy_` of elements onto themselves does nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine import pages
from weightlife._engine.ledger import Region
from weightlife._engine.pages import Place
from weightlife._engine.rules import PROBE_BYTES
from weightlife._engine.skeleton import DTYPE_NAMES, view_on
from weightlife._engine.trust import SAMPLE_ONE_IN, Trust

if TYPE_CHECKING:
    from weightlife._engine.manifest import Received
    from weightlife._engine.rehearsal import Rehearsal

# Bytes of a storage below which its pieces are copied as ever.
LEAST = 1 << 18


class Pieces:
    """The pieces of one rehearsal.

    Args:
        rehearsal: whose group it is.
        place: where a source tensor is, if that is in a file; None: nothing may stand for what a loader writes.
        files: to take pages of.
    """

    def __init__(
        self, rehearsal: Rehearsal, place: Callable[[str], Place | None] | None, files: pages.Files
    ) -> None:
        self._rehearsal = rehearsal
        self._files = files
        self.begins: dict[int, int] = {}  # number of a storage that is put together -> its place in a page
        self._of: dict[str, tuple[int, int, Place]] = {}  # name -> number, byte, where it is
        self._whole: dict[int, pages.Assembled] = {}
        self._ends: list[
            tuple[str, int, int, bytes, bytes]
        ] = []  # name, address, bytes, first and last of them
        if place is not None:
            self._find(place)

    def _find(self, place: Callable[[str], Place | None]) -> None:
        life, group = self._rehearsal.life, self._rehearsal.group
        names, expected = life.manifest.names, life.manifest.expected
        mine: dict[int, list[tuple[str, Region]]] = {}
        for name in group.names:
            for number, part in names[name].writes:
                mine.setdefault(number, []).append((name, part))
        for number, parts in mine.items():
            storage = life.skeleton.storages[number]
            if (
                number not in group.numbers
                or number in life.manifest.reads_first
                or storage.nbytes < LEAST
                or storage.device.type != "cpu"
                or len(parts) < 2
                or len(expected[number]) != len(parts)
                or expected[number] != dict.fromkeys((part for _, part in parts), 1)
            ):
                continue
            size, dtype = storage.dtype.itemsize, DTYPE_NAMES[storage.dtype]
            found: list[tuple[str, int, int, Place]] = []
            for name, part in parts:
                known, where = names[name], place(name)
                if (
                    where is not None
                    and part.strides == (1,)
                    and known.dtype == dtype
                    and len(known.writes) == 1
                    and known.nbytes == part.numel * size
                    and (where.header.dtype, where.header.shape) == (dtype, known.shape)
                    and self._files.descriptor(where) is not None
                ):
                    found.append((name, part.offset * size, known.nbytes, where))
            begin = pages.residue([one[1:] for one in found], storage.nbytes, size)
            if begin is not None and len(found) == len(parts):
                self.begins[number] = begin
                self._of.update((name, (number, at, where)) for name, at, _, where in found)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def instead(self, name: str) -> torch.Tensor | None:
        """A source tensor at its place among the others of its storage; None: it has none, read it.

        Raises:
            OSError: its file can't be read, or lacks a part.
        """
        piece = self._of.get(name)
        if piece is None:
            return None
        number, at, place = piece
        rehearsal, entry = self._rehearsal, self._rehearsal.life.skeleton.storages[number]
        whole = self._whole.get(number)
        if whole is None:
            if not rehearsal.free(number):
                return None
            whole = self._whole[number] = pages.Assembled(entry.nbytes, self.begins[number], self._files)
            rehearsal.stand_for(number, whole.storage)
            if isinstance(rehearsal.trust, _Trust):
                rehearsal.trust.stands(number)
        known = rehearsal.life.manifest.names[name]
        address = whole.put(at, known.nbytes, place)
        last = address + known.nbytes - PROBE_BYTES
        if last >= address:
            ends = ctypes.string_at(address, PROBE_BYTES), ctypes.string_at(last, PROBE_BYTES)
            self._ends.append((name, address, last, *ends))
        stride, strides = 1, []
        for length in reversed(known.shape):
            strides.append(stride)
            stride *= length
        return view_on(
            whole.storage, entry.dtype, at // entry.dtype.itemsize, known.shape, tuple(strides[::-1])
        )

    def changed(self) -> list[str]:
        """Pieces that are not at their place any more: a loader wrote something else there."""
        at = ctypes.string_at
        return [
            name
            for name, begin, last, first, end in self._ends
            if at(begin, PROBE_BYTES) != first or at(last, PROBE_BYTES) != end
        ]

    def looked(self) -> None:
        """Loaders are done: hooks may change what they like."""
        self._ends.clear()

    def trust(self) -> Trust:
        """Rules for this rehearsal."""
        return _Trust(self._rehearsal)

    def drop(self) -> None:
        """Let go of everything."""
        self._whole.clear()
        self._ends.clear()


class _Trust(Trust):
    """Items by rule whose tensor is at its place already: a copy that changes nothing.

    Marks would have to be overwritten, and nothing is. That an item wrote somewhere else among the pieces shows at
    their ends; that it wrote nothing at all shows in the first item of a kind in each batch and in samples, which are
    observed.
    """

    session: Rehearsal

    def stands(self, number: int) -> None:
        """Memory of the source stands for what a load writes to a storage."""
        track = self.stage.by_number[number]
        self.ready[number] = number in self.rules.regions and (
            track.placeholder or not self._touched_by_others(track, number)
        )

    def rule(self, name: Any, tensor: Any) -> Received | None:
        """As ever; a piece is on memory of the model, and is its own."""
        entry = self.names.get(name) if type(name) is str else None
        if entry is None or name not in self.session.pieces or not self.ready.get(entry.number):
            return super().rule(name, tensor)
        if entry.kind < 0 or name in self.received or tensor.shape != entry.shape:
            return None
        self.left -= 1
        if self.left <= 0 or entry.kind not in self.seen:
            if self.rules.off:
                return None
            self.left = self._random.randrange(1, 2 * SAMPLE_ONE_IN)
            self.sample = entry
            return None
        return entry

    def check(self, numbers: Iterable[int] | None = None) -> None:
        """As ever, and whether every piece is still at its place."""
        super().check(numbers)
        changed = self.session.pieces.changed()
        if changed and self.done:
            raise self.broken("a loader did not write what it wrote in the first load", changed)


__all__ = ["Pieces"]
