# SPDX-License-Identifier: Apache-2.0
"""Is what processing derives from weights of this update? Each derived tensor carries the epoch in which it was made.

A hook that caches (by a flag, by name, in a module's dict, in `functools.lru_cache`) hands out what it made of former
weights, wherever its cache is: restoring the layer does not reach it. Seen from here that is memory which existed
before this update's hooks ran, and which they did not write. It is stale if the first processing computed it from loaded
weights (`flow`); a constant may be handed out again. A hook that does nothing at all the second time leaves its layer
as the constructor made it: that is noticed, too.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightlife import errors
from weightlife._engine import slots, storage
from weightlife._engine.footprint import ABSENT
from weightlife._engine.skeleton import Composite, Token, storage_key

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession
    from weightlife._engine.stage import Stage


class Derived:
    """What is derived in one model, and when it was made last."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = weakref.ref(life)  # not a cycle: a lifecycle dies with its model, at once
        self.epochs: dict[str, int] = {}  # path -> generation in which it was made or written last
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # storage -> the same, as long as it exists
        self._resolved = False

    def _resolve(self, life: Lifecycle) -> None:
        """The paths of what the first processing computed, once, while its storages still are where it left them."""
        if self._resolved:
            return
        self._resolved = True
        walk = life.addresses.walk
        for step, tensor in walk.tensors() if walk is not None else ():
            key = None if tensor is None else storage_key(tensor)
            if key in life.flow and step.firm and step.owner:
                self.epochs[step.path] = life.generation
                self._known[key] = life.flow[key], life.generation
        life.flow = {}

    def begin(self, session: WeightLoadSession) -> None:
        """An update begins, and addresses are sealed."""
        self._resolve(session.life)

    def check(self, session: WeightLoadSession, values: list[Any]) -> None:
        """After the hooks: every derived tensor of a rebuilt layer is of this update.

        Args:
            session: in generation B's kernel format.
            values: what stands at the steps of the contract's walk now.

        Raises:
            StaleDerivedError: one is older, or a hook left its layer as the constructor made it; by policy.
        """
        stage, life = session.stage, session.life
        assert stage is not None
        if session.settings.contract == "off" or session.kernel_format:
            return
        early = session.streamer.done if session.streamer is not None else set()
        layers = life.plan.rebuild - session.idle - early
        found: list[str] = []
        walk = life.addresses.walk
        if self.epochs and walk is not None:
            for step, tensor in walk.tensors(values):
                if tensor is not None and step.owner in layers and step.path in self.epochs:
                    if self._is_old(session, tensor, layers):
                        found.append(step.path)
        found += unmade(session, layers)
        self._tell(session, found)

    def check_layer(self, session: WeightLoadSession, layer: torch.nn.Module, members: set[int]) -> None:
        """The same for one layer that is processed early, before it is committed.

        Raises:
            StaleDerivedError: by policy.
        """
        if session.settings.contract == "off":
            return
        found: list[str] = []
        if self.epochs:
            above = session.life.layer_path(id(layer))
            holders, states = slots.walk(layer, session.life.host.skip)
            for ident, state in states.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        path = slots.step(".".join(filter(None, (above, holders[ident].path))), key)
                        if path in self.epochs and self._is_old(session, value, members):
                            found.append(path)
        self._tell(session, found + unmade(session, members))

    def _is_old(self, session: WeightLoadSession, tensor: torch.Tensor, layers: set[int]) -> bool:
        """Whether a tensor's memory existed before the hooks of this session ran, and they did not write it."""
        stage = session.stage
        assert stage is not None
        key = storage_key(tensor)
        if key is None or not tensor.numel():
            return False
        track = stage.index.get(key)
        if track is not None and not track.placeholder:
            written = track.stage is not None or track.ever or track.raw or track.retired
            undone = _undone(session, track)
            # What a layer that this update leaves alone keeps, it keeps rightly, also in a table of both.
            return not written and not undone and not track.owners - layers & session.idle
        known = self._known.get(key)
        return known is not None and not known[0].expired() and not session.idle

    def _tell(self, session: WeightLoadSession, found: list[str]) -> None:
        if not found:
            return
        paths = list(dict.fromkeys(found))
        session.problem(
            errors.StaleDerivedError(
                f"{len(paths)} tensors that processing derives from weights were not made from those of this update;"
                f" first {errors.clean(paths[0])}",
                model=session.life.name, layer=paths[0], tensors=paths, session=session.id,
                hint="look for a cache that outlives the layer (a flag, a dict of a Python module, functools.lru_cache)"
                " in its processing; contract='warn' lets it pass",
            ),
            session.settings.contract,
        )  # fmt: skip

    # -- afterwards --------------------------------------------------------------------------------------------

    def committed(self, session: WeightLoadSession) -> None:
        """What was rebuilt is of this generation."""
        if self.epochs and session.stage is not None and not session.kernel_format:
            self._note(session.life.generation, session.life.plan.rebuild - session.idle)

    def aborted(self, session: WeightLoadSession) -> None:
        """Hooks may have put what they made into a cache: it must not serve in a later update either."""
        if self.epochs and session.processed:
            self._note(-1, session.processed)

    def _note(self, epoch: int, layers: set[int]) -> None:
        life = self._life()
        walk = None if life is None else life.addresses.walk
        for step, tensor in walk.tensors() if walk is not None else ():
            if tensor is None or step.owner not in layers or step.path not in self.epochs:
                continue
            if epoch >= 0:
                self.epochs[step.path] = epoch
            key = storage_key(tensor)
            if key is not None:
                known = self._known.get(key)
                if known is None:
                    self._known[key] = StorageWeakRef(tensor.untyped_storage()), epoch
        if len(self._known) > 2 * len(self.epochs) + 64:
            self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}


