# SPDX-License-Identifier: Apache-2.0
"""Elements that a load does not write: padding, sentinels, constants. They get what a cold load would find there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightlife import errors
from weightlife._engine.intake import mask as mask_of
from weightlife._engine.intake import whole
from weightlife._engine.skeleton import view_on

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession


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
        touched = bool(track.ever) or track.irregular
        if track.placeholder:
            if not session.life.skeleton.storages[number].layers & layers:
                continue
            _placeholder(session, number)
        elif touched and track.stage is not None:
            if whole(track):
                continue
            mask = mask_of(track)
            if not mask.all():
                hole = torch.from_numpy(~mask)
                a = view_on(track.storage, track.dtype, 0, (track.numel,), (1,))
                b = view_on(track.stage, track.dtype, 0, (track.numel,), (1,))
                b[hole] = a[hole]
                if session.life.manifest.provisional:
                    session.life.skeleton.fill_kept(number, b, ~mask)
        elif session.life.manifest.provisional and not touched:
            # A dummy wrote sentinels and constants too: what the first real load leaves alone goes back.
            storage = session.life.skeleton.storages[number]
            if storage.kept is not None and storage.kept_index is None and not track.placeholder:
                stage.stage_live(track)
                session.life.skeleton.fill_kept(
                    number, view_on(track.current, track.dtype, 0, (track.numel,), (1,)), None
                )


def _placeholder(session: WeightLoadSession, number: int) -> None:
    stage = session.stage
    assert stage is not None
    track = stage.by_number[number]
    if track.numel == 0 or whole(track):
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
