# SPDX-License-Identifier: Apache-2.0
"""A load that is never committed: some layers are rebuilt beside those that serve, looked at, and dropped.

It is a session like any other up to the point where that would decide what to copy: the same stage, ledger, contexts,
hooks and order. It tells no listener, casts no vote and leaves no report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine import completeness, pages, processing
from weightlife._engine.arena import Arena
from weightlife._engine.footprint import Plan
from weightlife._engine.ground import Ground
from weightlife._engine.groups import Group
from weightlife._engine.intake import Intake
from weightlife._engine.pages import Place
from weightlife._engine.pieces import Pieces
from weightlife._engine.receive import Receiver
from weightlife._engine.registry import OpenSessions, current
from weightlife._engine.session import State, WeightLoadSession
from weightlife._engine.skeleton import DTYPE_NAMES
from weightlife._engine.stage import Stage
from weightlife._engine.track import Track

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

# Below this a copy is too cheap to be avoided.
_LENT_BYTES = 1 << 18
_COPY = torch.ops.aten.copy_.default


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


class OddLoaderError(BaseException):
    """A loader did more with a tensor than copy it whole: its memory can't stand for what the loader makes of it."""


class _Intake(Intake):
    """Knows source tensors whose own memory is generation B's."""

    def _of_a(self, name: str, tensor: torch.Tensor, track: Track) -> torch.Tensor:
        session = self.session
        assert isinstance(session, Rehearsal)
        if track.number in session.lent:
            return tensor
        return super()._of_a(name, tensor, track)


