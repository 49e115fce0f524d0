# SPDX-License-Identifier: Apache-2.0
"""Processing while receiving, in place: a layer whose tensors are all there is processed and committed at once.

Without it all of B in model format waits for the finish: an update in place needs the memory that it is meant to save.
What may be processed early is learned, not known: in the first load nothing touched the layer once it was complete.
What that load can't show (a hook that reads another layer, a loader that comes back) is watched for and refused.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from weightlife import errors
from weightlife._engine import fill, slots, storage
from weightlife._engine.skeleton import storage_key
from weightlife._engine.track import Track

if TYPE_CHECKING:
    from weightlife._engine.ledger import Region
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession


@dataclass
class Unit:
    """One layer with a hook, and the storages that its hook may look at."""

    ident: int
    numbers: list[int]
    members: set[int]  # the layer, and modules below it that have no hook of their own
    lacking: int = 0  # expected writes that have not come yet
    done: bool = False
    expected: dict[int, Counter[Region]] = field(default_factory=dict)


def units(life: Lifecycle) -> list[Unit]:
    """The layers of a model that may be processed as soon as they are complete.

    Left out are layers that share a storage or a restored helper with another one, that the host processes late, or
    that the first load touched again after their last tensor.
    """
    manifest, skeleton, host = life.manifest, life.skeleton, life.host
    if manifest.late is None or manifest.custom:
        return []
    aliased = {skeleton.tensors[skeleton.named(name)].storage for name in life.aliases.values()}
    shared = {
        owner
        for ident in life.plan.restore
        if len(skeleton.holders[ident].owners) > 1 and not skeleton.holders[ident].is_module
        for owner in skeleton.holders[ident].owners
    }
    on_layer: dict[int, list[int]] = {}
    for number, made in enumerate(skeleton.storages):
        for layer in made.layers:
            on_layer.setdefault(layer, []).append(number)
    out = []
    for ident in life.plan.rebuild:
        layer = skeleton.holders[ident].obj
        if host.layer_hook(layer) is None or host.is_deferred(layer) or not host.may_process_early(layer):
            continue
        members = {id(module) for module in layer.modules()}
        if any(fill.has_hook(life, other) for other in members - {ident} if other in skeleton.holders):
            continue
        numbers = sorted({number for member in members for number in on_layer.get(member, ())})
        if (
            members & shared
            or any(skeleton.storages[number].layers - members for number in numbers)
            or any(number in aliased or number in manifest.late for number in numbers)
        ):
            continue
        expected = {number: manifest.expected[number] for number in numbers if number in manifest.expected}
        lacking = sum(sum(regions.values()) for regions in expected.values())
        if lacking:
            out.append(Unit(ident, numbers, members, lacking, expected=expected))
    return out


class Streamer:
    """The early processing of one session. Fed with writes; works between two source tensors."""

    def __init__(self, session: WeightLoadSession) -> None:
        self.session = session
        self.by_number: dict[int, Unit] = {}
        self.ready: list[Unit] = []
        self.done: set[int] = set()
        self._running: Unit | None = None
        self._a_views: dict[int, torch.Tensor] | None = None
        self._live: list[Track] = []  # memory that serves, and holds B already
        self._guards: dict[int, Track] = {}
        for unit in session.life.streamable():
            self.by_number.update(dict.fromkeys(unit.numbers, replace(unit)))
        assert session.stage is not None
        session.stage.keep_cold(n for n, unit in self.by_number.items() if n in unit.expected)

    def warm(self, number: int) -> None:
        """A tensor is about to be loaded into this storage."""
        stage, receiver = self.session.stage, self.session.receiver
        if stage is None or number not in stage.cold:
            return
        assert receiver is not None
        with receiver.quietly(), torch._C.DisableTorchFunction():
            stage.warm(number)

    def begin(self, name: str) -> None:
        """A tensor is about to be loaded.

        Raises:
            SurplusTensorError: its layer has all that a complete load brings, and was processed.
        """
        entry = self.session.life.manifest.names.get(name)
        for number, _ in entry.writes if entry is not None else ():
            self.warm(number)
            unit = self.by_number.get(number)
            if unit is not None and unit.done:
                raise self._again(name, unit)

    def _again(self, name: str, unit: Unit) -> errors.SurplusTensorError:
        life = self.session.life
        return errors.SurplusTensorError(
            "a tensor came again after all of its layer had come",
            model=life.name, layer=life.layer_path(unit.ident), tensors=[name], session=self.session.id,
        )  # fmt: skip

    def count(self, number: int, part: Region, times: int) -> None:
        """A region was written for the `times`-th time."""
        unit = self.by_number.get(number)
        if unit is None or times > unit.expected.get(number, Counter()).get(part, 0):
            return
        unit.lacking -= 1
        if unit.lacking == 0:
            self.ready.append(unit)

    def between(self) -> None:
        """The loader is done with a tensor: process what is complete.

        Raises:
            What a hook raises, unchanged.
        """
        while self.ready:
            unit = self.ready.pop()
            # Below a mode of the caller's nothing is certain of what an operation does.
            if not self.session.foreign_modes:
                self._process(unit)

    def _process(self, unit: Unit) -> None:
        session, stage = self.session, self.session.stage
        assert stage is not None
        life = session.life
        layer = life.skeleton.holders[unit.ident].obj
        assert session.receiver is not None
        session.receiver.suspended = True
        try:
            if session.trust is not None:
                session.trust.check(unit.numbers)
            if session.held is not None:
                session.held.take(unit.numbers)
        finally:
            session.receiver.suspended = False
        with session.hooks_run_now():
            fill.unwritten(session, unit.members, unit.numbers)
            raw = stage.retire(unit.numbers)
            started = time.perf_counter()
            self._running = unit
            try:
                life.host.process_layer(layer)
            finally:
                self._running = None
            seconds = time.perf_counter() - started
            hook = life.host.layer_hook(layer) or type(layer).__name__
            session.account.layer(life.layer_path(unit.ident), hook, seconds)
            assert session.receiver is not None
            session.receiver.suspended = True  # our own copies are not the loader's
            try:
                # Asking a tensor for its storage is, under the mode for raw memory, a hook that takes it.
                with torch._C.DisableTorchFunction():
                    life.derived.check_layer(session, layer, unit.members)
                self._free(unit, layer, raw)
                self._commit(unit, layer)
            finally:
                session.receiver.suspended = False
        unit.done = True
        self.done |= unit.members
        session.account.early.append(seconds)

    def _free(self, unit: Unit, layer: torch.nn.Module, raw: list[torch.Tensor]) -> None:
        """Let go of raw memory that processing does not use, also where the loader still has a parameter of it."""
        assert self.session.stage is not None
        _, states = slots.walk(layer, self.session.life.host.skip)
        used: dict[int, torch.Tensor] = {}
        for state in states.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and (key := storage_key(value)) is not None:
                    used[key] = value
        live = self.session.stage.index
        for key, value in used.items():
            if key not in live:  # A's memory is watched anyhow
                self._guard(unit, key, value.untyped_storage())
        for tensor in raw:
            key_ = storage_key(tensor)
            if key_ is None or key_ in used:
                continue
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self._guard(unit, int(empty.untyped_storage()._cdata), empty.untyped_storage())
            tensor.data = empty

    def _commit(self, unit: Unit, layer: torch.nn.Module) -> None:
        """In place, a layer that is done goes into the storage that serves, and its own memory is freed.

        Raises:
            StorageMovedError: it can't keep its storage. Of this layer nothing was copied.
        """
        session, stage = self.session, self.session.stage
        assert stage is not None
        if self._a_views is None:
            self._a_views = storage.a_views(stage)
        holders, _ = slots.walk(layer, session.life.host.skip)
        # A new one each time: memory of the layer before is gone, and its identities are used again.
        settlement = storage.Settler(stage, self._a_views).settle_only(holders.keys() | unit.members)
        if settlement.moved and session.settings.storage == "auto":
            return  # the finish decides whether new memory may be adopted
        storage.require_pinned(session, settlement)
        for serving in {
            int(m.a.untyped_storage()._cdata): m.a.untyped_storage() for m in settlement.moves
        }.values():
            if session.life.unsafe or not storage.keep_undo(session, serving):
                break
        size = storage.commit_pinned(stage, settlement, session.operators, session.side_copies, layer)
        if session.life.unsafe:
            # What the layer held (memory that native code packed, say) is of no use any more: 300 MiB less at the peak of
            # a 0.5B shape.
            stage.let_go(unit.members, holders)
        session.copied(len(settlement.moves), size)
        session.kept_alive += settlement.keep_alive
        for move in settlement.moves:
            track = stage.index.get(int(move.a.untyped_storage()._cdata))
            if track is not None and not track.retired:
                track.retired = unit.ident
                self._live.append(track)
        for key in [
            key
            for key, track in self._guards.items()
            if track.retired == unit.ident and track.storage.nbytes()
        ]:
            self._guards.pop(key)
            stage.index.pop(key, None)

    def _guard(self, unit: Unit, key: int, memory: torch.UntypedStorage) -> None:
        path = self.session.life.layer_path(unit.ident)
        track = Track(None, memory, 0, torch.uint8, True, path, retired=unit.ident)
        assert self.session.receiver is not None
        self._guards[key] = self.session.receiver.index[key] = track

    def check(self, track: Track) -> None:
        """An operation of a hook that runs early: weights of other layers may not have come yet.

        Raises:
            EarlyProcessingError: it reads or writes such weights.
        """
        unit, life = self._running, self.session.life
        if unit is None or track.number is None or track.number in unit.numbers:
            return
        if track.number in life.manifest.expected:
            life.late_layers.add(unit.ident)
            raise errors.EarlyProcessingError(
                f"the hook of {life.layer_path(unit.ident)} uses the weights of another layer",
                model=life.name, layer=track.path, session=self.session.id,
            )  # fmt: skip

    def refuse(self, track: Track) -> errors.WeightlifeError:
        """The error for an operation on a layer that was processed already; the next update processes it late."""
        session = self.session
        name = session.intake.name
        session.life.late_layers.add(track.retired)
        return errors.EarlyProcessingError(
            "something reads or writes this layer after all of its tensors had come and it was processed",
            model=session.life.name, layer=track.path, tensors=[name] if name else [], session=session.id,
        )  # fmt: skip

    def close(self) -> None:
        """Receiving is over: late hooks may read every layer again."""
        self.session.side_copies.join()
        receiver = self.session.receiver
        for key in self._guards:
            if receiver is not None:
                receiver.index.pop(key, None)
        self._guards.clear()
        for track in self._live:
            track.retired = 0
        self._live.clear()
        self._a_views = None


__all__ = ["Streamer", "Unit", "units"]
