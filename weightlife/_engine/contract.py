# SPDX-License-Identifier: Apache-2.0
"""Somebody else at work on the model: which tensor stands where, and loads that are only looked at.

Clients exist that re-create parameters and process layers themselves, and hosts whose own path is left alone. Both are
told from the tensors: those that were sealed after the last load of ours against those that stand there now.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import slots
from weightlife._engine.events import SESSION_END, SESSION_START, bus
from weightlife._engine.skeleton import Token, storage_key
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

_HALF_WAY = "a load that was left to its caller, who re-created parameters, failed half way"

Sealed = dict[tuple[int, slots.Key], Any]
"""Module id and slot -> identity, storage and shape of its tensor."""


def read(life: Lifecycle, modules: Iterable[torch.nn.Module]) -> Sealed:
    """Which tensor stands in every slot that a load writes or that processing makes."""
    # Parameters, and buffers that are rebuilt. Others are the model's own business: the first forward pass with
    # YaRN replaces the rotary cache, and is no client at work.
    sealed: Sealed = {}  # of tuples of numbers and text, which garbage collections leave alone
    for module in modules:
        own, ident = vars(module), id(module)
        for name, value in own["_parameters"].items():
            if isinstance(value, torch.Tensor):
                sealed[ident, ("param", name)] = (id(value), storage_key(value), tuple(value.shape))
        rebuilt = life.plan.restore.get(ident, {})
        for name, value in own["_buffers"].items():
            if ("buffer", name) in rebuilt and isinstance(value, torch.Tensor):
                sealed[ident, ("buffer", name)] = (id(value), storage_key(value), tuple(value.shape))
    return sealed


def changed(life: Lifecycle, only: torch.nn.Module | None = None) -> str | None:
    """The first slot, of the model or of one layer, that no longer holds what was sealed, or None."""
    return next((path for path, _ in _differing(life, only)), None)


def recreated(life: Lifecycle) -> str | None:
    """The first slot that a client brought back into model format, or None.

    Who merely put another tensor in the place of one that serves (a clone, other data) is no client at work: his next
    load is one of ours. Left to itself it would write into processed weights.
    """
    for path, (key, sealed, now) in _differing(life, None):
        if sealed is None or now is None or sealed[2] != now[2]:
            return path
        made = life.plan.restore.get(key[0], {}).get(key[1])
        if isinstance(made, Token) and life.skeleton.tensors[made.index].shape == tuple(now[2]):
            return path
    return None


def _differing(life: Lifecycle, only: torch.nn.Module | None) -> Iterator[tuple[str, tuple[Any, Any, Any]]]:
    """Paths with slot, what was sealed there and what stands there now (None: no tensor)."""
    modules = list(life.model.modules()) if only is None else [only]
    now = read(life, modules)
    wanted = {id(module) for module in modules}
    sealed = {key: value for key, value in life.contract.items() if key[0] in wanted}
    for key in [*sealed, *(key for key in now if key not in sealed)]:
        if now.get(key) != sealed.get(key):
            yield slots.step(life.layer_path(key[0]), key[1]), (key, sealed.get(key), now.get(key))


def observe(
    life: Lifecycle,
    what: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    why: str = "",
    told: str = "",
) -> Any:
    """Run a load of the host's own and change nothing: time, outcome, and what moved go into a report.

    `why`: what made this load one to be left alone, where that is not the model or the mode. If such a load fails, what
    it wrote is in the weights that serve, and they must not: until one ends, or an update of ours commits. `told`: why the mode in force is to observe, where nobody asked for it.
    """
    if life.observing:
        return call(*args, **kwargs)
    rank, world = life.host.rank()
    report = LoadReport(
        session_id=uuid.uuid4().hex[:12], model=life.name, operation="reload", opened_by=what,
        rank=rank, world_size=world,
        generation=life.generation, versions=life.host.versions(), outcome="observed",
        started_at=datetime.now(timezone.utc).isoformat(),
        notes=[f"the host's own path: {why or life.observed or told or 'mode is observe'}"],
    )  # fmt: skip
    if not why:
        life.seal()  # else it stays what it was: the caller is followed until his parameters are back
    bus.emit(SESSION_START, report.session_id, report=report)
    started = time.perf_counter()
    life.observing = True
    try:
        out = call(*args, **kwargs)
        if why and life.poisoned == _HALF_WAY:
            life.healed()
        return out
    except BaseException as error:
        report.error = errors.safe_text(error)
        if why:
            life.poison(_HALF_WAY)
        raise
    finally:
        life.observing = False
        life.digests.forget("the host's own path loaded weights since")
        report.seconds = time.perf_counter() - started
        moved = None if why else changed(life)
        if moved is not None:
            life.seal()
            report.contract_changes.append(
                {"path": moved, "kind": "moved", "detail": "first of those that moved"}
            )
            life.tell(logging.WARNING, f"{life.name}: {errors.clean(moved)} is another tensor after {what}")
        life.reports.append(report)
        bus.emit(SESSION_END, report.session_id, report=report, outcome="observed", error=report.error or "")
        life.say(report)


__all__ = ["Sealed", "changed", "observe", "read", "recreated"]