def _nothing(view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a write changes nothing: of no elements, or `copy_` of elements onto themselves."""
    if view.numel() == 0:
        return True
    if func is not _COPY or not isinstance(args[1], torch.Tensor):
        return False
    given = args[1]
    return (
        given.data_ptr() == view.data_ptr()
        and given.shape == view.shape
        and given.stride() == view.stride()
        and given.dtype == view.dtype
        and given.device == view.device
        and given.is_conj() == view.is_conj()
        and given.is_neg() == view.is_neg()
    )


class Rehearsal(WeightLoadSession):
    """The rebuilding of one group of layers.

    Args:
        life: the model's lifecycle.
        group: what is rebuilt.
        whole: it is the whole model, and the model's own hook runs.
        arena: memory for what is rebuilt.
        ground: generation A.
        lend: a source tensor's own memory may become generation B's: nobody reads it a second time, and writing to it
            changes no file.
        place: where a source tensor is, if that is in a file.
        files: to take pages of.
    """

    told = False  # no load happens

    def __init__(
        self, life: Lifecycle, group: Group, whole: bool, arena: Arena, ground: Ground, lend: bool,
        place: Callable[[str], Place | None], files: pages.Files,
    ) -> None:  # fmt: skip
        settings = life.settings.replace(isolation="staged", nonfinite="off", storage="pinned")
        super().__init__(life, "verify", "update", True, "forbid", settings=settings)
        self.intake = _Intake(self)
        self.group = group
        self.ground = ground
        self.lendable: dict[str, int] = self._whole_tensors() if lend else {}
        self.lent: dict[int, torch.UntypedStorage | None] = {}  # storage number -> what was there before
        self.pieces = Pieces(self, place if lend else None, files)
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
        except BaseException:
            self._judge_rules()
            self._put_back(whole=True)
            raise
        else:
            self._put_back(whole=False)
        finally:
            current.reset(token)
            life.session = None
            OpenSessions.count -= 1

    def _judge_rules(self) -> None:
        """By a rule that does not hold a loader may have written memory that serves: nobody knows what it did."""
        life = self.life
        if self.trust is not None and (life.unsafe or self.trust.strayed()):
            life.unsafe = False
            life.poison("an item that ran by rule was not written where its rule says")

    def _put_back(self, whole: bool) -> None:
        """A as it was. A Ctrl-C in the middle of it is raised when it is done.

        `whole`: it may have stopped anywhere; the next batch takes another look at the model.
        """
        interrupted: BaseException | None = None
        for _ in range(3):
            try:
                with self.life.entered():
                    if whole:
                        self.ground.revert()
                    else:
                        self.ground.leave(self.group.layers)
                break
            except KeyboardInterrupt as error:
                interrupted, whole = error, True
        self.state = State.ABORTED
        self.stage = self.receiver = self.operators = self.trust = None
        self.lent.clear()
        self.pieces.drop()
        self.arena.reset()
        if interrupted is not None:
            raise interrupted

    def show(self) -> Stage:
        """Generation A as it is, and S0 of these layers to come into the module tree. Use it `opened()`."""
        self.stage = self.ground
        self.ground.begin(self._plan, self.group.numbers, self.arena.take)
        self.ground.lendable = frozenset(self.lendable.values()) | self.pieces.begins.keys()
        self.receiver = self._watch(self.stage)
        return self.stage

    def _watch(self, stage: Stage) -> Receiver:
        """As in other sessions; every operation on the model's memory is held against what may be touched."""
        receiver = super()._watch(stage)
        intake = self.intake

        def on_write(track: Track, view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
            self._check(track)
            if track.number in self.lent and intake.recording and not _nothing(view, func, args):
                raise OddLoaderError
            intake.on_write(track, view, func, args)

        def on_read(track: Track, view: torch.Tensor, func: Any) -> None:
            self._check(track)
            if track.number in self.lent and intake.recording and not track.ever:
                raise OddLoaderError  # it computes with the tensor, or looks at a parameter that is still to come
            intake.on_read(track, view, func)

        receiver.on_write, receiver.on_read = on_write, on_read
        return receiver

    def _check(self, track: Track) -> None:
        """An operation on a storage.

        Raises:
            LinkedError: it is of layers that are not rebuilt here, and that a load or a hook writes. OddLoaderError:
                it is memory that a source tensor's stands for.
        """
        mine = self.group.layers
        if track.retired:
            raise OddLoaderError
        if track.owners & mine or not track.owners or track.placeholder:
            return
        others = track.owners & self.life.plan.layers.keys()
        if track.number in self.life.manifest.expected or others & self.life.plan.rebuild:
            self.linked(next(iter(others)))

    # -- memory of the source ----------------------------------------------------------------------------------

    def _whole_tensors(self) -> dict[str, int]:
        """Names whose tensor, as large and of the same dtype, fills a storage whole, and that storage's number."""
        manifest, storages = self.life.manifest, self.life.skeleton.storages
        found = {}
        for name in self.group.names:
            entry = manifest.names[name]
            if len(entry.writes) != 1 or entry.nbytes < _LENT_BYTES:
                continue
            ((number, part),) = entry.writes
            storage = storages[number]
            if (
                number in self.group.numbers
                and manifest.expected[number] == {part: 1}
                and (part.offset, part.numel, part.strides) == (0, storage.numel, (1,))
                and entry.nbytes == storage.nbytes
                and entry.dtype == DTYPE_NAMES[storage.dtype]
                and storage.device.type == "cpu"
            ):
                found[name] = number
        return found

    def _lending(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            number = self.lendable.get(name)
            if number is not None:
                if number not in self.lent and self._fits(tensor, number):
                    self.stand_for(number, tensor.untyped_storage())
            yield name, tensor

    def stand_for(self, number: int, storage: torch.UntypedStorage) -> None:
        """Memory that holds what a load writes is generation B's of a storage."""
        assert self.receiver is not None
        gone = self.lent[number] = self.ground.lend(number, storage)
        self.receiver.index = self.ground.index
        if gone is not None:  # a view that the loader took before leads there
            dtype = self.life.skeleton.storages[number].dtype
            dead = Track(None, gone, gone.nbytes(), dtype, True, "", retired=-1)
            self.ground.index[int(gone._cdata)] = dead

    def free(self, number: int) -> bool:
        """Whether nobody wrote a storage yet."""
        track = self.ground.by_number.get(number)
        return track is not None and track.stage is None and not track.ever

    def _fits(self, tensor: torch.Tensor, number: int) -> bool:
        """Whether a tensor is all of its memory, and that as large and of the kind of the storage."""
        entry = self.life.skeleton.storages[number]
        return (
            type(tensor) is torch.Tensor
            and tensor.device == entry.device
            and tensor.dtype == entry.dtype
            and tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() == entry.nbytes == tensor.nbytes
            and self.free(number)
        )

    def rebuild(self, load: Any, weights: Iterable[tuple[str, torch.Tensor]], trusted: bool) -> None:
        """Receive and process. The module tree shows the result. Use it `opened()`, after `show()`.

        Raises:
            LinkedError: another layer is needed. What a loader or hook raises. CompletenessError and its kin.
        """
        stage = self.stage
        assert stage is not None and self.receiver is not None
        self.phase("prepare")
        stage.present()
        if self._may_trust():
            self.trust = self.pieces.trust()
            # Nothing is to be marked there.
            self.trust.ready.update(dict.fromkeys([*self.lendable.values(), *self.pieces.begins], False))
        self.state = State.PREPARED
        self.receiver.trusted = trusted
        self.phase("receive")
        if self.group.names:
            self.receive(load, self._lending(weights))
        with self.life.entered():
            self.phase("validate")
            stage.show_b()
            if self.trust is not None:
                self.trust.check()
            self.pieces.looked()
            self.note_replaced()
            touched = self.touched()
            outside = (touched - self.group.layers) & self.life.plan.layers.keys()
            if outside:
                self.linked(next(iter(outside)))
            self._complete(touched)
            self.state = State.PROCESSING
            self._rebuild(touched, set())
            self.running = None

    def _complete(self, touched: set[int]) -> None:
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
            self.ground.modules if self.whole_model else [m for m in self.ground.modules if id(m[1]) in self.group.layers],
        )  # fmt: skip


__all__ = ["LinkedError", "OddLoaderError", "Rehearsal"]
