# SPDX-License-Identifier: Apache-2.0
"""What post-load processing changes, learned by difference and never from knowledge of a layer.

Between the constructor's state (S0) and the state after the first processing (S2) some slots appear, vanish, change
identity or storage, or are written in place. Those slots, and only those, go back to what the constructor made
before a reload. Restoring whole `__dict__`s instead would wipe what the engine bound later (`kv_cache`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from weightlife._engine import slots
from weightlife._engine.skeleton import (
    INFERENCE,
    Composite,
    Skeleton,
    Token,
    is_inference,
    storage_key,
    tokens,
)


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()

Restore = dict[int, dict[slots.Key, Any]]
"""Holder id -> slot -> constructor's value (`Token` for a tensor, `ABSENT` where there was none)."""


@dataclass(eq=False, repr=False)
class LayerPlan:
    """How one module is reloaded, and why: `direct`, `rebuild` or `refuse`."""

    path: str
    strategy: str
    reason: str


@dataclass(eq=False, repr=False)
class Plan:
    """What a reload of a model restores, by holder, and the strategy of every layer with tensors."""

    restore: Restore = field(default_factory=dict)
    layers: dict[int, LayerPlan] = field(default_factory=dict)
    rebuilt_storages: set[int] = field(default_factory=set)
    # What differed itself, not for what it shares: holder id -> slots.
    changed: dict[int, frozenset[slots.Key]] = field(default_factory=dict)
    inplace: frozenset[int] = frozenset()  # storages that processing wrote in place

    @property
    def rebuild(self) -> set[int]:
        """Ids of the modules that are rebuilt."""
        return {ident for ident, layer in self.layers.items() if layer.strategy == "rebuild"}

    def refreshable(self, ident: int, skeleton: Skeleton) -> bool:
        """Whether a layer's constructor tensors all still stand after processing, which only added to them.

        Such a layer can be processed again from its live values.
        """
        mine = [
            value
            for holder, restore in self.restore.items()
            if ident in skeleton.holders[holder].owners
            for value in restore.values()
        ]
        return bool(mine) and not any(isinstance(value, (Token, Composite)) for value in mine)

    @property
    def refused(self) -> list[LayerPlan]:
        """Layers that cannot be restored safely."""
        return [layer for layer in self.layers.values() if layer.strategy == "refuse"]


def attributes_differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two tensors' attributes differ; containers by their content, one level deep."""
    return bool(before.keys() ^ after.keys()) or any(not _alike(v, after[k]) for k, v in before.items())


def _alike(a: Any, b: Any) -> bool:
    if type(a) is type(b) and type(a) in (list, dict):
        return not slots.differing(slots.read(a), slots.read(b))
    return slots.same(a, b)


def tensor_change(skeleton: Skeleton, token: Token | Composite, value: Any, written: set[int]) -> str | None:
    """Why a slot with tensors differs from what the constructor made, or None if it does not."""
    if isinstance(token, Composite):
        split = Composite.split(value)
        if split is None or type(value) is not token.kind or len(split[0]) != len(token.parts):
            return "replaced"
        for part, now in zip(token.parts, split[0], strict=True):
            if isinstance(part, (Token, Composite)):
                why = tensor_change(skeleton, part, now, written)
                if why is not None:
                    return why
            elif not slots.same(part, now):
                return "changed"
        return None
    made = skeleton.tensors[token.index]
    if not isinstance(value, torch.Tensor):
        return "removed"
    if made.ref() is not value:
        return "replaced"
    if skeleton.storage_of(value) != made.storage:
        return "moved to another storage"
    if (
        tuple(value.shape) != made.shape
        or value.stride() != made.stride
        or value.dtype != made.dtype
        or value.storage_offset() != made.offset
    ):
        return "reshaped"
    if type(value) is not made.cls:
        return "given another class"
    if made.storage in written:
        return "written in place"
    if attributes_differ(made.attributes, getattr(value, "__dict__", {})):
        return "given other attributes"
    return None


Loaded = dict[int, dict[slots.Key, "tuple[weakref.ref[torch.Tensor], int | None] | None"]]
"""Slots that a loader filled: the tensor and its storage where it put one in the constructor's place, else None."""


def by_loader(skeleton: Skeleton) -> Loaded:
    """What differs from the constructor's state before the hooks run: loaders did that, and no hook has to repeat it."""
    found: Loaded = {}
    for ident, holder in skeleton.holders.items():
        before, now = skeleton.states[ident], slots.read(holder.obj)
        for key, value in now.items():
            was = before.get(key, ABSENT)
            if was is ABSENT:
                found.setdefault(ident, {})[key] = None
            elif isinstance(was, Token) and isinstance(value, torch.Tensor):
                made = skeleton.tensors[was.index]
                if made.ref() is not value or skeleton.storage_of(value) != made.storage:
                    found.setdefault(ident, {})[key] = weakref.ref(value), storage_key(value)
    return found


def _as_loaded(loaded: Loaded, ident: int, key: slots.Key, obj: Any) -> bool:
    """Whether a slot was filled by a loader, and no hook has exchanged that."""
    mine = loaded.get(ident, {})
    if key not in mine:
        return False
    known = mine[key]
    now = None if known is None else slots.read(obj).get(key)
    return known is None or (
        isinstance(now, torch.Tensor) and known[0]() is now and storage_key(now) == known[1]
    )


