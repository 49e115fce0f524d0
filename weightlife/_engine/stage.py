# SPDX-License-Identifier: Apache-2.0
"""Generations: A serves, B is being received, and the module tree shows one or the other.

At prepare the constructor's values go back into the slots that processing changed; tensors there are placeholders.
Live storages are staged at their first write. `show_a()` and `show_b()` exchange what differs, by reference: no value
is copied, so a pass that comes in the middle of an update costs a few milliseconds and sees A exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightlife._engine import slots
from weightlife._engine.arena import untouched
from weightlife._engine.footprint import ABSENT, Plan, live_numbers
from weightlife._engine.ledger import Region, region
from weightlife._engine.skeleton import (
    Composite,
    Skeleton,
    TensorSkeleton,
    Token,
    copied,
    dtype_name,
    own_memory,
    storage_key,
    view_on,
)
from weightlife._engine.track import Track

# Below this a mapping of its own (10 us, and a kernel's record of it) is not worth it.
COLD_BYTES = 1 << 20


def _tensors(state: slots.State) -> Iterator[tuple[slots.Key, torch.Tensor]]:
    """The tensors in a holder's slots, and those that hang on them as attributes."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            yield key, value
            for attribute in getattr(value, "__dict__", {}).values():
                if isinstance(attribute, torch.Tensor):
                    yield key, attribute


