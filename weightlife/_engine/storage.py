# SPDX-License-Identifier: Apache-2.0
"""Commit: generation B's values into the storage that generation A has, or B's storage in A's place.

`pinned`: every slot that held a tensor in A and holds one of the same geometry in B gets B's values in A's memory;
every object of B (new kernel objects, closures, frozen dataclasses) that refers to a moved tensor is made to look at
A's memory by exchanging that tensor's data, not by rewriting references. `adopted`: B's memory stays.

Everything is decided before the first byte is copied: what cannot be pinned is refused while A is whole.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import slots
from weightlife._engine.footprint import attributes_differ
from weightlife._engine.operators import CustomOperators
from weightlife._engine.skeleton import is_uninitialized, storage_key, view_on
from weightlife._engine.stage import Stage
from weightlife._engine.track import Track
from weightlife.kernels import backends

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession


@dataclass
class Change:
    """One difference between the contract of A and that of B. `kind`: moved, added, removed, opaque."""

    path: str
    kind: str
    detail: str

    def to_dict(self) -> dict[str, str]:
        """Plain data for the report."""
        return {"path": self.path, "kind": self.kind, "detail": self.detail}


@dataclass
class Move:
    """B's tensor goes into A's."""

    path: str
    a: torch.Tensor  # a view of A's memory
    b: torch.Tensor
    a_object: torch.Tensor
    owners: frozenset[int] = frozenset()
    cover: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # shape and stride without repeated elements

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Destination and source of the copy."""
        b = self.b.detach()
        if self.cover is None:
            return self.a, b
        shape, stride = self.cover
        return self.a.as_strided(shape, stride), b.as_strided(shape, stride)


@dataclass
class Settlement:
    """What a commit will do, decided before it does anything."""

    moves: list[Move] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    rebind: list[tuple[torch.nn.Module, str, str, torch.Tensor]] = field(default_factory=list)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # B identity -> A storage
    keep_alive: list[tuple[frozenset[int], torch.UntypedStorage]] = field(default_factory=list)

    @property
    def moved(self) -> list[Change]:
        """Contract violations: storage that cannot keep its address."""
        return [change for change in self.changes if change.kind == "moved"]