def unmade(session: WeightLoadSession, layers: set[int]) -> list[str]:
    """Paths of layers that the first processing changed, and that stand as the constructor made them now."""
    stage, life = session.stage, session.life
    assert stage is not None
    skeleton = life.skeleton
    made: set[int] = set()
    raw: dict[int, str] = {}
    for ident, restore in stage.plan.restore.items():
        holder = skeleton.holders[ident]
        changed = life.plan.changed.get(ident, frozenset())
        own = holder.owners & layers
        # A helper of several layers is nobody's evidence (`footprint` makes none of them `rebuild` for it, either).
        if not changed or not own or own <= made or (len(holder.owners) > 1 and not holder.is_module):
            continue
        now, before = slots.read(holder.obj), stage.before.get(ident, {})
        for key, value in restore.items():
            if key not in changed or not (_is_state(value) or _is_state(before.get(key))):
                continue  # a number or a flag is no memory, and may be set by a hook that does nothing else
            if _is_raw(stage, value, now.get(key, ABSENT)):
                for layer in own:
                    raw.setdefault(layer, slots.step(holder.path, key))
            else:
                made |= own
                break
    late = life.host.rerun_deferred() or not session.idle
    return [
        path
        for layer, path in raw.items()
        if layer not in made and (late or life.host.layer_hook(skeleton.holders[layer].obj) is not None)
    ]


def _is_state(value: Any) -> bool:
    return value is not ABSENT and (isinstance(value, (Token, Composite)) or type(value) not in slots.LEAVES)


def _is_raw(stage: Stage, value: Any, now: Any) -> bool:
    """Whether a slot still holds what a load left there."""
    if value is ABSENT:
        return now is ABSENT
    if isinstance(value, Token):
        raw = stage.raw.get(value.index)
        if (
            raw is None
            or not isinstance(now, torch.Tensor)
            or raw[0]() is not now
            or storage_key(now) != raw[1]
        ):
            return False
        watched = stage.watched.get(stage.skeleton.tensors[value.index].storage)
        return watched is None or not (watched[0].hooked or watched[0].raw)
    return not isinstance(value, Composite) and slots.same(value, now)


def kept(session: WeightLoadSession) -> list[storage.Change]:
    """Slots that processing filled with the very tensor that served before, without writing it: perhaps stale.

    A hook that takes a tensor from a cache of its own does that. Whether the tensor depends on the weights can't be
    seen from here: constants do not. A comparison with a cold load tells (`weightlife.testing`).
    """
    stage, life = session.stage, session.life
    assert stage is not None
    early = session.streamer.done if session.streamer is not None else set()
    found = []
    for ident, restore in life.plan.restore.items():
        holder = stage.holders.get(ident)
        if holder is None or not holder.owners & (session.processed - early):
            continue
        before, now = stage.before[ident], slots.read(holder.obj)
        for key in restore:
            a, same = before.get(key), id(now.get(key)) == id(before.get(key))
            if not isinstance(a, torch.Tensor) or not same or not a.numel():
                continue
            track = stage.index.get(storage_key(a) or 0)
            if track is None or (track.stage is None and not track.ever and not _undone(session, track)):
                detail = "processing took over the tensor that served before, as it is"
                found.append(storage.Change(slots.step(holder.path, key), "kept", detail))
    return found


def _undone(session: WeightLoadSession, track: Any) -> bool:
    assert session.stage is not None
    return int(track.storage._cdata) in session.stage.undo or session.life.unsafe


__all__ = ["Derived", "kept", "unmade"]
