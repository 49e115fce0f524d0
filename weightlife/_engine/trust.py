# SPDX-License-Identifier: Apache-2.0
"""Later loads by rule: items whose writes are known run their loader without the dispatch mode over it.

Believed, never on faith. Before the loader gets to a storage its memory for generation B is there, in the slots of
the model, with a random word at both ends of every region that a rule knows: a region that is credited and was not
written shows at the finish. The first item of each kind, and one in some hundred after it, is observed as ever and
compared. What was not seen is said with it: when a rule turns out to be wrong after items ran by it, nobody knows what
was written instead, so the update fails, and the model serves nothing until a complete one commits.

Not by rule: memory that serves (in place), storages that were written or staged before, sources on memory of the
model, repeats, calls of another loader or under a caller's own dispatch modes, sessions that look at every tensor
(digests, finite values), and whatever the rules leave out.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine.footprint import attributes_differ
from weightlife._engine.rules import PROBE_BYTES, same_loader
from weightlife._engine.rules import identity as identity_of
from weightlife._engine.skeleton import DTYPE_NAMES, view_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightlife._engine.manifest import Received
    from weightlife._engine.session import WeightLoadSession
    from weightlife._engine.track import Track

# One item in so many, on average, is observed and compared. An observed one costs 20 us more than one by rule.
SAMPLE_ONE_IN = 256

_NUMBER = attrgetter("number")
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Trust:
    """The rules of one session, and what was done by them.

    Args:
        session: prepared, with its stage.
    """

    def __init__(self, session: WeightLoadSession) -> None:
        rules = session.life.manifest.rules
        assert rules is not None and session.stage is not None
        self.session = session
        self.rules = rules
        self.stage = session.stage
        self.names = session.life.manifest.names
        self.received = session.intake.received
        self.index = session.stage.index
        self.ready: dict[int, bool] = {}  # storage number -> whether its writes may go unobserved
        self.seen: set[int] = set()  # kinds of which an item was observed and was as the rule says
        self.done: list[Received] = []  # by rule, in this session
        self.pending: list[Received] = []  # of these, those that the ledger does not have yet
        self.streamer = session.streamer
        # Only where nothing asks for the ledger between two items may it wait.
        self.deferred = session.explicit and session.streamer is None
        self.sample: Received | None = None  # the rule of the item that is observed though it has one
        self.simple = self.deferred and session.announced is None
        self._random = random.Random(os.urandom(16))
        self._word = os.urandom(PROBE_BYTES)
        self._words: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.left = self._random.randrange(1, 2 * SAMPLE_ONE_IN)
        self._planted: dict[int, Track] = {}
        # Storage -> names of one region each that were credited, or seen to write what their rule says.
        self._sound: Counter[int] = Counter()
        self.cut = False  # the last call ended inside of an item by rule

    def serves(self, load: Any) -> bool:
        """Whether items of a call may run by rule."""
        session = self.session
        return (
            not self.rules.off and not session.foreign_modes and same_loader(self.rules.loader, identity_of(load))
        )  # fmt: skip

    # -- one item ----------------------------------------------------------------------------------------------

    def rule(self, name: Any, tensor: Any) -> Received | None:
        """The rule by which an item may run unobserved now, or None.

        Every line here is paid for each tensor of a load: 94,000 of them in a large mixture of experts.
        """
        entry = self.names.get(name) if type(name) is str else None
        if entry is None or entry.kind < 0 or type(tensor) is not torch.Tensor:
            return None
        if (
            tensor.shape != entry.shape
            or DTYPE_NAMES[tensor.dtype] is not entry.dtype
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or name in self.received
            or tensor.untyped_storage()._cdata in self.index
        ):
            return None
        ready = self.ready
        for number, _ in entry.writes:
            if not (ready[number] if number in ready else self._prepare(number)):
                return None
        if not self.simple and not self._agreed(name, entry):
            return None
        self.left -= 1
        if self.left <= 0 or entry.kind not in self.seen:
            if self.rules.off:
                return None
            self.left = self._random.randrange(1, 2 * SAMPLE_ONE_IN)
            self.sample = entry
            return None
        return entry

    def _agreed(self, name: str, entry: Received) -> bool:
        """Whether nothing else that a session may be asked to look at stands against an item."""
        announced, streamer = self.session.announced, self.streamer
        if announced is not None:
            header = announced.get(name)
            if header is None or (header.shape is not None and tuple(header.shape) != entry.shape):
                return False
            if header.dtype and header.dtype != entry.dtype:
                return False
        if streamer is not None:
            for number, _ in entry.writes:
                unit = streamer.by_number.get(number)
                if unit is not None and unit.done:
                    return False
        return True

    def take(self, name: str, entry: Received) -> None:
        """An item is handed to the loader unobserved: credit what its rule says."""
        self.received[name] = entry
        self.pending.append(entry)
        if not self.deferred:
            self.fold()

    def fold(self) -> None:
        """Enter what is pending: somebody is going to ask the ledger."""
        if self.pending:
            self.session.intake.credit(self.pending, self._fill() if self.deferred else frozenset())
            self.done += self.pending
            self.pending.clear()

    def _fill(self) -> set[int]:
        """Enter storages that are whole with what is pending, without looking at their regions. Returns them.

        Each name of `alone` writes one region that no other name writes, and comes once (`received`). So as many
        of them as there are regions are all regions, if nothing else was written there.
        """
        filled = set()
        for number, count in Counter(map(_NUMBER, self.pending)).items():
            if number < 0:
                continue
            self._sound[number] += count
            track = self.stage.by_number[number]
            before = self._sound[number] - count
            if self._sound[number] == self.rules.alone.get(number) and track.written.total() == before:
                expected = self.session.life.manifest.expected[number]
                track.written = Counter(expected)
                track.ever.update(dict(expected))  # of a plain dict a set takes the hashes over: 0.1 us each
                filled.add(number)
        return filled

    def observe(self, name: str) -> None:
        """An item of this name is going to be observed. What is pending waits on, for nobody who looks by the ledger."""
        if not self.deferred:
            self.fold()
        entry = self.names.get(name)
        # Also for names without a rule: what they write must be staged before the loader sees the item, or a later
        # one on the same storage could come by a view of the memory that serves.
        for number, _ in entry.writes if entry is not None else ():
            if number not in self.ready:
                self._prepare(number)

    def compare(self, name: str, found: Received, plain: bool) -> None:
        """An item was observed: was it as its rule says? `plain`: it copied its tensor, and did nothing else.

        Raises:
            LoaderChangedError: it was not, and items like it ran by rule before.
        """
        rule, self.sample = self.sample, None
        if rule is None:
            return
        if plain and found.writes == rule.writes:
            self.seen.add(rule.kind)
            if rule.part is not None:
                self._sound[rule.number] += 1
            return
        believed = rule.kind in self.seen
        self._stop(f"{name} was not loaded as in the first load")
        if believed:
            raise self.broken(
                "an item was loaded otherwise than in the first load, after others like it", [name]
            )

    def strayed_from(self, name: str) -> None:
        """An item is about to take another part of its tensor than in the first load.

        Raises:
            LoaderChangedError: items like it ran by rule before.
        """
        rule, self.sample = self.sample, None
        entry = rule or self.names.get(name)
        believed = entry is not None and entry.kind in self.seen
        self._stop(f"{name} was cut otherwise than in the first load")
        if believed:
            raise self.broken(
                "an item was cut otherwise than in the first load, after others like it", [name]
            )

    def broken(self, message: str, names: list[str]) -> errors.LoaderChangedError:
        """The error for a rule that items ran by and that does not hold. Nobody knows what they wrote: no way back."""
        self._stop(message)
        self.session.life.unsafe = True
        return errors.LoaderChangedError(
            message, model=self.session.life.name, tensors=names, session=self.session.id
        )

    def _stop(self, why: str) -> None:
        """No rule of this model is believed any more. What was done by them in this session is still checked."""
        self.rules.off = self.rules.off or why
        self.seen.clear()

    # -- storages ----------------------------------------------------------------------------------------------

    def _prepare(self, number: int) -> bool:
        """Get a storage ready for writes that nobody sees: B's memory in place, marked where rules will write."""
        self.ready[number] = False
        session, stage = self.session, self.stage
        if self.streamer is not None:
            self.streamer.warm(number)
        track = stage.by_number.get(number)
        receiver = session.receiver
        assert receiver is not None
        if (
            track is None
            or number not in self.rules.regions
            or track.ever
            or track.irregular
            or track.raw
            or track.retired
            or track.stage is not None
        ):
            return False
        if not track.placeholder and (not stage.isolated or self._touched_by_others(track, number)):
            return False
        receiver.unseen(self._mark, track)
        self._planted[number] = track
        self.ready[number] = True
        return True

    def _touched_by_others(self, track: Track, number: int) -> bool:
        """Whether somebody gave a parameter that serves other attributes (a loader) than the constructor did."""
        skeleton = self.session.life.skeleton
        for index in skeleton.storages[number].tensors:
            made = skeleton.tensors[index]
            live = made.ref()
            if live is not None and attributes_differ(made.attributes, getattr(live, "__dict__", {})):
                return True
        return not track.tensors

    def _mark(self, track: Track) -> None:
        """Make B's memory of a storage, and put the word where rules will write."""
        receiver = self.session.receiver
        assert receiver is not None
        if not track.placeholder:
            receiver.stage_quietly(track)
        ends = self._ends(track)
        if ends:
            start = track.current.data_ptr()
            for at in ends:
                ctypes.memmove(start + at, self._word, PROBE_BYTES)
            return
        with receiver.quietly():
            flat, word, index = self._probes(track)
            flat[index] = word

    def _ends(self, track: Track) -> Sequence[int]:
        """Where the word is put by itself, in bytes; () where all are written at once."""
        assert track.number is not None
        memory = track.current
        if memory.device.type != "cpu":
            return ()
        ends = self.rules.ends(track.number, track.dtype.itemsize)
        return ends if ends and max(ends) + PROBE_BYTES <= memory.nbytes() else ()

    def _probes(self, track: Track) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All of B's memory of a storage as integers, the word at both ends as such, and where it is looked for."""
        assert track.number is not None
        integer = _INTEGER[track.dtype.itemsize]
        flat = view_on(track.current, integer, 0, (track.numel,), (1,))
        key = integer, flat.device
        if key not in self._words:
            both = torch.frombuffer(bytearray(self._word * 2), dtype=torch.uint8)
            self._words[key] = both.view(integer).to(flat.device)
        return flat, self._words[key], self.rules.probes(track.number, track.dtype, flat.device)

    def _left(self, track: Track) -> list[int]:
        """Positions of the rules' regions of which an end still holds the word."""
        ends = self._ends(track)
        if ends:
            start, word = track.current.data_ptr(), self._word
            held = [ctypes.string_at(start + at, PROBE_BYTES) == word for at in ends]
            return [i // 2 for i, there in enumerate(held) if there] if True in held else []
        flat, both, index = self._probes(track)
        left = (flat[index] == both).view(len(index), 2, -1).all(dim=2).any(dim=1)
        found: list[int] = left.nonzero().flatten().tolist() if bool(left.any()) else []
        return found

    def strayed(self) -> bool:
        """For an abort: whether an item that ran by rule left its marks; the last one may have been cut short."""
        self.fold()
        last = self.received.get(next(reversed(self.received), "")) if self.cut else None
        self.done = [entry for entry in self.done if entry is not last]
        try:
            self.check()
        except errors.LoaderChangedError:
            return True
        return False

    def check(self, numbers: Iterable[int] | None = None) -> None:
        """Everything that was credited must have been written. Before anything is made of it.

        Args:
            numbers: only these storages (their layer is going to be processed).

        Raises:
            LoaderChangedError: it was not.
        """
        self.fold()
        wanted = list(self._planted) if numbers is None else [n for n in numbers if n in self._planted]
        for number in wanted:
            track = self._planted.pop(number)
            self.ready[number] = False
            left = self._left(track)
            if not left:
                continue
            regions = self.rules.regions[number]
            marked = {regions[i] for i in left}
            bad = {
                id(entry) for entry in self.done if any(n == number and p in marked for n, p in entry.writes)
            }
            if bad:
                names = [name for name, entry in self.received.items() if id(entry) in bad]
                raise self.broken("a loader did not write what it wrote in the first load", names)


__all__ = ["SAMPLE_ONE_IN", "Trust"]
