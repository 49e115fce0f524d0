# SPDX-License-Identifier: Apache-2.0
"""The public manifest of a model, made from what its lifecycle learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from weightlife._engine import ledger
from weightlife._engine.skeleton import Skeleton
from weightlife._manifest import LayerEntry, LeftOut, Manifest, StorageEntry, TensorEntry, Write

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.manifest import Manifest as Learned


def manifest_of(life: Lifecycle, left_out: bool = True, known: Learned | None = None) -> Manifest:
    """What a complete load of this model brings, writes and leaves alone.

    Args:
        life: a lifecycle whose first load is over.
        left_out: whether to look for what is left alone, which counts elements where regions don't tile a storage.
        known: by default what was learned; after a dummy start what was routed.
    """
    skeleton = life.skeleton
    if known is None:
        known = life.routed if life.manifest.provisional and life.routed is not None else life.manifest
    order = {ident: position for position, ident in enumerate(life.plan.layers)}
    took: dict[int, list[str]] = {}
    for number, dtype in sorted(known.casts):
        took.setdefault(number, []).append(dtype)
    storages = tuple(
        StorageEntry(
            _plain(storage.dtype), storage.numel, tuple(skeleton.tensors[i].path for i in storage.tensors),
            tuple(sorted(order[ident] for ident in storage.layers if ident in order)), tuple(took.get(number, ())),
        )
        for number, storage in enumerate(skeleton.storages)
    )  # fmt: skip
    tensors = {
        name: TensorEntry(
            name, entry.dtype, entry.shape, tuple(Write(number, *part) for number, part in entry.writes)
        )
        for name, entry in known.names.items()
    }
    rank, world = life.host.rank()
    return Manifest(
        model=life.name, tensors=tensors, storages=storages,
        layers=tuple(LayerEntry(layer.path, layer.strategy, layer.reason) for layer in life.plan.layers.values()),
        left_out=tuple(_left_out(life, known)) if left_out and known.names else (),
        ties=dict(life.aliases), provisional=known.provisional, rank=rank, world_size=world,
        generation=life.generation, versions=life.host.versions(),
    )  # fmt: skip


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _left_out(life: Lifecycle, known: Learned) -> Iterator[LeftOut]:
    for name, entry in known.names.items():
        if not entry.writes:
            tied = life.aliases.get(name)
            yield LeftOut("name", name, f"tied to {tied}" if tied else "no parameter of the model takes it")
    for number, storage in enumerate(life.skeleton.storages):
        written = known.expected.get(number, Counter())
        if storage.numel == 0 or ledger.tiled(storage.numel, written):
            continue
        path = life.skeleton.tensors[storage.tensors[0]].path
        if not written:
            yield LeftOut("tensor", path, _made(life.skeleton, number), storage.numel, storage.numel)
            continue
        holes = int((ledger.counts(storage.numel, written) == 0).sum())
        if holes:
            why = "padding, or what only the constructor sets"
            yield LeftOut("tensor", path, why, holes, storage.numel)


def _made(skeleton: Skeleton, number: int) -> str:
    parameter = any(
        issubclass(skeleton.tensors[i].cls, torch.nn.Parameter) for i in skeleton.storages[number].tensors
    )
    what = "a parameter that the checkpoint has not" if parameter else "computed by the constructor"
    return f"{what}; no load writes it"
