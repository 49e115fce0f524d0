# SPDX-License-Identifier: Apache-2.0
"""What serves against what a rehearsal made: every tensor bit by bit, plain values, kinds of objects, native memory.

A `Settler` pairs the two generations by path, to decide what a commit would copy. Here each pair is compared instead.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from weightlife._engine import slots, storage
from weightlife._engine.equal import unequal
from weightlife._engine.rehearsal import Rehearsal
from weightlife._engine.skeleton import storage_key, view_on
from weightlife._engine.track import mask as mask_of
from weightlife._engine.track import whole
from weightlife._verification import Difference, Untold

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, frozenset, range)


class Pairing(storage.Settler):
    """The comparison of one group of layers. Use it while generation B is shown.

    Attributes:
        differences: what differs.
        untold: what could not be compared, and why.
        covered: memory that was compared: storages whole, and views.
        natives: paths of objects with memory of their own -> the layers that they belong to.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        assert rehearsal.stage is not None
        super().__init__(rehearsal.stage)
        self.rehearsal = rehearsal
        self.mine = rehearsal.group.layers
        self.differences: list[Difference] = []
        self.untold: list[Untold] = []
        self.covered: set[Any] = set()
        self.natives: dict[str, frozenset[int]] = {}
        self.tensors = 0
        self.nbytes = 0
        self._compared: set[Any] = set()
        self._shared = False

    def compare(self) -> None:
        """Compare all that this group rebuilt.

        Raises:
            LinkedError: a hook changed a layer that is not of this group.
        """
        for track in {id(t): t for t in self.stage.index.values() if not t.placeholder}.values():
            self._staged(track)
        known = self.rehearsal.life.plan.layers.keys()
        found = set()
        for ident, before, now, keys in self.stage.changes():
            found.add(ident)
            holder = self.stage.holders[ident]
            others = (holder.owners & known) - self.mine
            if others and not holder.owners & self.mine:
                self.rehearsal.linked(next(iter(others)))
            self._owners, self._shared = frozenset(holder.owners), bool(others)
            self._holder(holder, keys, before, now)
        self.rehearsal.ground.looked(self.mine, found)

    def _holder(
        self, holder: slots.Holder, keys: Iterable[slots.Key], before: slots.State, now: slots.State
    ) -> None:
        for key in keys:
            path = slots.step(holder.path, key)
            if key in before and key in now:
                self._match(path, before[key], now[key])
            elif key in now:
                self._differ(path, "missing", f"a cold load has {_kind(now[key])} there")
            else:
                self._differ(
                    path, "unexpected", f"a cold load has nothing there, and not {_kind(before[key])}"
                )

    def _differ(self, path: str, what: str, detail: str = "", **more: Any) -> None:
        if self._shared and what != "value":
            self.untold.append(Untold(path, "a helper that layers of several groups share"))
            return
        self.differences.append(Difference(path, what, detail, **more))

    # -- tensors -----------------------------------------------------------------------------------------------

    def _staged(self, track: Any) -> None:
        """Memory that serves, and its stage."""
        self._shared = False
        for tensor, a_view in track.tensors:
            if storage_key(tensor) not in (int(track.storage._cdata), int(track.current._cdata)):
                self._pair(track.path, tensor, tensor, a_view)  # a loader or hook gave it other data
        if track.stage is None:
            return
        views = [a_view for _, a_view in track.tensors if a_view.numel() == track.numel]
        if views:
            a = views[0]
        else:
            a = view_on(track.storage, track.dtype, 0, (track.numel,), (1,))
        b = view_on(track.stage, a.dtype, a.storage_offset(), tuple(a.shape), a.stride())
        self._values(track.path, a, b)
        self.covered.add(int(track.storage._cdata))
        if track.ever and not whole(track):
            holes = int((~mask_of(track)).sum())
            if holes:
                self.untold.append(Untold(track.path, "elements that no load writes", holes))

    def _pair(self, path: str, a: torch.Tensor, b: torch.Tensor, a_view: torch.Tensor) -> None:
        a_key, b_key = storage_key(a_view), storage_key(b)
        if a_key is None or b_key is None:
            if a_key != b_key:
                self._differ(
                    path,
                    "geometry",
                    f"{storage.describe(a_view)} serves, a cold load has {storage.describe(b)}",
                )
            else:
                self.untold.append(Untold(path, "a tensor without memory of its own"))
            return
        view = (a_key, a_view.storage_offset(), tuple(a_view.shape), a_view.stride())
        self.covered.add(view)
        if storage._geometry(a_view) != storage._geometry(b):
            self._differ(
                path, "geometry", f"{storage.describe(a_view)} serves, a cold load has {storage.describe(b)}"
            )
            return
        known = (*view, b_key, b.storage_offset())
        if a_key == b_key or known in self._compared:
            return
        self._compared.add(known)
        self._values(path, a_view, b)

    def _values(self, path: str, a: torch.Tensor, b: torch.Tensor) -> None:
        self.tensors += 1
        self.nbytes += a.numel() * a.element_size()
        found = unequal(a, b)
        if found is not None:
            self._differ(path, "value", elements=found.count, numel=a.numel(), first=list(found.first))

    # -- everything else ---------------------------------------------------------------------------------------

    def _match(self, path: str, a: Any, b: Any) -> None:
        if a is b:
            return
        if b is None or (isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor)):
            if b is None:
                self.untold.append(Untold(path, "filled after the load: a cold load has nothing there yet"))
            else:
                self._differ(path, "kind", f"{_kind(a)} serves, a cold load has {_kind(b)}")
            return
        natives = len(self.out.changes)
        super()._match(path, a, b)
        if any(change.kind == "opaque" for change in self.out.changes[natives:]):
            if type(a) is type(b) and slots.is_opaque(a):
                self.natives[path] = self._owners

    def _leaf(self, path: str, a: Any, b: Any) -> None:
        if type(a) is not type(b):
            self._differ(path, "kind", f"{_kind(a)} serves, a cold load has {_kind(b)}")
        elif isinstance(a, torch.nn.Module):
            self._within(path, slots.read(a), slots.read(b))
            for key, value in slots.read(a).items():
                other = slots.read(b)
                if key in other:
                    self._match(slots.step(path, key), value, other[key])
        elif isinstance(a, types.FunctionType):
            self._differ(path, "kind", "a function of other code than a cold load has")
        elif isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape or a.tobytes() != b.tobytes():
                self._differ(path, "value", "a numpy array", numel=int(a.size))
        elif isinstance(a, _PLAIN):
            if not slots.same(a, b):
                self._differ(path, "attribute", f"another {type(a).__name__} than a cold load has")
        elif not slots.same(a, b):
            self.untold.append(Untold(path, f"an object that can't be looked into ({type(a).__name__})"))

    def _within(self, path: str, before: slots.State, now: slots.State) -> None:
        for key, value in now.items():
            if key not in before and key[0] not in ("module", "set"):
                self._differ(slots.step(path, key), "missing", f"a cold load has {_kind(value)} there")
        if ("set", "elements") in before and before["set", "elements"] != now.get(("set", "elements")):
            self.untold.append(Untold(path, "a set"))


def _kind(value: Any) -> str:
    """What a value is, without what is in it."""
    return (
        storage.describe(value)
        if isinstance(value, torch.Tensor)
        else f"an object of type {type(value).__name__}"
    )


__all__ = ["Pairing"]
