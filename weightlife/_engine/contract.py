# SPDX-License-Identifier: Apache-2.0
"""Somebody else at work on the model: which tensor stands where, and loads that are only looked at.

Clients exist that re-create parameters and process layers themselves, and hosts whose own path is left alone. Both are
told from the tensors: those that were sealed after the last load of ours against those that stand there now.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import slots
from weightlife._engine.events import SESSION_END, SESSION_START, bus
from weightlife._engine.skeleton import storage_key
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

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
    modules = list(life.model.modules()) if only is None else [only]
    now = read(life, modules)
    wanted = {id(module) for module in modules}
    sealed = {key: value for key, value in life.contract.items() if key[0] in wanted}
    for key in [*sealed, *(key for key in now if key not in sealed)]:
        if now.get(key) != sealed.get(key):
            return slots.step(life.layer_path(key[0]), key[1])
    return None


def observe(
    life: Lifecycle,
    what: str,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    why: str = "",
) -> Any:
    """Run a load of the host's own and change nothing: time, outcome, and what moved go into a report.

    `why`: what made this load one to be left alone, where that is not the model or the mode.
    """
    if life.observing:
        return call(*args, **kwargs)
    report = LoadReport(
        session_id=uuid.uuid4().hex[:12], model=life.name, operation="reload", opened_by=what,
        generation=life.generation, versions=life.host.versions(), outcome="observed",
        started_at=datetime.now(timezone.utc).isoformat(),
        notes=[f"the host's own path: {why or life.observed or 'mode is observe'}"],
    )  # fmt: skip
    if not why:
        life.seal()  # else it stays what it was: the caller is followed until his parameters are back
    bus.emit(SESSION_START, report.session_id, report=report)
    started = time.perf_counter()
    life.observing = True
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        report.error = errors.safe_text(error)
        raise
    finally:
        life.observing = False
        life.digests.forget("the host's own path loaded weights since")
        report.seconds = time.perf_counter() - started
        moved = None if why else life.contract_changed()
        if moved is not None:
            life.seal()
            report.contract_changes.append(
                {"path": moved, "kind": "moved", "detail": "first of those that moved"}
            )
            life.tell(logging.WARNING, f"{life.name}: {errors.clean(moved)} is another tensor after {what}")
        life.reports.append(report)
        bus.emit(SESSION_END, report.session_id, report=report, outcome="observed", error=report.error or "")
        life.say(report)


__all__ = ["Sealed", "changed", "observe", "read"]