def learn(
    skeleton: Skeleton, model: torch.nn.Module, written: set[int], loaded: Loaded | None = None
) -> Plan:
    """Compare S0 with the present state (S2) and make the plan.

    Args:
        skeleton: the constructor's state.
        model: the model after its first processing.
        written: numbers of storages that processing wrote in place.
        loaded: what `by_loader` found before it.
    """
    plan = Plan()
    reasons: dict[int, str] = {}
    unwritable: set[int] = set()
    module_ids = {id(module) for module in model.modules()}
    for ident, holder in skeleton.holders.items():
        before = skeleton.states[ident]
        after = slots.read(holder.obj)
        restore: dict[slots.Key, Any] = {}
        there = 0
        for key, was in before.items():
            now = after.get(key, ABSENT)
            there += now is not ABSENT
            if was is now and type(now) in slots.LEAVES:
                continue
            if isinstance(now, torch.Tensor) and is_inference(now):
                unwritable |= holder.owners
            why: str | None
            if isinstance(was, (Token, Composite)):
                why = tensor_change(skeleton, was, now, written)
            elif now is ABSENT:
                why = "removed"
            else:
                why = None if slots.same(was, now) else "changed"
            if why is not None:
                restore[key] = was
                _note(reasons, holder, f"{slots.step('', key)} {why}")
        if there < len(after):
            for key, now in after.items():
                if key not in before:
                    if isinstance(now, torch.Tensor) and is_inference(now):
                        unwritable |= holder.owners
                    restore[key] = ABSENT
                    _note(reasons, holder, f"{slots.step('', key)} added")
        if restore:
            plan.restore[ident] = restore
    plan.changed = {
        ident: frozenset(
            key for key in restore if not _as_loaded(loaded or {}, ident, key, skeleton.holders[ident].obj)
        )
        for ident, restore in plan.restore.items()
    }
    plan.inplace = frozenset(written)
    _close_over_storages(skeleton, plan, reasons)
    paths = {id(module): name for name, module in model.named_modules()}
    for ident, holder in skeleton.holders.items():
        if holder.is_module:
            path = paths.get(ident, holder.path)
            if ident in reasons:
                plan.layers[ident] = LayerPlan(path, "rebuild", reasons[ident])
            elif any(isinstance(value, Token) for value in skeleton.states[ident].values()):
                plan.layers[ident] = LayerPlan(path, "direct", "processing changed nothing")
    for ident in unwritable & module_ids:
        plan.layers[ident] = LayerPlan(paths[ident], "refuse", f"it holds a tensor {INFERENCE}")
    for path, why in skeleton.unsupported.items():
        owner = _owner_of(skeleton, path)
        if owner in module_ids:
            plan.layers[owner] = LayerPlan(paths.get(owner, path), "refuse", f"{path}: {why}")
    return plan


def _note(reasons: dict[int, str], holder: slots.Holder, what: str) -> None:
    if len(holder.owners) > 1 and not holder.is_module:
        # A helper shared by several layers (one MoE configuration object, say) is restored, but does not make
        # all of its owners `rebuild`: that would pull in half the model for one counter.
        return
    for owner in holder.owners:
        if owner not in reasons:
            where = "" if holder.is_module else f"{holder.path.rpartition('.')[2]}."
            reasons[owner] = where + what


def _close_over_storages(skeleton: Skeleton, plan: Plan, reasons: dict[int, str]) -> None:
    """A slot on a storage that is rebuilt is rebuilt too, wherever it is held: ties, alias buffers, views."""
    for slots_to_restore in plan.restore.values():
        for value in slots_to_restore.values():
            for token in tokens(value):
                plan.rebuilt_storages.add(skeleton.tensors[token.index].storage)
    if not plan.rebuilt_storages:
        return
    for ident, state in skeleton.states.items():
        holder = skeleton.holders[ident]
        for key, value in state.items():
            if type(value) in slots.LEAVES:
                continue
            if any(skeleton.tensors[token.index].storage in plan.rebuilt_storages for token in tokens(value)):
                restore = plan.restore.setdefault(ident, {})
                if key not in restore:
                    restore[key] = value
                    _note(reasons, holder, f"{slots.step('', key)} shares a rebuilt storage")


def _owner_of(skeleton: Skeleton, path: str) -> int:
    for ident, holder in skeleton.holders.items():
        if holder.is_module and (path == holder.path or path.rpartition(".")[0] == holder.path):
            return ident
    return -1


def live_numbers(skeleton: Skeleton, plan: Plan) -> dict[int, int]:
    """Storage identity of live tensors in `direct` slots -> the constructor's storage number."""
    numbers: dict[int, int] = {}
    for ident, state in skeleton.states.items():
        holder = skeleton.holders[ident]
        restore = plan.restore.get(ident, {})
        now: slots.State | None = None
        for key, value in state.items():
            if not isinstance(value, Token) or key in restore:
                continue
            if now is None:
                now = slots.read(holder.obj)
            tensor = now.get(key)
            if isinstance(tensor, torch.Tensor) and (identity := storage_key(tensor)) is not None:
                numbers[identity] = skeleton.tensors[value.index].storage
    return numbers
