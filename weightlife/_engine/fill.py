# SPDX-License-Identifier: Apache-2.0
"""Elements that a load does not write: padding, sentinels, constants. They get what a cold load would find there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightlife import errors
from weightlife._engine import storage as storages
from weightlife._engine.skeleton import view_on
from weightlife._engine.track import mask as mask_of
from weightlife._engine.track import whole

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession


def restore(session: WeightLoadSession, touched: set[int]) -> set[int]:
    """Put untouched layers back, give unwritten elements their values. Returns the layers to process."""
    life, stage = session.life, session.stage
    assert stage is not None
    rebuild = session.plan.rebuild
    loaded = life.manifest.layers(life.skeleton) if not life.manifest.provisional else touched
    derived = {i for i in rebuild - loaded - touched if has_hook(life, i)}
    session.idle = (rebuild & loaded) - touched
    if session.refresh:
        fresh = {i for i in session.idle if life.plan.refreshable(i, life.skeleton)}
        session.idle -= fresh
        derived |= fresh
    # What has neither a hook nor weights of its own (a quant method that is a module) follows the layer above it.
    followers = rebuild - loaded - touched - derived
    session.idle |= {i for i in followers if _nearest_hooked(life, i) in session.idle}
    stage.put_back(session.idle)
    unwritten(session, touched | derived | (followers - session.idle))
    return touched | derived


def has_hook(life: Lifecycle, ident: int) -> bool:
    """Whether a module is processed by a hook of its own."""
    module = life.skeleton.holders[ident].obj
    return life.host.layer_hook(module) is not None or life.host.is_deferred(module) or module is life.model


def _nearest_hooked(life: Lifecycle, ident: int) -> int:
    """The nearest module above one that has a hook (-1: none)."""
    path = life.layer_path(ident)
    while path:
        path = path.rpartition(".")[0]
        for other, layer in life.plan.layers.items():
            if layer.path == path and has_hook(life, other):
                return other
    return -1


def unwritten(session: WeightLoadSession, layers: set[int], numbers: list[int] | None = None) -> None:
    """Give elements that this load did not write the value that a cold load would find there.

    `numbers`: only on these storages.
    """
    stage = session.stage
    assert stage is not None
    chosen = stage.by_number if numbers is None else stage.by_number.keys() & set(numbers)
    for number in list(chosen):
        track = stage.by_number[number]
        if track.retired:
            continue
        touched = bool(track.ever) or track.irregular or track.stage is not None
        if track.placeholder:
            if not session.life.skeleton.storages[number].layers & layers:
                continue
            _placeholder(session, number)
        elif touched:
            provisional = session.life.manifest.provisional
            if track.stage is None and not provisional:
                continue  # in place the rest is A's already
            if session.life.manifest.whole(number, track) or whole(track):
                continue
            mask = mask_of(track)
            if mask.all():
                continue
            now = view_on(track.current, track.dtype, 0, (track.numel,), (1,))
            if track.stage is not None:
                hole = torch.from_numpy(~mask)
                now[hole] = view_on(track.storage, track.dtype, 0, (track.numel,), (1,))[hole]
            if provisional:
                session.life.skeleton.fill_kept(number, now, ~mask)
        elif session.life.manifest.provisional:
            # A dummy wrote sentinels and constants too: what the first real load leaves alone goes back.
            storage = session.life.skeleton.storages[number]
            if storage.kept is not None and storage.kept_index is None and not track.placeholder:
                # In place this is a write to memory that serves like any other: undone, or beyond the budget.
                if stage.isolated or storages.keep_undo(session, track.storage):
                    stage.stage_live(track)
                session.life.skeleton.fill_kept(
                    number, view_on(track.current, track.dtype, 0, (track.numel,), (1,)), None
                )


def _placeholder(session: WeightLoadSession, number: int) -> None:
    stage = session.stage
    assert stage is not None
    track = stage.by_number[number]
    if track.numel == 0 or session.life.manifest.whole(number, track) or whole(track):
        return
    mask = mask_of(track)
    if mask.all():
        return
    memory = view_on(track.storage, track.dtype, 0, (track.numel,), (1,))
    known = session.life.skeleton.fill_kept(number, memory, ~mask)
    if not known and not session.life.manifest.provisional and session.partial != "allow":
        raise errors.MissingTensorError(
            f"{int((~mask).sum())} elements of {track.path} were neither received nor made by the constructor",
            model=session.life.name, layer=track.path, session=session.id,
        )  # fmt: skip
    if not known:
        session.report.notes.append(f"{track.path}: {int((~mask).sum())} elements have no known value")