def _cover(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and stride that reach each element of a tensor once, or None where that is no rectangle.

    An expanded tensor (stride 0) repeats its elements, and can't be copied into as it is.
    """
    dims = [
        (1 if stride == 0 else size, stride)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    reach = 0
    for size, stride in sorted(dims, key=lambda dim: dim[1]):
        if size > 1:
            if stride <= reach:
                return None
            reach += (size - 1) * stride
    return tuple(size for size, _ in dims), tuple(stride for _, stride in dims)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def describe(tensor: torch.Tensor) -> str:
    """Geometry in words, without values."""
    if is_uninitialized(tensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return f"{type(tensor).__name__} without storage"
    return (
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} stride {list(tensor.stride())} "
        f"on {tensor.device}, storage of {tensor.untyped_storage().nbytes()} bytes"
    )


def a_views(stage: Stage) -> dict[int, torch.Tensor]:
    """Id of each tensor of A (alive in the stage) -> a view of its memory as A has it."""
    return {id(tensor): view for track in stage.index.values() for tensor, view in track.tensors}


class Settler:
    """Pairs the tensors of A and B by path.

    A persistent holder is compared slot by slot; where both generations hold objects of one type (a new kernel
    object, a closure of the same code), the comparison goes into them. An opaque owner is taken whole.
    """

    def __init__(self, stage: Stage, views: dict[int, torch.Tensor] | None = None) -> None:
        self.stage = stage
        self.out = Settlement()
        self._seen: set[tuple[int, int]] = set()
        self._moved: set[int] = set()
        self._owners: frozenset[int] = frozenset()
        self._claims: dict[
            int, list[tuple[int, int, int]]
        ] = {}  # A storage -> byte ranges and who fills them
        self._a_views = a_views(stage) if views is None else views

    def settle(self) -> Settlement:
        """Compare A (as remembered) with B (as the module tree shows it now)."""
        self._staged_and_replaced()
        return self.settle_only(self.stage.before)

    def settle_only(self, holders: Iterable[int]) -> Settlement:
        """The same for some holders, without what loaders wrote into memory that serves."""
        stage = self.stage
        for ident in holders:
            before = stage.before.get(ident)
            if before is None:
                continue
            holder = stage.holders[ident]
            self._owners = frozenset(holder.owners)
            now = slots.read(holder.obj)
            for key in slots.differing(before, now):
                path = slots.step(holder.path, key)
                if key not in now:
                    if isinstance(before[key], torch.Tensor):
                        self.out.changes.append(Change(path, "removed", describe(before[key])))
                elif key not in before:
                    if isinstance(now[key], torch.Tensor):
                        self.out.changes.append(Change(path, "added", describe(now[key])))
                else:
                    self._match(path, before[key], now[key])
                    self._rebind(holder, key, before[key], now[key])
        return self.out

    def _staged_and_replaced(self) -> None:
        done: set[int] = set()
        for track in self.stage.index.values():
            if track.placeholder or id(track) in done:
                continue
            done.add(id(track))
            if track.stage is not None:
                whole = (track.numel,)
                a = view_on(track.storage, track.dtype, 0, whole, (1,))
                b = view_on(track.stage, track.dtype, 0, whole, (1,))
                self.out.moves.append(Move(track.path, a, b, a))
                self.out.storages[int(track.stage._cdata)] = track.storage
                self._claim(int(track.storage._cdata), int(track.stage._cdata), a)
            for tensor, a_view in track.tensors:
                identity = storage_key(tensor)
                known = {int(track.storage._cdata), int(track.current._cdata)}
                if identity not in known:  # `.data =` by a loader or a hook
                    self._pair(track.path, tensor, tensor, a_view)
                elif (
                    _geometry(tensor) != _geometry(a_view)
                    or tensor.storage_offset() != a_view.storage_offset()
                ):
                    self.out.changes.append(
                        Change(track.path, "moved", f"{describe(a_view)} became {describe(tensor)}")
                    )

    def _match(self, path: str, a: Any, b: Any) -> None:
        if a is b or (id(a), id(b)) in self._seen:
            return
        self._seen.add((id(a), id(b)))
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                self._pair(path, a, b, self._a_views.get(id(a), a))
            elif isinstance(a, torch.Tensor):
                self.out.changes.append(Change(path, "removed", describe(a)))
            else:
                self.out.changes.append(Change(path, "added", describe(b)))
            return
        if type(a) is not type(b) or isinstance(a, torch.nn.Module):
            self._leaf(path, a, b)
            return
        if slots.is_opaque(a):
            self.out.changes.append(
                Change(path, "opaque", f"{type(a).__name__} owns a native resource: replaced whole")
            )
            return
        if isinstance(a, types.FunctionType) and a.__code__ is not b.__code__:
            self._leaf(path, a, b)
            return
        if not (
            hasattr(a, "__dict__")
            or isinstance(a, (list, tuple, dict, types.FunctionType, functools.partial))
        ):
            if not slots._slot_names(a):
                self._leaf(path, a, b)
                return
        before = self.stage.before.get(id(a)) or slots.read(a)
        now = slots.read(b)
        self._within(path, before, now)
        for key, value in before.items():
            if key in now and key[0] not in ("module", "set"):
                self._match(slots.step(path, key), value, now[key])

    def _leaf(self, path: str, a: Any, b: Any) -> None:
        """Two values that are not entered, and are no tensors. A commit takes B's."""

    def _within(self, path: str, before: slots.State, now: slots.State) -> None:
        """Two objects of one type are about to be compared slot by slot."""

    def _pair(self, path: str, a: torch.Tensor, b: torch.Tensor, a_view: torch.Tensor) -> None:
        a_key, b_key = storage_key(a_view), storage_key(b)
        if a_key is None or b_key is None or a_key == b_key:
            if a_key != b_key:
                self.out.changes.append(Change(path, "moved", f"{describe(a_view)} became {describe(b)}"))
            return
        if _geometry(a_view) != _geometry(b):
            self.out.changes.append(Change(path, "moved", f"{describe(a_view)} became {describe(b)}"))
            return
        if id(b) in self._moved:
            return
        if not self._claim(a_key, b_key, a_view):
            # Two tensors of A shared this memory (a tie) and B's do not: both values can't go there.
            self.out.changes.append(Change(path, "moved", f"{describe(a_view)} no longer shares its storage"))
            return
        cover = _cover(a_view)
        if cover is None:
            self.out.changes.append(Change(path, "moved", f"{describe(b)} overlaps itself"))
            return
        self._moved.add(id(b))
        self.out.moves.append(Move(path, a_view, b, a, self._owners, cover))
        a_storage, b_storage = a_view.untyped_storage(), b.untyped_storage()
        if a_storage.nbytes() == b_storage.nbytes() and a_view.storage_offset() == b.storage_offset():
            self.out.storages.setdefault(b_key, a_storage)

    def put(self, path: str, a_view: torch.Tensor, b: torch.Tensor) -> bool:
        """Move a tensor that no pairing of slots reaches into memory that it is to have. Returns whether it will be."""
        if id(b) in self._moved:
            self.out.changes.append(
                Change(path, "moved", f"{describe(a_view)} became one with another tensor")
            )
            return False
        self._pair(path, a_view, b, a_view)
        return id(b) in self._moved

    def _claim(self, a_key: int, b_key: int, a_view: torch.Tensor) -> bool:
        """Whether the bytes of A's storage that a view spans are free for this B storage."""
        size = a_view.element_size()
        start = a_view.storage_offset() * size
        reach = sum((n - 1) * s for n, s in zip(a_view.shape, a_view.stride(), strict=True)) + 1
        end = start + reach * size if a_view.numel() else start
        claims = self._claims.setdefault(a_key, [])
        if any(other != b_key and start < stop and begin < end for begin, stop, other in claims):
            return False
        claims.append((int(start), int(end), b_key))
        return True

    def _rebind(self, holder: slots.Holder, key: slots.Key, a: Any, b: Any) -> None:
        """A module's own slot keeps A's tensor object where nothing but the values changed."""
        if (
            holder.is_module
            and key[0] in ("param", "buffer")
            and isinstance(a, torch.Tensor)
            and type(a) is type(b)
            and id(b) in self._moved
            and not attributes_differ(getattr(a, "__dict__", {}), getattr(b, "__dict__", {}))
        ):
            self.out.rebind.append((holder.obj, key[0], key[1], a))


def commit_pinned(
    stage: Stage,
    settlement: Settlement,
    operators: CustomOperators | None,
    copy: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], object],
    part: torch.nn.Module | None = None,
) -> int:
    """Copy B's values into A's memory and make everything in B look there. Returns the bytes copied.

    `part`: the settlement is of this layer alone.

    Nothing here can fail for a reason that was not checked before, short of the device itself failing.
    """
    pairs = [move.pair() for move in settlement.moves]
    with torch.no_grad():
        copy(pairs)
    handed = operators.handed_over if operators is not None else {}
    whole = part is None
    b_holders, b_states = slots.walk(
        stage.model if part is None else part, stage.skip, stage.declared if whole else ()
    )
    seen: set[int] = set()
    for ident, state in b_states.items():
        if slots.is_opaque(b_holders[ident].obj):
            continue
        for value in state.values():
            if not isinstance(value, torch.Tensor) or id(value) in seen:
                continue
            seen.add(id(value))
            identity = storage_key(value)
            target = None if identity is None else settlement.storages.get(identity)
            if target is None or identity is None:
                continue
            if identity in handed and not handed[identity].expired():
                # Native code was given this address: the memory stays, with the same values, until the next commit.
                settlement.keep_alive.append((frozenset(b_holders[ident].owners), value.untyped_storage()))
            value.data = view_on(target, value.dtype, value.storage_offset(), value.shape, value.stride())
    for move in settlement.moves:
        if storage_key(move.b) != storage_key(move.a):  # a tensor on a storage that could not be mapped whole
            identity = storage_key(move.b)
            if identity in handed and not handed[identity].expired():
                settlement.keep_alive.append((move.owners, move.b.untyped_storage()))
            move.b.data = move.a.detach()
    for module, kind, name, tensor in settlement.rebind:
        container = module._parameters if kind == "param" else module._buffers
        container[name] = tensor  # type: ignore[assignment]
    for track in stage.index.values() if part is None else ():
        for tensor, a_view in track.tensors:
            if storage_key(tensor) != storage_key(a_view):
                tensor.data = a_view
    return sum(a.numel() * a.element_size() for a, _ in pairs)


