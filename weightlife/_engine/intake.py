# SPDX-License-Identifier: Apache-2.0
"""The intake of a session: the receiver's findings, entered in the ledger and judged one by one.

Here lives what must be decided at the moment of a write: its source name, its epoch, whether the cast is legal, and
whether an operation reads elements that nobody has given a value yet.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightlife import _casts, errors
from weightlife._engine import announce, ledger, spots
from weightlife._engine.cuts import Cut, cut_of, strays
from weightlife._engine.ledger import Region
from weightlife._engine.manifest import Received
from weightlife._engine.rules import copies_own
from weightlife._engine.signatures import COPY_OPERATORS, accumulates, signature_of, spreads
from weightlife._engine.skeleton import dtype_name, storage_key, view_on
from weightlife._engine.track import Track, mask, region_of, whole
from weightlife._names import prefix_change

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession


class Intake:
    """What a session has received so far. Fed by a `Receiver`, read when the session is finished."""

    def __init__(self, session: WeightLoadSession) -> None:
        self.session = session
        self.received: dict[str, Received] = {}
        self.tensors = 0
        self.nbytes = 0
        self.current: Received | None = None
        self.name = ""
        self.calls = 0
        self.epochs = 1
        self.recording = False
        self.sources: set[int] = set()  # storages of the tensors that this call brought
        self.unplaced = False  # it brought one that no write belongs to
        # What this session's loaders did, for a manifest that is learned from it.
        self.casts: dict[tuple[int, str], set[Region]] = {}
        self.spread: set[int] = set()
        self._tensor: torch.Tensor | None = None
        self._cuts: list[Cut | None] = []  # what the writes of the present name take of it
        self._shared: dict[tuple[Cut | None, ...], tuple[Cut | None, ...]] = {}
        self.misfit = ""  # a copy that the loader tried last, and that can't be
        self._sequence = 0
        self._units: dict[int, int] = {}  # storage number -> unit of layers that share storages
        self._lacking: dict[
            int, int
        ] = {}  # unit -> writes of a complete load that are not here in this epoch
        self._whole_at: dict[int, int] = {}  # unit -> sequence number at which nothing lacked

    # -- the stream --------------------------------------------------------------------------------------------

    def begin(self, name: Any, tensor: Any, followed: bool = True) -> torch.Tensor | None:
        """A source tensor is about to be handed to the loader. `followed`: the writes that come next are its.

        Returns what the loader gets instead, or None: a sender may send what serves back, by views or by the
        parameters themselves. It means generation A's values, and these objects show B as soon as that is written.

        Raises:
            CompletenessError: of what this tensor is, by policy. SessionStateError: it is on memory that is only
                about to be filled.
        """
        instead = None
        text = str(name)
        known = isinstance(tensor, torch.Tensor)
        nbytes = tensor.numel() * tensor.element_size() if known else 0
        shape = tuple(tensor.shape) if known else ()
        dtype = dtype_name(tensor) if known else type(tensor).__name__
        entry = self.received[text] = Received(shape, dtype, nbytes)
        self.tensors += 1
        self.nbytes += nbytes
        if known:
            key = storage_key(tensor) or 0
            self.sources.add(key)
            assert self.session.receiver is not None
            track = self.session.receiver.index.get(key)
            if track is not None:
                instead, key = self._of_a(text, tensor, track), int(track.storage._cdata)
            if followed:
                self.session.receiver.sent_on = 0 if track is None else key
        self.unplaced = self.unplaced or not followed
        if followed:
            self.name, self.current, self._tensor = text, entry, tensor if known else None
            self._cuts, self.misfit = [], ""
        elif known:
            self._remember_partner(text, entry, tensor)  # there is no later moment
        if known and not self.session.foreign_modes:
            self._check_known(text, dtype, shape)
        if self.session.announced is not None:
            announce.arrived(self.session, text, dtype, shape)
        if self.session.streamer is not None:
            self.session.streamer.begin(text)
        if self.session.sent is not None:
            self.session.sent.arrived(text, tensor)
        if known and self.session.settings.nonfinite != "off" and tensor.is_floating_point():
            self._check_finite(text, tensor)
        return instead

    def _of_a(self, name: str, tensor: torch.Tensor, track: Track) -> torch.Tensor:
        """Generation A's elements where a source tensor is a view of the model's memory."""
        if track.placeholder:
            raise errors.SessionStateError(
                f"the source sends memory of {track.path} that is being replaced",
                model=self.session.life.name, tensors=[name], session=self.session.id,
                hint="compute what you send before the update begins (a list, not a generator over live weights)",
            )  # fmt: skip
        assert self.session.stage is not None
        memory = track.storage
        saved = self.session.stage.undo.get(int(memory._cdata))
        if saved is not None:
            memory = saved.untyped_storage()
        elif not self.session.stage.isolated:
            self._still_a(name, tensor, track)
        return view_on(memory, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _still_a(self, name: str, tensor: torch.Tensor, track: Track) -> None:
        """Nothing was kept of what this update has written: what is sent of it must not be that, but for itself.

        Raises:
            SessionStateError: it is.
        """
        part = region_of(track, tensor)
        known = self.session.life.manifest.names.get(name)
        if (not track.ever and not track.irregular) or (
            known is not None and (track.number, part) in known.writes
        ):
            return
        if part is None or (part.numel and bool(mask(track)[ledger.counts(track.numel, [part]) > 0].any())):
            raise errors.SessionStateError(
                f"the source sends memory of {track.path} that this update has overwritten",
                model=self.session.life.name, tensors=[name], session=self.session.id,
                hint="send copies that were made before the update began, or keep what was: isolation='staged', or an"
                " undo budget",
            )  # fmt: skip

    def _named(self) -> list[str]:
        return [self.name] if self.name else []

    def _remember_partner(self, name: str, entry: Received, tensor: torch.Tensor) -> None:
        life = self.session.life
        canonical = life.aliases.get(name)
        if canonical is not None:
            entry.digest = digest(tensor, life.skeleton.tensors[life.skeleton.named(canonical)].dtype)

    def _check_known(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Against the last complete load, before the loader sees it.

        A loader of a sharded layer narrows what it gets: a tensor that is too large is cut in silence. One that
        converts by itself hides a cast from the ledger.
        """
        session = self.session
        known = session.life.manifest.names.get(name)
        if known is None or not known.writes or (known.shape == shape and known.dtype == dtype):
            return
        context: dict[str, Any] = {"model": session.life.name, "tensors": [name], "session": session.id}
        spread = any(number in session.life.manifest.spread for number, _ in known.writes)
        if math.prod(shape) != math.prod(known.shape) and not spread:
            message = f"{list(shape)} arrived, the last complete load had {list(known.shape)}"
            session.problem(errors.ShapeMismatchError(message, **context), session.settings.shapes)
        storages, casts = session.life.skeleton.storages, session.life.manifest.casts
        fits = any(
            (number, dtype) in casts
            or _casts.allowed(dtype, str(storages[number].dtype).removeprefix("torch."))
            for number, _ in known.writes
        )
        if not fits and not _casts.allowed(dtype, known.dtype):
            message = f"{dtype} arrived, the last complete load had {known.dtype}: data of another kind"
            session.problem(errors.DtypeMismatchError(message, **context), session.settings.casts)

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.numel() == 0:
            return
        # 8-bit floats have no reduction everywhere; bfloat16 represents all of their values.
        wide = tensor if tensor.element_size() > 1 else tensor.to(torch.bfloat16)
        # One pass without a mask in memory: NaN comes through both, infinity through one of them.
        low, high = torch.aminmax(wide.detach())
        if math.isfinite(low) and math.isfinite(high):
            return
        self.session.problem(
            errors.NonFiniteError(
                "a received tensor holds NaN or infinity",
                model=self.session.life.name, tensors=[name], session=self.session.id,
            ),
            self.session.settings.nonfinite,
        )  # fmt: skip

    def end(self) -> None:
        """The loader is done with it."""
        trust = self.session.trust
        if trust is not None and trust.sample is not None and self.current is not None:
            assert self.session.receiver is not None
            trust.compare(self.name, self.current, not self.session.receiver.odd)
        self.unplaced = self.unplaced or self.current is None or not self.current.writes
        if self.current is not None and not self.current.writes and self._tensor is not None:
            self._remember_partner(self.name, self.current, self._tensor)
        if self.current is not None:
            taken = tuple(self._cuts)
            self.current.cuts = self._shared.setdefault(taken, taken)
        self._tensor = None
        self.current = None
        if self.session.streamer is not None:
            self.session.streamer.between()
        self.name = ""

    def explain(self, error: Exception) -> errors.WeightlifeError | None:
        """What a loader's bare assertion meant, where the manifest tells: the tensor had another shape before."""
        session = self.session
        names = session.life.manifest.names
        known = names.get(self.name)
        if self.current is None:
            return None
        if self.misfit:
            return self._explained(self.misfit, error)
        if known is None and not session.life.manifest.provisional:
            self._explain_name(error)
        if known is None or known.shape == self.current.shape:
            return None
        return self._explained(
            f"{list(self.current.shape)} arrived, the last complete load had {list(known.shape)}", error
        )

    def _explained(self, what: str, error: Exception) -> errors.ShapeMismatchError:
        session = self.session
        rank, ranks = session.report.rank, session.report.world_size
        where = f" on rank {rank} of {ranks}" if ranks > 1 else ""
        problem = errors.ShapeMismatchError(
            f"{what}{where}; the loader said: {errors.safe_text(error)}",
            model=session.life.name, tensors=self._named(), session=session.id,
        )  # fmt: skip
        session.account.violation(problem)
        return problem

    def _explain_name(self, error: Exception) -> None:
        """A name that no complete load had, and that another prefix would make known: said, not raised.

        Names are the loader's business, and its exception comes out as it is.
        """
        session = self.session
        change = prefix_change(list(self.received), session.life.manifest.names)
        if change is None:
            return
        problem = errors.UnexpectedTensorError(
            f"the loader does not know the name; of those that came so far, {change}. It said: {errors.safe_text(error)}",
            model=session.life.name, tensors=[self.name], session=session.id,
        )  # fmt: skip
        session.problem(problem, "warn")

    # -- operations on the model's storages --------------------------------------------------------------------

    def on_write(self, track: Track, view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        """A write is about to land.

        Raises:
            DtypeMismatchError, BypassError: it must not, by policy.
        """
        session = self.session
        if session.streamer is not None:
            session.streamer.check(track)
        if not self.recording or track.number is None:
            track.hooked = True
            return
        if session.trust is not None and not copies_own(func, args, self._tensor):
            assert session.receiver is not None
            session.receiver.odd = True
        if track.placeholder and self.session.foreign_modes:
            # Such a mode (a sparse update) turns copies into changes of the storage that serves, and finds none here.
            raise errors.BypassError(
                "a dispatch mode of the caller stands over the load, and this layer is rebuilt",
                model=self.session.life.name, layer=track.path, tensors=self._named(), session=self.session.id,
                hint="send whole tensors for layers whose weights are processed",
            )  # fmt: skip
        cut = None
        if self.current is not None and view.dtype.itemsize == track.dtype.itemsize:
            cut = cut_of(func, args, view, self._tensor)
        self._check_cast(track, view, func, args)
        chosen = spots.written(func, args, view)
        parts = []
        for where in (view,) if chosen is None else chosen.views:
            part = region_of(track, where)
            if part is None:
                raise errors.BypassError(
                    f"{track.path} is written in pieces smaller than its elements, which can't be accounted for",
                    model=self.session.life.name, layer=track.path, tensors=self._named(), session=self.session.id,
                )  # fmt: skip
            if part.numel:
                parts.append(part)
        if chosen is None and parts and self.current is not None:
            self._check_cut(track, track.number, parts[0], cut)
        reads = accumulates(func, args, int(track.current._cdata)) or (
            chosen is not None and not chosen.known
        )
        if reads and parts:
            self._settle()
            fresh = [part for part in parts if part not in track.ever]
            if fresh:
                self._before_reading(track, fresh, func)
        for part in parts:
            self._enter(track, track.number, part)
            if self.current is not None:
                self.current.wrote(track.number, part)
                self._cuts.append(cut if chosen is None else None)

    def _check_cut(self, track: Track, number: int, part: Region, cut: Cut | None) -> None:
        """A loader that cuts the shard of another rank, or along another dimension, writes the right elements.

        Raises:
            WrongPartError: it takes others of its tensor than the last complete load, by policy. LoaderChangedError:
                so it does, after others like it ran by rule.
        """
        session, current = self.session, self.current
        assert current is not None
        known = session.life.manifest.names.get(self.name)
        if known is None or known.shape != current.shape:
            return
        found = strays(cut, number, part, known)
        if found is None or not (track.placeholder or self._as_made(number)):
            return
        if session.trust is not None:
            session.trust.strayed_from(self.name)
        now, then = (np.unravel_index(index, current.shape or (1,)) for index in found)
        rank, ranks = session.report.rank, session.report.world_size
        session.problem(
            errors.WrongPartError(
                f"the loader takes another part of {list(current.shape)} than the last complete load: element "
                f"{[int(i) for i in now]} where that took {[int(i) for i in then]}"
                + (f"; on rank {rank} of {ranks}" if ranks > 1 else ""),
                model=session.life.name, layer=track.path, tensors=[self.name], session=session.id,
            ),
            session.settings.shapes,
        )  # fmt: skip

    def _as_made(self, number: int) -> bool:
        """Whether tensors lie on a storage that serves as the constructor laid them: somebody may have transposed one."""
        skeleton = self.session.life.skeleton
        for index in skeleton.storages[number].tensors:
            made = skeleton.tensors[index]
            live = made.ref()
            lies = None if live is None else (tuple(live.shape), tuple(live.stride()), live.storage_offset())
            if lies is not None and lies != (made.shape, made.stride, made.offset):
                return False
        return True

    def _enter(self, track: Track, number: int, part: Region) -> None:
        """A region was written."""
        if not self.session.explicit:  # only an update without an end has epochs
            self._sequence += 1
            self._maybe_new_epoch(track, part)
            self._count(number, part, track.written[part] + 1)
            track.sequence[part] = (self._sequence, self.calls)
        track.written[part] += 1
        if self.session.streamer is not None:
            self.session.streamer.count(number, part, track.written[part])
        track.ever.add(part)

    def credit(self, entries: list[Received], filled: AbstractSet[int] = frozenset()) -> None:
        """Enter what items wrote that were not observed. They are in `received` already, in their order.

        `filled`: storages that have been entered, for those that write to one storage only.
        """
        stage = self.session.stage
        assert stage is not None
        self.tensors += len(entries)
        self.nbytes += sum([entry.like[2] for entry in entries])
        if self.session.explicit and self.session.streamer is None:
            regions: dict[int, list[Region]] = {}
            for entry in entries:
                if entry.part is not None:  # nearly all
                    number = entry.number
                    if number in filled:
                        continue
                    if number in regions:
                        regions[number].append(entry.part)
                    else:
                        regions[number] = [entry.part]
                    continue
                for number, part in entry.writes:
                    regions.setdefault(number, []).append(part)
            for number, parts in regions.items():
                track = stage.by_number[number]
                track.written.update(parts)
                track.ever.update(parts)
            return
        for entry in entries:
            for number, part in entry.writes:
                self._enter(stage.by_number[number], number, part)

    def _settle(self) -> None:
        """Somebody looks at what was written so far: enter what ran by rule."""
        if self.session.trust is not None:
            self.session.trust.fold()

    def unobserved(self) -> None:
        """A loader failed at an item that ran by rule: it is the one that errors are about."""
        self.name = next(reversed(self.received), "")
        self.current = self.received.get(self.name)

    def on_read(self, track: Track, view: torch.Tensor, func: Any) -> None:
        """An operation reads generation B.

        Raises:
            BypassError: elements that have no value yet.
        """
        if self.session.streamer is not None:
            self.session.streamer.check(track)
        if not self.recording or track.number is None or track.irregular:
            return
        self._settle()
        stage = self.session.stage
        if not track.placeholder and track.stage is None:
            # Memory that serves: only loaders that read first want the constructor's values instead.
            if track.number not in self.session.life.manifest.reads_first or self.session.partial != "forbid":
                return
            if stage is None or not stage.isolated:
                return
            stage.stage_live(track)
        part = region_of(track, view)
        if part is not None and part.numel and part not in track.ever:
            self._before_reading(track, [part], func)

    def _before_reading(self, track: Track, parts: list[Region], func: Any) -> None:
        """What is read and was not written must be what a cold load would find there: the constructor's value.

        A delta sender of a partial update reads what serves: for a live storage that is generation A.
        """
        assert track.number is not None
        if whole(track):
            return
        unwritten = (ledger.counts(track.numel, parts) > 0) & ~mask(track)
        if not unwritten.any():
            return
        memory = view_on(track.current, track.dtype, 0, (track.numel,), (1,))
        if not track.placeholder and self.session.partial != "forbid":
            chosen = torch.from_numpy(unwritten).to(memory.device)
            memory[chosen] = view_on(track.storage, track.dtype, 0, (track.numel,), (1,))[chosen]
            return
        if not self.session.life.skeleton.fill_kept(track.number, memory, unwritten):
            name = "an operation" if func is None else func._schema.name
            raise errors.BypassError(
                f"{name} reads elements of {track.path} that this update has not written",
                model=self.session.life.name, layer=track.path, tensors=self._named(),
                session=self.session.id, hint="write them first; a delta of processed weights cannot be applied",
            )  # fmt: skip

    def _unit(self, number: int) -> int:
        """The unit that a storage belongs to: layers that share a storage are covered together, or not at all."""
        if not self._units:
            parent: dict[int, int] = {}

            def root(layer: int) -> int:
                while parent.setdefault(layer, layer) != layer:
                    layer = parent[layer]
                return layer

            storages = self.session.life.skeleton.storages
            for storage in storages:
                first, *rest = [root(layer) for layer in storage.layers] or [-1]
                for other in rest:
                    parent[root(other)] = root(first)
            for index, storage in enumerate(storages):
                self._units[index] = root(next(iter(storage.layers), -1))
            for index, regions in self.session.life.manifest.expected.items():
                unit = self._units[index]
                self._lacking[unit] = self._lacking.get(unit, 0) + sum(regions.values())
        return self._units[number]

    def _count(self, number: int, part: Region, times: int) -> None:
        """Keep the number of expected writes that each unit still lacks, and when it last was whole."""
        unit = self._unit(number)
        if times > self.session.life.manifest.expected.get(number, Counter()).get(part, 0):
            return
        self._lacking[unit] = self._lacking.get(unit, 0) - 1
        if self._lacking[unit] == 0:
            self._whole_at[unit] = self._sequence

    def _maybe_new_epoch(self, track: Track, part: Region) -> None:
        """A repeat of what an earlier call brought: later values win, and its layers must be covered anew.

        Of layers that were whole, what came until then belongs to the old epoch. Of some that were not, or after a
        failure (whose tail may be here), only what came no later than the repeated region does: the rest may be of
        this pass already. A repeat within one call is one stream.
        """
        life, stage = self.session.life, self.session.stage
        assert stage is not None
        assert track.number is not None
        if life.manifest.provisional:
            return  # after a dummy nobody knows yet how often an element is written
        allowed = max(1, life.manifest.expected.get(track.number, Counter()).get(part, 1))
        if track.written[part] < allowed:
            return
        before, call = track.sequence[part]
        if call == self.calls:
            track.written[part] -= 1  # overwritten within one stream
            return
        unit = self._unit(track.number)
        ended = self.session.partial != "forbid" and self._lacking.get(unit, 0) == 0
        limit = max(before, self._whole_at.get(unit, 0)) if ended else before
        for number, other in stage.by_number.items():
            if self._unit(number) == unit:
                self._forget(number, other, limit)
        if track.written[part] >= allowed:
            self._forget(track.number, track, before)
        self.epochs += 1

    def _forget(self, number: int, track: Track, limit: int) -> None:
        """Drop what came to a storage up to `limit` from the present epoch, except in the present call."""
        expected = self.session.life.manifest.expected.get(number, Counter())
        unit = self._unit(number)
        for old in [o for o, (seen, when) in track.sequence.items() if seen <= limit and when != self.calls]:
            times = min(track.written.pop(old, 0), expected.get(old, 0))
            track.sequence.pop(old, None)
            self._lacking[unit] = self._lacking.get(unit, 0) + times

    def _check_broadcast(self, track: Track, destination: torch.Tensor, given: torch.Tensor) -> None:
        """`copy_` fills a parameter with a smaller tensor in silence; a loader that means it did so at first, too."""
        life = self.session.life
        if given.shape == destination.shape:
            return
        if not _expands(given.shape, destination.shape):
            self.misfit = f"{list(given.shape)} was copied into {list(destination.shape)} of {track.path}"
            return  # torch says so, and a loader may know what to do then
        if not spreads(destination, given) or track.number in life.manifest.spread:
            return
        if life.manifest.provisional:
            if track.number is not None:
                self.spread.add(track.number)
            return
        self.session.problem(
            errors.ShapeMismatchError(
                f"{list(given.shape)} arrived for {list(destination.shape)} and would have been repeated to fill it",
                model=life.name, layer=track.path, tensors=self._named(), session=self.session.id,
            ),
            self.session.settings.shapes,
        )  # fmt: skip

    def _check_cast(self, track: Track, view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        session = self.session
        if func is None or len(args) < 2 or signature_of(func).name not in COPY_OPERATORS:
            return
        pairs = zip(args[0], args[1], strict=False) if isinstance(args[0], (list, tuple)) else [args[:2]]
        target = str(view.dtype).removeprefix("torch.")
        for destination, given in pairs:
            if not isinstance(given, torch.Tensor) or destination.dtype != view.dtype:
                continue
            self._check_broadcast(track, view if destination is args[0] else destination, given)
            source = str(given.dtype).removeprefix("torch.")
            if source == target or track.number is None:
                return
            part = region_of(track, view)
            accepted = part is not None and session.life.manifest.cast_accepted(track.number, source, part)
            if not accepted and not _casts.allowed(source, target):
                session.problem(
                    errors.DtypeMismatchError(
                        f"a {source} tensor for a {target} weight: quantised data in the wrong place",
                        model=session.life.name, layer=track.path, tensors=self._named(), session=session.id,
                    ),
                    session.settings.casts,
                )  # fmt: skip
            if part is not None:
                self.casts.setdefault((track.number, source), set()).add(part)
            return


def _expands(given: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether `copy_` can fill a shape with a tensor of another."""
    if len(given) > len(shape):
        return False
    return all(a in (1, b) for a, b in zip(reversed(given), reversed(shape), strict=False))


def digest(tensor: torch.Tensor, dtype: torch.dtype) -> bytes:
    """BLAKE2 of a tensor's values in a dtype, 16 bytes. Only ever taken of a tied partner that is left out."""
    plain = tensor.detach().to(dtype).contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy(), digest_size=16).digest()