def _fresh(nbytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.UntypedStorage(nbytes, device=device)


def same_view(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same storage, in the same shape."""
    return (
        tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
        and tensor.storage_offset() == other.storage_offset()
        and tensor.shape == other.shape
        and tensor.stride() == other.stride()
        and tensor.dtype == other.dtype
    )


class Stage:
    """Generations A and B of one model during one session.

    Args:
        model: the model.
        skeleton: the constructor's state.
        plan: which slots go back to it. Empty for a session in kernel format.
        skip: host objects that are not entered.
        isolated: stage live storages (`staged`); otherwise writes go into them (`in_place`).
        fill: called on memory that was just made (tests poison it).
        declared: storage beside the model that the user declared.
        whole: the plan of the whole model, where `plan` is a part of it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        skeleton: Skeleton,
        plan: Plan,
        skip: Callable[[Any], bool],
        isolated: bool = True,
        fill: Callable[[torch.Tensor], None] | None = None,
        declared: Iterable[slots.Declared] = (),
        whole: Plan | None = None,
    ) -> None:
        self.model = model
        self.skeleton = skeleton
        self.plan = plan
        self.whole = plan if whole is None else whole
        self.skip = skip
        self.isolated = isolated
        self.fill = fill
        self.memory: Callable[[int, torch.device], torch.UntypedStorage] = _fresh
        self.showing_b = False
        self.index: dict[int, Track] = {}
        self.placeholders: dict[int, torch.Tensor] = {}  # tensor number -> placeholder
        self.by_number: dict[int, Track] = {}
        self.raw: dict[int, tuple[weakref.ref[torch.Tensor], int | None]] = {}  # placeholders that hooks got
        self.watched: dict[
            int, tuple[Track, StorageWeakRef]
        ] = {}  # their storages that hooks wrote at the first load
        self.cold: set[int] = set()  # storages that get their memory with the first tensor (`warm`)
        self._gone: list[torch.UntypedStorage] = []  # stood there before: identities are not used again
        self.undo: dict[int, torch.Tensor] = {}  # live storage identity -> its bytes before (in place only)
        self.undo_bytes = 0
        self.declared = list(declared)
        self.holders, self.before = slots.walk(model, skip, self.declared)
        self.b_state: dict[int, slots.State] = {}
        self.b_data: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._index_live()

    # -- generation A ------------------------------------------------------------------------------------------

    def _index_live(self) -> None:
        numbers = live_numbers(self.skeleton, self.whole)
        seen: set[int] = set()
        for ident, state in self.before.items():
            holder = self.holders[ident]
            for key, value in _tensors(state):
                if id(value) in seen:
                    continue
                seen.add(id(value))
                identity = storage_key(value)
                if identity is None:
                    continue
                track = self.index.get(identity)
                if track is None:
                    number = numbers.get(identity)
                    dtype = value.dtype if number is None else self.skeleton.storages[number].dtype
                    storage = value.untyped_storage()
                    track = Track(
                        number, storage, storage.nbytes(), dtype, False, slots.step(holder.path, key)
                    )
                    self.index[identity] = track
                    if number is not None:
                        self.by_number[number] = track
                track.tensors.append((value, value.detach()))
                track.owners |= holder.owners

    def resized(self, numbers: Iterable[int]) -> Track | None:
        """The first live storage of another size than the constructor's: what a load writes to it is not known.

        `numbers`: of storages that a load writes. Others are the host's to exchange (a key-value cache).
        """
        for number in numbers:
            track = self.by_number.get(number)
            if (
                track is not None
                and not track.placeholder
                and track.nbytes != self.skeleton.storages[number].nbytes
            ):
                return track
        return None

    # -- generation B ------------------------------------------------------------------------------------------

    def present(self) -> None:
        """Put the constructor's values back into the slots of the plan (tensors as placeholders)."""
        self.showing_b = True
        for ident, restore in self.plan.restore.items():
            holder = self.skeleton.holders[ident]
            target = dict(self.skeleton.states[ident])
            target.update(restore)
            live = slots.read(holder.obj)
            wanted = {key: self._value(value) for key, value in target.items() if key in restore}
            ordered: slots.State = {}
            for key in target:
                if key in wanted:
                    if wanted[key] is not ABSENT:
                        ordered[key] = wanted[key]
                elif key in live:
                    ordered[key] = live[key]
            ordered.update({key: value for key, value in live.items() if key not in target})
            slots.write(holder.obj, ordered, list(restore))

    def _value(self, value: Any) -> Any:
        if isinstance(value, Token):
            return self._placeholder(value.index)
        if isinstance(value, Composite):
            return value.make([self._value(part) for part in value.parts])
        return value

    def _placeholder(self, index: int) -> torch.Tensor:
        known = self.placeholders.get(index)
        if known is not None:
            return known
        made = self.skeleton.tensors[index]
        track = self._track_of(made)
        tensor = view_on(track.storage, made.dtype, made.offset, made.shape, made.stride)
        if made.cls is not torch.Tensor:
            tensor.__class__ = made.cls
        tensor.__dict__.update(copied(made.attributes))
        tensor.requires_grad_(made.requires_grad)
        self.placeholders[index] = tensor
        return tensor

    def _track_of(self, made: TensorSkeleton) -> Track:
        """The storage of a placeholder, made at its first tensor."""
        track = self.by_number.get(made.storage)
        if track is None:
            skeleton = self.skeleton.storages[made.storage]
            # Memory from the start: a loader may read, print or take the address of a parameter. On a CPU pages come
            # at the first touch; on a device all of B is there before processing anyway.
            take = untouched if self._is_exchanged(made.storage) else self.memory
            storage = take(skeleton.nbytes, skeleton.device)
            if self.fill is not None:
                self.fill(view_on(storage, skeleton.dtype, 0, (skeleton.numel,), (1,)))
            track = Track(made.storage, storage, skeleton.nbytes, skeleton.dtype, True, made.path)
            self.by_number[made.storage] = track
            self.index[int(storage._cdata)] = track
        return track

    def _is_exchanged(self, number: int) -> bool:
        """Whether other memory comes in the place of a storage's before anybody writes to it."""
        return number in self.cold

    def keep_cold(self, numbers: Iterable[int]) -> None:
        """Take memory for these storages when the first tensor for them comes, where that is worth it (`warm`)."""
        made = self.skeleton.storages
        self.cold = {n for n in numbers if made[n].device.type == "cpu" and made[n].nbytes >= COLD_BYTES}

    def warm(self, number: int) -> None:
        """The first tensor for a storage is about to come: take memory for it, which may be that of a layer before.

        Pages that were touched before cost a sixth of new ones. Whatever was done to the storage already keeps it.
        """
        if number not in self.cold:
            return
        self.cold.remove(number)
        track = self.by_number.get(number)
        if track is None or not track.placeholder:
            return  # memory that serves
        if track.ever or track.irregular or track.raw or track.hooked or track.retired:
            return
        memory = self.memory(track.nbytes, track.storage.device)
        if self.fill is not None:
            self.fill(view_on(memory, track.dtype, 0, (track.numel,), (1,)))
        self._gone.append(self._exchange(track, number, memory))
        track.moved = True

    def _exchange(self, track: Track, number: int, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Other memory for a placeholder's storage. Returns what stood there, which the index still knows."""
        gone, track.storage = track.storage, storage
        self.index[int(storage._cdata)] = track
        for index in self.skeleton.storages[number].tensors:
            tensor = self.placeholders.get(index)
            if tensor is not None:
                self._repoint(tensor, storage)
        return gone

    def differs(self, track: Track) -> bool:
        """Whether a stage holds other bytes than the storage that it stands for."""
        assert track.stage is not None
        whole = (track.nbytes,)
        a = view_on(track.storage, torch.uint8, 0, whole, (1,))
        return not torch.equal(a, view_on(track.stage, torch.uint8, 0, whole, (1,)))

    def stage_live(self, track: Track, copy: bool = False) -> None:
        """Before the first write to a storage that serves: stage it, or keep what undoing the write needs.

        `copy`: the stage begins with A's bytes, for writers that read or write a part.
        """
        if not self.isolated:
            self.keep_undo(track.storage)
            return
        stage = self.memory(track.nbytes, track.storage.device)
        track.stage = stage
        self.index[int(stage._cdata)] = track
        whole = (track.nbytes,)
        if copy:
            view_on(stage, torch.uint8, 0, whole, (1,)).copy_(
                view_on(track.storage, torch.uint8, 0, whole, (1,))
            )
        elif self.fill is not None:
            self.fill(view_on(stage, torch.uint8, 0, whole, (1,)))
        for tensor, _ in track.tensors:
            self._repoint(tensor, stage)

    def keep_undo(self, storage: torch.UntypedStorage) -> None:
        """Keep the bytes of memory that serves, once."""
        if int(storage._cdata) not in self.undo:
            self.undo[int(storage._cdata)] = view_on(
                storage, torch.uint8, 0, (storage.nbytes(),), (1,)
            ).clone()
            self.undo_bytes += storage.nbytes()

    @staticmethod
    def _repoint(tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        tensor.data = view_on(
            storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        )

    def note_replaced(
        self, sources: set[int], came: Callable[[int, str], bool]
    ) -> dict[str, tuple[int, Region]]:
        """Enter tensors that a loader gave other data (`.data =`, `set_`) as written whole.

        Args:
            sources: as for `note_assigned`.
            came: whether what a storage, of a tensor at a path, is made of came in this update.

        Returns:
            Paths of those that are attributes of modules, with storage number and region.
        """
        found: dict[int, tuple[int, Region]] = {}

        def enter(track: Track, tensor: torch.Tensor, like: Any, offset: Any, stride: Any) -> None:
            own_memory(tensor, sources)
            if track.number is not None and not came(track.number, getattr(like, "path", track.path)):
                return  # a loader that clones every parameter clones those of which nothing came
            self._replaced(track, like.dtype, offset, like.shape, stride)
            if track.number is not None and like.dtype.itemsize == track.dtype.itemsize:
                found[id(tensor)] = track.number, region(int(offset), tuple(like.shape), tuple(stride))

        for index, tensor in self.placeholders.items():
            made = self.skeleton.tensors[index]
            track = self.by_number[made.storage]
            if storage_key(tensor) != int(track.storage._cdata):
                enter(track, tensor, made, made.offset, made.stride)
        for track in self.by_number.values():
            for tensor, a_view in track.tensors:
                known = (int(track.storage._cdata), int(track.current._cdata))
                if storage_key(tensor) not in known:
                    enter(track, tensor, a_view, a_view.storage_offset(), a_view.stride())
        if not found:
            return {}
        slots_now = ((holder, key, slots.own(holder.obj, key)) for holder, key, _ in self._module_slots())
        return {
            slots.step(holder.path, key): found[id(now)] for holder, key, now in slots_now if id(now) in found
        }

    def note_assigned(
        self, casts: Container[tuple[int, str]], sources: set[int], came: Callable[[int, str], bool]
    ) -> dict[str, tuple[int, Region]]:
        """Enter slots in which a loader put a tensor of its own (`load_state_dict(assign=True)`) as written whole.

        Args:
            came: as for `note_replaced`.
            casts: storage number and dtype of those that the first load put there in another dtype than the
                constructor's.
            sources: identities of the sender's storages; what is on one of them gets memory of its own.

        Returns:
            Their paths, with storage number and region.
        """
        assigned: dict[str, tuple[int, Region]] = {}
        for holder, key, index in self._module_slots():
            made = self.skeleton.tensors[index]
            track = self.by_number.get(made.storage)
            state = self.before.get(id(holder.obj), {})
            restored = key in self.plan.restore.get(id(holder.obj), {})
            old = self.placeholders.get(index) if restored else state.get(key)
            now = slots.own(holder.obj, key)
            if track is None or now is None or now is old or storage_key(now) in self.index:
                continue  # as it was, or another tensor of the model: a tie that the loader makes
            fits = now.dtype == made.dtype or (made.storage, dtype_name(now)) in casts
            if tuple(now.shape) == made.shape and fits:
                part = region(made.offset, made.shape, made.stride)
                own_memory(now, sources)
                if not came(made.storage, slots.step(holder.path, key)):
                    continue
                self._replaced(track, made.dtype, made.offset, made.shape, made.stride)
                assigned[slots.step(holder.path, key)] = (made.storage, part)
        return assigned

    def _module_slots(self) -> Iterator[tuple[slots.Holder, slots.Key, int]]:
        """Slots in which a loader may put a tensor of its own."""
        return self.skeleton.module_slots()

    @staticmethod
    def _replaced(track: Track, dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> None:
        if dtype.itemsize != track.dtype.itemsize:
            track.irregular = True
            return
        part = region(int(offset), tuple(shape), tuple(stride))
        if not track.written[part]:
            track.written[part] = 1
            track.ever.add(part)

    def retire(self, numbers: list[int]) -> list[torch.Tensor]:
        """Let go of the placeholders of some storages, which their layer's hook takes over. Returns them.

        The ledger of each storage stays: it is compared with the manifest at finish.
        """
        wanted = set(numbers)
        mine = [i for i in self.placeholders if self.skeleton.tensors[i].storage in wanted]
        self._hand_over(mine)
        out = [self.placeholders.pop(index) for index in mine]
        for number in wanted & self.by_number.keys():
            track = self.by_number[number]
            if track.placeholder:
                self._let_go(track)
                track.storage = torch.UntypedStorage(0)
                track.retired = -1
        return out

    def forget_placeholders(self) -> None:
        """Let go of model-format memory: from here on only the layers' own slots hold it, until hooks drop it."""
        self._hand_over(self.placeholders)
        self.placeholders.clear()
        for number in [n for n, track in self.by_number.items() if track.placeholder]:
            self._let_go(self.by_number.pop(number))

    def _hand_over(self, indices: Iterable[int]) -> None:
        """Remember which placeholders hooks get, without keeping them alive."""
        for index in indices:
            tensor = self.placeholders[index]
            self.raw[index] = weakref.ref(tensor), storage_key(tensor)

    def _let_go(self, track: Track) -> None:
        """Track the memory of a placeholder no more, but for writes where hooks are known to make some."""
        key = int(track.storage._cdata)
        self.index.pop(key, None)
        if track.number in self.whole.inplace:
            weak = StorageWeakRef(track.storage)  # its identity is not used again meanwhile
            mark = Track(None, torch.UntypedStorage(0), 0, track.dtype, True, track.path)
            self.watched[track.number] = mark, weak
            self.index[key] = mark

    # -- exchange ----------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[tuple[int, slots.State, slots.State, list[slots.Key]]]:
        """Holders of which something differs from A: id, slots before and now, and which."""
        for ident, before in self.before.items():
            now = slots.read(self.holders[ident].obj)
            changed = slots.differing(before, now)
            if changed:
                yield ident, before, now, changed

    def show_a(self) -> None:
        """Make the module tree generation A again, remembering B."""
        if not self.showing_b:
            return
        self.b_state = {}
        for ident, before, now, changed in self.changes():
            self.b_state[ident] = now
            slots.write(self.holders[ident].obj, before, changed)
        self.b_data = []
        for track in self.index.values():
            # A track is found by its live and by its staged identity: once is enough, twice does no harm.
            for tensor, a_view in track.tensors:
                if not same_view(tensor, a_view):
                    self.b_data.append((tensor, tensor.detach()))
                    tensor.data = a_view
        self.showing_b = False

    def show_b(self) -> None:
        """The reverse of `show_a`. What passes did to other slots of A meanwhile is kept."""
        if self.showing_b:
            return
        for ident, state in self.b_state.items():
            obj = self.holders[ident].obj
            now = slots.read(obj)
            changed = slots.differing(self.before[ident], state)
            self.before[ident] = now
            slots.write(obj, state, changed)
        for ident in self.before.keys() - self.b_state.keys():
            self.before[ident] = slots.read(self.holders[ident].obj)
        for tensor, data in self.b_data:
            tensor.data = data
        self.b_data = []
        self.showing_b = True

    def put_back(self, modules: set[int]) -> None:
        """Give layers that this update does not rebuild their A state again, while the rest shows B."""
        for ident, restore in self.plan.restore.items():
            holder = self.skeleton.holders[ident]
            if ident in self.before and holder.owners <= modules:
                obj = holder.obj
                changed = [k for k in slots.differing(self.before[ident], slots.read(obj)) if k in restore]
                slots.write(obj, self.before[ident], changed)

    def put_back_unmade(self, idle: set[int]) -> None:
        """Slots that processing did not make again, of holders that an untouched layer shares, get A's value.

        A helper that several layers write to (a table by layer name) was restored for those that are processed; the
        entries of the others are A's still.
        """
        for ident, restore in self.plan.restore.items():
            holder = self.skeleton.holders[ident]
            if ident not in self.before or not holder.owners & idle or holder.owners <= idle:
                continue
            now = slots.read(holder.obj)
            unmade = [
                key
                for key, value in restore.items()
                if (value is ABSENT and key not in now and key in self.before[ident])
                or (key in now and key in self.before[ident] and slots.same(now[key], value))
            ]
            if unmade:
                target = dict(now)
                target.update({key: self.before[ident][key] for key in unmade})
                slots.write(holder.obj, target, unmade)

    def let_go(self, modules: set[int], holders: dict[int, slots.Holder]) -> None:
        """What some layers hold now is A from here on, but for tensors: nothing can undo them, and the rest may be freed.

        Args:
            modules: ids of the layers.
            holders: what a walk of them found now.
        """
        for ident in [i for i, h in self.holders.items() if h.owners and h.owners <= modules]:
            if ident not in holders:
                del self.holders[ident], self.before[ident]
                continue
            # Tensors are A's objects still, on storage that is pinned: by these a model is known again.
            tensors = {k: v for k, v in self.before[ident].items() if isinstance(v, torch.Tensor)}
            self.before[ident] = {**slots.read(self.holders[ident].obj), **tensors}
        for ident, holder in holders.items():
            if ident not in self.holders:
                self.holders[ident], self.before[ident] = holder, slots.read(holder.obj)

    def revert(self) -> None:
        """A exactly, B dropped. In place, written storages get their old bytes back."""
        self.show_a()
        for track in self.index.values():
            saved = self.undo.get(int(track.storage._cdata))
            if saved is not None:
                view_on(track.storage, torch.uint8, 0, (track.nbytes,), (1,)).copy_(saved)
        self.drop()

    def drop(self) -> None:
        """Let go of everything that the session held."""
        self.index.clear()
        self.by_number.clear()
        self.placeholders.clear()
        self.b_state.clear()
        self.before.clear()
        self.holders.clear()
        self.raw.clear()
        self.watched.clear()
        self.undo.clear()
        self.cold.clear()
        self._gone.clear()