def copier(session: WeightLoadSession) -> Callable[[list[tuple[torch.Tensor, torch.Tensor]]], object]:
    """How a session copies: by the backend that its settings say."""
    return functools.partial(backends.copy_pairs, backend=session.settings.copy_backend)


def choose(session: WeightLoadSession) -> None:
    """Which way a session commits, and why, for its report.

    Raises:
        NotAdoptableError: `adopted` was asked for, and something may hold an address. ConfigError: the backend for
            copies that was asked for does not work here.
    """
    wanted = session.settings.storage
    why = _adoptable(session) if wanted == "adopted" else None
    if why is not None:
        raise errors.NotAdoptableError(why, model=session.life.name, session=session.id)
    session.report.storage = "adopted" if wanted == "adopted" else "pinned"
    session.report.storage_why = "the setting" if wanted != "auto" else "the default: addresses stay valid"
    device = next((parameter.device for parameter in session.life.model.parameters()), torch.device("cpu"))
    try:
        backends.chosen(session.settings.copy_backend, device)
    except ValueError as error:
        hint = "set copy_backend='auto'"
        raise errors.ConfigError(
            str(error), model=session.life.name, session=session.id, hint=hint
        ) from error


def _adoptable(session: WeightLoadSession) -> str | None:
    """Why new storage must not replace old, or None."""
    captured = session.life.addresses.captured
    return f"addresses are captured ({captured})" if captured else session.life.host.adoptable()


