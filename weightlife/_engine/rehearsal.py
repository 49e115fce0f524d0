# SPDX-License-Identifier: Apache-2.0
"""A load that is never committed: some layers are rebuilt beside those that serve, looked at, and dropped.

It is a session like any other up to the point where that would decide what to copy: the same stage, ledger, contexts,
hooks and order. It tells no listener, casts no vote and leaves no report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine import completeness, processing
from weightlife._engine.arena import Arena
from weightlife._engine.footprint import Plan
from weightlife._engine.groups import Group
from weightlife._engine.registry import OpenSessions, current
from weightlife._engine.session import State, WeightLoadSession
from weightlife._engine.stage import Stage
from weightlife._engine.track import Track

if TYPE_CHECKING:
    from weightlife._engine.ledger import Region
    from weightlife._engine.lifecycle import Lifecycle


class LinkedError(BaseException):
    """A layer of another group is needed: rebuild both together. No `Exception`, which a loader may swallow.

    Attributes:
        layer: whose hook or tensor needs it; None where that is not known.
        other: the layer that is needed.
    """

    def __init__(self, layer: int | None, other: int) -> None:
        super().__init__("a layer of another group is needed")
        self.layer = layer
        self.other = other


class _Watch:
    """Stands where early processing stands in other sessions: told of every operation on the model's memory."""

    done: frozenset[int] = frozenset()

    def __init__(self, rehearsal: Rehearsal) -> None:
        self.rehearsal = rehearsal

    def begin(self, name: str) -> None:
        """A tensor is about to be loaded."""

    def between(self) -> None:
        """It was."""

    def count(self, number: int, part: Region, times: int) -> None:
        """A region was written."""

    def close(self) -> None:
        """The session ended."""

    def check(self, track: Track) -> None:
        """An operation on a storage.

        Raises:
            LinkedError: it is of layers that are not rebuilt here, and that a load or a hook writes.
        """
        mine = self.rehearsal.group.layers
        if track.owners & mine or not track.owners or track.placeholder:
            return
        others = track.owners & self.rehearsal.life.plan.layers.keys()
        if track.number in self.rehearsal.life.manifest.expected or others & self.rehearsal.life.plan.rebuild:
            self.rehearsal.linked(next(iter(others)))


class Rehearsal(WeightLoadSession):
    """The rebuilding of one group of layers.

    Args:
        life: the model's lifecycle.
        group: what is rebuilt.
        whole: it is the whole model, and the model's own hook runs.
        arena: memory for what is rebuilt.
    """

    told = False  # no load happens

    def __init__(self, life: Lifecycle, group: Group, whole: bool, arena: Arena) -> None:
        settings = life.settings.replace(isolation="staged", nonfinite="off", storage="pinned")
        super().__init__(life, "verify", "update", True, "forbid", settings=settings)
        self.group = group
        self.whole_model = whole
        self.arena = arena
        self.running: int | None = None  # the layer whose hook runs
        restore = {
            ident: wanted
            for ident, wanted in life.plan.restore.items()
            if life.skeleton.holders[ident].owners & group.layers
        }
        layers = {ident: layer for ident, layer in life.plan.layers.items() if ident in group.layers}
        self._plan = Plan(restore, layers, life.plan.rebuilt_storages)

    @property
    def plan(self) -> Plan:
        """The part of the model's plan that is about these layers."""
        return self._plan

    @property
    def scope(self) -> set[int]:
        """The storages of these layers."""
        return self.group.numbers

    def linked(self, other: int) -> None:
        """Note that a layer outside is needed.

        Raises:
            LinkedError: always.
        """
        raise LinkedError(self.running or self._receiving(), other)

    def _receiving(self) -> int | None:
        """A layer that the tensor under way writes."""
        entry = self.life.manifest.names.get(self.intake.name)
        for number, _ in entry.writes if entry is not None else ():
            for layer in self.life.skeleton.storages[number].layers & self.group.layers:
                return layer
        return None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The life of the rehearsal: the model is exactly what it was when this ends, however it ends."""
        life = self.life
        life.session = self
        OpenSessions.count += 1
        token = current.set(self)
        try:
            yield
        finally:
            current.reset(token)
            try:
                self._put_back()
            finally:
                life.session = None
                OpenSessions.count -= 1

    def _put_back(self) -> None:
        """A as it was. A Ctrl-C in the middle of it is raised when it is done."""
        interrupted: BaseException | None = None
        for _ in range(3):
            try:
                if self.stage is not None:
                    with self.life.entered():
                        self.stage.revert()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        self.state = State.ABORTED
        self.stage = self.receiver = self.operators = self.streamer = None
        self.arena.reset()
        if interrupted is not None:
            raise interrupted

    def show(self) -> Stage:
        """Generation A as it is, and S0 of these layers in the module tree. Use it `opened()`."""
        life = self.life
        self.stage = Stage(
            life.model, life.skeleton, self._plan, life.host.skip, True, life.fill,
            life.addresses.declared.values(), life.plan,
        )  # fmt: skip
        self.stage.memory = self.arena.take
        self.receiver = self._watch(self.stage)
        self.streamer = _Watch(self)  # type: ignore[assignment]
        return self.stage

    def rebuild(self, load: Any, weights: Iterable[tuple[str, torch.Tensor]], trusted: bool) -> None:
        """Receive and process. The module tree shows the result. Use it `opened()`, after `show()`.

        Raises:
            LinkedError: another layer is needed. What a loader or hook raises. CompletenessError and its kin.
        """
        stage = self.stage
        assert stage is not None and self.receiver is not None
        self.phase("prepare")
        stage.present()
        self.state = State.PREPARED
        self.receiver.trusted = trusted
        self.phase("receive")
        if self.group.names:
            self.receive(load, weights)
        with self.life.entered():
            self.phase("validate")
            stage.show_b()
            self.note_replaced()
            touched = self.touched()
            outside = (touched - self.group.layers) & self.life.plan.layers.keys()
            if outside:
                self.linked(next(iter(outside)))
            self._check(touched)
            self.state = State.PROCESSING
            self._rebuild(touched, set())
            self.running = None

    def _check(self, touched: set[int]) -> None:
        if self.group.numbers:
            completeness.check(self, touched)

    def _process(self, wanted: set[int]) -> None:
        life, host = self.life, self.life.host

        def mine(layer: torch.nn.Module) -> bool:
            if id(layer) in self.group.layers and id(layer) in wanted:
                self.running = id(layer)
                return True
            return False

        def late(layer: torch.nn.Module) -> bool:
            if id(layer) in self.group.layers or self.whole_model:
                self.running = id(layer)
                return True
            return False

        tied = host.ties_late() and any(
            not host.may_process_early(life.skeleton.holders[ident].obj)
            for ident in self.group.layers
            if host.layer_hook(life.skeleton.holders[ident].obj) is not None
        )
        processing.run(
            life.model, host, mine, late, self.phase, self.account.layer, tied or self.whole_model, self.whole_model,
        )  # fmt: skip


__all__ = ["LinkedError", "Rehearsal"]
