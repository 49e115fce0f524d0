# SPDX-License-Identifier: Apache-2.0
"""Digests of what a model holds: every tensor that the walk of `slots` reaches, by attribute path."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import slots
from weightlife._engine.skeleton import is_uninitialized

if TYPE_CHECKING:
    from weightlife import digests
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife.report import LoadReport


def tensors(
    model: torch.nn.Module,
    skip: Callable[[Any], bool],
    transient: Callable[[str], bool],
    declared: Iterable[slots.Declared] = (),
    walked: tuple[dict[int, slots.Holder], dict[int, slots.State]] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of all runtime storage with bytes to look at.

    Left out are paths that are `transient` (what requests leave behind), and the integers of an owner with a
    finaliser, which are addresses of native memory. `walked`: what a walk gave, where one was just made.
    """
    holders, states = slots.walk(model, skip, declared) if walked is None else walked
    for ident, state in states.items():
        holder = holders[ident]
        native = slots.is_opaque(holder.obj)
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or is_uninitialized(value):
                continue
            if value.is_meta or value.layout is not torch.strided or value.is_quantized:
                continue
            if native and value.dtype is torch.int64:
                continue
            path = slots.step(holder.path, key)
            if not transient(path):
                yield path, value


def table(
    model: torch.nn.Module,
    skip: Callable[[Any], bool],
    transient: Callable[[str], bool],
    declared: Iterable[slots.Declared] = (),
    **more: Any,
) -> digests.Table:
    """The table of digests of a model, by path. Two paths to one piece of memory cost one digest."""
    from weightlife import digests  # for who asks for them
    from weightlife.kernels import digest

    found = list(tensors(model, skip, transient, declared))
    unique: dict[tuple[Any, ...], int] = {}
    places: list[int] = []
    wanted: list[torch.Tensor] = []
    for _, value in found:
        key = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype, value.device)
        if key not in unique:
            unique[key] = len(wanted)
            wanted.append(value)
        places.append(unique[key])
    values = digest.digests(wanted)
    entries = {
        path: digests.entry(value, values[place]) for (path, value), place in zip(found, places, strict=True)
    }
    return {
        "schema_version": digests.SCHEMA_VERSION, "algorithm": digest.ALGORITHM, **more, "tensors": entries,
    }  # fmt: skip


class Digests:
    """What one model held after its last commit, where the setting asks for it.

    `kept` is a table, or None, and then `why` tells the reason.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = weakref.ref(life)  # not a cycle: a lifecycle dies with its model, at once
        self._on = life.settings.digests == "commit"
        self.kept: digests.Table | None = None
        self.why = life.observed or "no load has ended yet" if self._on else "the setting digests is off"

    def now(self) -> digests.Table:
        """The table of all runtime storage as it is now."""
        life = self._life()
        assert life is not None
        return table(
            life.model, life.host.skip, life.host.transient, life.addresses.declared.values(),
            name=life.name, rank=life.host.rank()[0], generation=life.generation,
        )  # fmt: skip

    def keep(self, report: LoadReport) -> None:
        """After a load. The new weights serve already: a failure is heard of, not raised."""
        if not self._on:
            return
        try:
            self.kept = self.now()
        except Exception as error:
            logging.getLogger("weightlife").exception("digests of the new weights could not be taken")
            self.forget(f"they could not be taken after the last load ({errors.safe_text(error)})")
            report.notes.append(f"no digests were kept: {errors.safe_text(error)}")

    def forget(self, why: str) -> None:
        """What was kept is no longer what should be there."""
        if self._on:
            self.kept, self.why = None, why