def check(session: WeightLoadSession, settlement: Settlement) -> None:
    """Hold what a commit will do against the contract: every address stays, unless the session adopts.

    Raises:
        StorageMovedError: some can't, by policy.
    """
    session.report.contract_changes = [change.to_dict() for change in settlement.changes]
    moved = settlement.moved
    if moved and session.settings.storage == "auto" and _adoptable(session) is None:
        session.report.storage = "adopted"
        session.report.storage_why = (
            f"{moved[0].path} cannot keep its storage, and nothing outside holds an address"
        )
    require_pinned(session, settlement)


def require_pinned(session: WeightLoadSession, settlement: Settlement) -> None:
    """Hold a settlement against the contract of a session that pins.

    Raises:
        StorageMovedError: some storage can't stay, and the policy is `strict`.
    """
    moved = settlement.moved
    if session.report.storage == "pinned" and moved:
        session.problem(
            errors.StorageMovedError(
                f"{len(moved)} tensors cannot keep their storage; first {moved[0].path}: {moved[0].detail}",
                model=session.life.name, layer=moved[0].path, session=session.id,
            ),
            session.settings.contract,
        )  # fmt: skip


def keep_undo(session: WeightLoadSession, memory: torch.UntypedStorage) -> bool:
    """Keep what undoing a write to memory that serves needs. False where the budget ends: a failure poisons then."""
    stage, budget = session.stage, session.settings.undo_budget_bytes
    assert stage is not None
    needed = 0 if int(memory._cdata) in stage.undo else memory.nbytes()
    if budget is not None and needed and stage.undo_bytes + needed > budget:
        session.life.unsafe = True
        return False
    stage.keep_undo(memory)
    return True


def before_first_write(session: WeightLoadSession, track: Track) -> None:
    """Stage memory that serves, or keep what undoing needs, before a session writes to it for the first time.

    Raises:
        DoubleProcessingError: the model's hook changes a layer that is processed already.
    """
    stage = session.stage
    assert stage is not None
    hooks = session.state.value == "processing"
    if hooks and session.account.running == "process_model" and track.owners & session.idle:
        raise errors.DoubleProcessingError(
            "the model's hook changes a layer that this update did not touch: it is processed already",
            model=session.life.name, layer=track.path, session=session.id,
            hint="send a complete update: this model can't take a partial one",
        )  # fmt: skip
    if not stage.isolated and not keep_undo(session, track.storage):
        return
    # A hook may write a part of a storage, or read it first: outside of receiving the rest is A's.
    stage.stage_live(track, copy=not session.intake.recording)
