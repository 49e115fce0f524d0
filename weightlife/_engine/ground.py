# SPDX-License-Identifier: Apache-2.0
"""Generation A of one verification: walked once, and stood upon by every batch of layers that is rebuilt beside it.

A stage of its own for each batch would walk the whole model each time (15 to 20 ms for 24 layers, 25 batches of a
mixture of experts). Between batches nothing changes unless somebody else has the model's turn, and then the walk is
made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import is_
from typing import TYPE_CHECKING

import torch

from weightlife._engine import slots
from weightlife._engine.footprint import Plan
from weightlife._engine.stage import Stage

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle


class Ground(Stage):
    """A stage that is used again for one part of the model after the other. Make it with the model's turn.

    Args:
        life: the model's lifecycle; generation A is shown.
    """

    def __init__(self, life: Lifecycle) -> None:
        super().__init__(
            life.model, life.skeleton, Plan(), life.host.skip, True, life.fill,
            life.addresses.declared.values(), life.plan,
        )  # fmt: skip
        self._turn = life.turn
        self._taken = life.turn.taken
        self._live = dict(self.index), dict(self.by_number)
        self._glances = {ident: slots.glance(holder.obj) for ident, holder in self.holders.items()}
        self._slots: dict[int, list[tuple[slots.Holder, slots.Key, int]]] = {}
        for slot in self.skeleton.module_slots():
            self._slots.setdefault(self.skeleton.tensors[slot[2]].storage, []).append(slot)
        self._of_layer: dict[int, list[int]] = {}  # layer -> its holders
        for ident, holder in self.holders.items():
            for owner in holder.owners:
                self._of_layer.setdefault(owner, []).append(ident)
        self._near: set[int] | None = None  # holders that can differ from A, where that is known
        self.modules = list(life.model.named_modules())
        self._numbers: set[int] = set()
        self.lendable: frozenset[int] = frozenset()

    def stands(self) -> bool:
        """Whether nobody else had the turn since this was made. Ask with the turn in hand."""
        return bool(self.before) and self._turn.taken - self._taken <= 1

    def begin(
        self, plan: Plan, numbers: set[int], memory: Callable[[int, torch.device], torch.UntypedStorage]
    ) -> None:
        """Another part of the model is rebuilt now.

        Args:
            plan: of its layers.
            numbers: the storages that a load writes for them.
            memory: where generation B lives.
        """
        self._taken = self._turn.taken
        self.plan, self.memory = plan, memory
        self._numbers = numbers
        self.index, self.by_number = dict(self._live[0]), dict(self._live[1])
        self.lendable = frozenset()
        self._near = None

    def looked(self, layers: set[int], found: set[int]) -> None:
        """After a look at everything, at the end of a part: only what was found and its layers can differ from A."""
        self._near = found.union(*(self._of_layer.get(layer, ()) for layer in layers))

    def changes(self) -> Iterator[tuple[int, slots.State, slots.State, list[slots.Key]]]:
        """Holders of which something differs from A: id, slots before and now, and which.

        A holder whose values are the same objects under the same names is not read: 2 us instead of 20.
        """
        for ident in self.before if self._near is None else self._near & self.before.keys():
            if self._same(ident):
                continue
            before, state = self.before[ident], slots.read(self.holders[ident].obj)
            keys = slots.differing(before, state)
            if keys:
                yield ident, before, state, keys

    def _same(self, ident: int) -> bool:
        """Whether a glance shows that a holder is as it was when it was looked at last, as A."""
        known = self._glances[ident]
        now = None if known is None else slots.glance(self.holders[ident].obj)
        return known is not None and now is not None and len(now) == len(known) and all(map(is_, now, known))

    def show_a(self) -> None:
        """As for every stage."""
        super().show_a()
        for ident in self.b_state:
            self._glances[ident] = slots.glance(self.holders[ident].obj)

    def show_b(self) -> None:
        """As for every stage, which looks at all holders anew."""
        if not self.showing_b:
            # Of A, before B is written: what glances the same is not looked at when A is shown the next time.
            self._glances = {ident: slots.glance(holder.obj) for ident, holder in self.holders.items()}
            super().show_b()

    def _module_slots(self) -> Iterator[tuple[slots.Holder, slots.Key, int]]:
        for number in self._numbers:
            yield from self._slots.get(number, ())

    # -- memory of the source ----------------------------------------------------------------------------------

    def _is_exchanged(self, number: int) -> bool:
        return number in self.lendable

    def lend(self, number: int, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Let a source tensor's own memory be generation B's of a storage that it fills, instead of a copy of it.

        Returns the memory that stood there for generation B before, which nobody may write any more.
        """
        track = self.by_number[number]
        if track.placeholder:
            gone = self._exchange(track, number, storage)
            del self.index[int(gone._cdata)]
            return gone
        track.stage = storage
        self.index[int(storage._cdata)] = track
        for tensor, _ in track.tensors:
            self._repoint(tensor, storage)
        return None

    # -- the end of a part -------------------------------------------------------------------------------------

    def leave(self, layers: set[int]) -> None:
        """A again, after a part that came to its end: what was made for it is let go, the rest stands.

        `layers`: of the part. What asking their kernels left on them belongs to A.
        """
        self.show_a()
        for track in {id(track): track for track in self._live[0].values()}.values():
            if track.stage is not None or track.ever or track.irregular or track.raw:
                track.stage = None
                track.irregular = track.raw = False
                for kept in (track.written, track.sequence, track.ever):
                    kept.clear()
        self.index, self.by_number = {}, {}
        self.placeholders.clear()
        self.b_state, self.b_data = {}, []
        for ident in {ident for layer in layers for ident in self._of_layer.get(layer, ())}:
            if not self._same(ident):
                obj = self.holders[ident].obj
                self.before[ident], self._glances[ident] = slots.read(obj), slots.glance(obj)

    def revert(self) -> None:
        """As for every stage; whatever was found before, everything is looked at."""
        self._near = None
        super().revert()

    def drop(self) -> None:
        """Let go of everything: a verification is over, or one of its parts ended with an exception."""
        super().drop()
        self._live = {}, {}
        self._glances.clear()
        self._of_layer.clear()
        self.modules = []


__all__ = ["Ground"]
