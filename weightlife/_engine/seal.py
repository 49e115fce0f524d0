# SPDX-License-Identifier: Apache-2.0
"""The contract: where each piece of runtime storage is, sealed before the first update and when graphs are captured.

Until something has captured addresses, the contract of an update is what serves when it begins: the host may have
exchanged a table in between, and nobody read the old one. After a capture it is what stood there then, and those
storages are kept alive: a graph reads them whatever Python refers to.

What an update would leave elsewhere goes back: the value into the sealed storage, and the tensor is pointed there, so
that lists, closures, frozen dataclasses and third-party objects which hold that tensor follow. What can't go back is a
`StorageMovedError` before anything is copied.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightlife import errors
from weightlife._engine import prints, slots, storage
from weightlife._engine.collect import Step, Walk, locate
from weightlife._engine.mirrors import Mirrors
from weightlife._engine.places import Places
from weightlife._engine.skeleton import storage_key, view_on

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession
    from weightlife._finders import Finder

SHOWN = 8


@dataclass
class Entry:
    """One sealed path."""

    step: Step
    seen: prints.Print
    memory: StorageWeakRef | torch.UntypedStorage

    def alive(self) -> bool:
        """Whether the sealed storage still exists."""
        return not isinstance(self.memory, StorageWeakRef) or not self.memory.expired()


class Seal:
    """The contract of one model."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = weakref.ref(life)  # not a cycle: a lifecycle dies with its model, at once
        self.walk: Walk | None = None
        self.entries: list[Entry] = []
        self.captured = ""  # what captured addresses, where something did
        self._paths: dict[str, tuple[str, Any, slots.Key]] = {}
        self.places = Places(life)
        self.seconds = 0.0  # of the last session, all looks at addresses together
        self.derived_seconds = 0.0  # of the last session, for the age of what processing derives
        self._held: dict[int, torch.UntypedStorage] = {}  # A's memory, while an update is open
        self.mirrors = Mirrors(self)
        self._now: list[Any] = []  # what stood at each step after the hooks, between two looks of a finish
        self._changed = False  # the last update left other paths than there were
        self._allowed: set[str] = set()
        self._lost: list[Entry] = []  # moved since the capture, and can't go back

    @property
    def life(self) -> Lifecycle:
        """The lifecycle."""
        life = self._life()
        assert life is not None
        return life

    @property
    def declared(self) -> dict[str, tuple[str, Any, slots.Key]]:
        """Storage that the user declared, by path; finders are asked.

        Raises:
            ConfigError: a finder raises, or gives nonsense.
        """
        return {**self._paths, **self.places.ask()}

    def known(self) -> dict[str, tuple[str, Any, slots.Key]]:
        """The same, as finders told it when they were asked last."""
        return {**self._paths, **self.places.known()}

    # -- taking it ---------------------------------------------------------------------------------------------

    def due(self) -> None:
        """Seal, if nothing was sealed since the first load: before an update, a sleep, a declaration."""
        if self.walk is None:
            self.take()

    def take(self, again: bool = True) -> None:
        """Seal what stands there now. `again`: look everywhere, not only where something was found before."""
        life = self.life
        again = again or self.walk is None
        if again:
            self.walk = Walk(life.model, life.host.skip, life.host.transient, self.known().values())
            self.places.changed = False
        assert self.walk is not None
        values = self.walk.values()
        keep = bool(self.captured)
        self.entries = []
        for step, tensor in self.walk.tensors(values):
            seen = None if tensor is None else prints.fingerprint(tensor)
            if tensor is not None and seen is not None:
                memory = tensor.untyped_storage()
                self.entries.append(Entry(step, seen, memory if keep else StorageWeakRef(memory)))
        if again:
            self.mirrors.learn(values)

    def capture(self, by: str) -> None:
        """The host captured addresses (CUDA graphs): from here on these, and no later ones, are the contract."""
        self.captured = by
        try:
            self.places.ask()
        finally:
            self.take()

    def declare(self, path: str) -> list[str]:
        """Take storage that the walk does not reach into the contract. Returns the paths of its tensors.

        Raises:
            ConfigError: the path leads nowhere, or to no tensor.
        """
        life = self.life
        try:
            found = locate(life.model, path)
        except LookupError as error:
            raise errors.ConfigError(
                f"nothing can be declared at {errors.clean(path)!r}: {errors.clean(error)}", model=life.name,
                hint="give a path below the model (layers.0.table['w']), or package.module:NAME of an imported one",
            ) from error  # fmt: skip
        walk = Walk(life.model, life.host.skip, life.host.transient, [*self.declared.values(), found])
        tensors = [step.path for step, tensor in walk.tensors() if tensor is not None and step.firm]
        paths = list(dict.fromkeys(where for where in tensors if where.startswith(path)))
        if not paths:
            raise errors.ConfigError(
                f"there is no tensor at {errors.clean(path)!r}", model=life.name,
                hint="declare storage when it exists: after the first load",
            )  # fmt: skip
        self.due()
        self._paths[path] = found
        self._renew(walk)
        return paths

    def declare_finder(self, finder: Finder) -> list[str]:
        """Take what a finder finds into the contract, now and at each later look. Returns the paths of its tensors.

        Raises:
            ConfigError: it raises, or gives nonsense.
        """
        life = self.life
        paths = tuple(self.places.add(finder))
        self.due()
        self._renew(Walk(life.model, life.host.skip, life.host.transient, self.known().values()))
        assert self.walk is not None
        found = [step.path for step, tensor in self.walk.tensors() if tensor is not None and step.firm]
        return [where for where in dict.fromkeys(found) if paths and where.startswith(paths)]

    def has(self, declared: str | Finder) -> bool:
        """Whether this path, or finder, was declared."""
        return declared in self._paths if isinstance(declared, str) else self.places.has(declared)

    def withdraw(self, declared: str | Finder) -> None:
        """Forget a path or a finder that was declared."""
        if isinstance(declared, str):
            self._paths.pop(declared, None)
        else:
            self.places.drop(declared)
        self._renew(
            Walk(self.life.model, self.life.host.skip, self.life.host.transient, self.known().values())
        )

    def _renew(self, walk: Walk) -> None:
        """Look everywhere with storage that was declared just now."""
        captured = {entry.step.path: entry for entry in self.entries} if self.captured else {}
        self.walk = walk
        self.take(again=False)
        # What graphs captured stays as it was captured.
        self.entries = [captured.get(entry.step.path, entry) for entry in self.entries]
        self.places.changed = False

    # -- an update ---------------------------------------------------------------------------------------------

    def begin(self, session: WeightLoadSession) -> None:
        """An update is prepared: what it is held to. A's storages live as long as it is open."""
        started = time.perf_counter()
        self.seconds, self.derived_seconds, self._lost = 0.0, 0.0, []
        first = self.walk is None
        self._ask(session)
        self.due()
        if session.report.storage == "pinned":
            if not first:
                self._again()
            if self.captured:
                self._put_back(session)
            assert self.walk is not None
            self._held = {}
            for _, tensor in self.walk.tensors():
                key = None if tensor is None else storage_key(tensor)
                if tensor is not None and key is not None:
                    self._held[key] = tensor.untyped_storage()
        self.seconds += time.perf_counter() - started

    def _ask(self, session: WeightLoadSession) -> None:
        """Ask the finders. By the policy of the contract a failure ends the update, or what was known before stays."""
        try:
            self.places.ask()
        except errors.ConfigError as error:
            error.session = session.id
            session.problem(error, session.settings.contract)

    def look_again(self, session: WeightLoadSession) -> None:
        """Processing is over: finders are asked where their storage is now.

        Raises:
            ConfigError: one raises, or gives nonsense, by policy. StorageError: nothing could be put into a place.
        """
        self._ask(session)
        failed = self.places.failed()
        if failed:
            raise errors.StorageError(
                f"what belongs there could not be put into the place {failed}", model=session.life.name,
                layer=failed.partition(": ")[0], session=session.id,
            )  # fmt: skip

    def before_revert(self) -> None:
        """An update ends without a commit: what it left in places of finders has to be found before it is taken back."""
        try:
            self.places.ask()
        except errors.ConfigError as error:
            self.life.note(f"an update is undone at the places that were known before: {error}")

    def after_revert(self) -> None:
        """Where something could not be put back, nothing may serve."""
        failed = self.places.failed()
        if failed:
            self.life.poison(f"what served could not be put back into the place {failed}")

    def _again(self) -> None:
        if self.places.changed:  # other names than before
            self._changed = True
            self._allowed = set()
        if not self.captured:
            self.take(again=self._changed)
        elif self._changed:
            kept = {entry.step.path: entry for entry in self.entries}
            self.take()
            self.entries = [
                entry if entry.step.path in self._allowed else kept.get(entry.step.path, entry)
                for entry in self.entries
            ]
        self._changed = False

    def _put_back(self, session: WeightLoadSession) -> None:
        """What somebody moved since the capture goes back to where graphs read it, before A is looked at."""
        assert self.walk is not None
        now = {step.path: tensor for step, tensor in self.walk.tensors()}
        for entry in self.entries:
            tensor, seen, memory = now.get(entry.step.path), entry.seen, entry.memory
            if tensor is None or not self._firm(entry, session.life):
                continue
            if storage_key(tensor) == seen.key and prints.same_view(tensor, seen):
                continue
            if not prints.same_geometry(tensor, seen) or not isinstance(memory, torch.UntypedStorage):
                self._lost.append(entry)
                continue
            target = view_on(memory, seen.dtype, seen.offset, seen.shape, seen.stride)
            with torch.no_grad():
                target.copy_(tensor.detach())
                tensor.data = target
            session.report.notes.append(
                f"{entry.step.path} had moved since addresses were captured: its value went back to the old one"
            )

    def check_derived(self, session: WeightLoadSession) -> None:
        """Hold what processing derives against this update (see `derived`).

        Raises:
            StaleDerivedError: something is older, by policy.
        """
        started = time.perf_counter()
        self._now = [] if self.walk is None or session.settings.contract == "off" else self.walk.values()
        try:
            session.life.derived.check(session, self._now)
        finally:
            self.derived_seconds += time.perf_counter() - started

    def hold(self, session: WeightLoadSession, settler: storage.Settler) -> None:
        """Hold what a commit will leave against the contract, and add to the settlement what puts it right."""
        settlement, life = settler.out, self.life
        if self.walk is None or session.report.storage != "pinned" or session.settings.contract == "off":
            return
        started = time.perf_counter()
        values, self._now = self._now or self.walk.values(), []
        now = {step.path: tensor for step, tensor in self.walk.tensors(values)}
        known = {change.path for change in settlement.changes}
        opaque = tuple(change.path for change in settlement.changes if change.kind == "opaque")
        for entry in self._lost:
            if entry.step.path not in known:
                known.add(entry.step.path)
                settlement.changes.append(
                    storage.Change(
                        entry.step.path, "moved", f"{prints.words(entry.seen)} was moved before this update"
                    )
                )
        going = {id(move.b): storage_key(move.a) for move in settlement.moves}
        for entry in self.entries:
            path, seen = entry.step.path, entry.seen
            tensor = now.get(path)
            if path in known or (opaque and path.startswith(opaque)):
                continue
            if tensor is None:
                if entry.step.firm:
                    settlement.changes.append(storage.Change(path, "removed", prints.words(seen)))
                continue
            key = storage_key(tensor)
            if key == seen.key and prints.same_view(tensor, seen):
                continue
            target = None if key is None else settlement.storages.get(key)
            if target is not None and int(target._cdata) == seen.key and prints.same_view(tensor, seen):
                continue
            if going.get(id(tensor)) == seen.key and prints.same_geometry(tensor, seen):
                if target is None:
                    continue
                # One tensor with another of the model (a tie that forms): it can't be at both addresses. Both get its
                # values, and who captured one of them would read what the next update leaves behind.
                kind = "moved" if self.captured else "joined"
                detail = f"{prints.words(seen)} became one with another tensor"
                settlement.changes.append(storage.Change(path, kind, detail))
                continue
            if not self._firm(entry, life):
                kind, what = "elsewhere", "something process-wide, or that no load makes"
                detail = f"{prints.words(seen)} became {storage.describe(tensor)}: {what}"
                settlement.changes.append(storage.Change(path, kind, detail))
                continue
            self._repair(settler, entry, tensor)
        self.seconds += time.perf_counter() - started

    def _firm(self, entry: Entry, life: Lifecycle) -> bool:
        """Whether it is weight state: a parameter, a buffer, what processing makes, or declared."""
        step = entry.step
        if not step.firm:
            return False
        if step.key[0] in ("param", "buffer") or step.path in self._paths or not step.owner:
            return True
        layer = life.plan.layers.get(step.owner)
        return layer is not None and layer.strategy == "rebuild"

    def _repair(self, settler: storage.Settler, entry: Entry, tensor: torch.Tensor) -> None:
        path, seen = entry.step.path, entry.seen
        memory = entry.memory if isinstance(entry.memory, torch.UntypedStorage) else self._held.get(seen.key)
        if memory is None or storage_key(tensor) == seen.key:
            detail = f"{prints.words(seen)} became {storage.describe(tensor)}"
            settler.out.changes.append(storage.Change(path, "moved", detail))
            return
        view = view_on(memory, seen.dtype, seen.offset, seen.shape, seen.stride)
        if settler.put(path, view, tensor):
            detail = "processing made it elsewhere: its value goes into the storage that it had"
            settler.out.changes.append(storage.Change(path, "repaired", detail))

    # -- after it ----------------------------------------------------------------------------------------------

    def verify(self, session: WeightLoadSession) -> None:
        """After the copies: every sealed path is where it was. Graphs must not read what is not there.

        Raises:
            StorageMovedError: one is not, by policy. The model is poisoned then: nothing can be undone any more.
        """
        if self.walk is None or session.report.storage != "pinned" or session.settings.contract == "off":
            return
        started = time.perf_counter()
        now = {step.path: tensor for step, tensor in self.walk.tensors()}
        opaque = tuple(c["path"] for c in session.report.contract_changes if c["kind"] == "opaque")
        kinds = ("moved", "removed", "added", "joined")
        known = {c["path"] for c in session.report.contract_changes if c["kind"] in kinds}
        wrong = [
            entry
            for entry in self.entries
            if (tensor := now.get(entry.step.path)) is not None
            and not (storage_key(tensor) == entry.seen.key and prints.same_view(tensor, entry.seen))
            and self._firm(entry, session.life)
            and entry.step.path not in known
            and not (opaque and entry.step.path.startswith(opaque))
        ]
        self.seconds += time.perf_counter() - started
        if wrong:
            first = wrong[0].step.path
            session.problem(
                errors.StorageMovedError(
                    f"{len(wrong)} tensors are not where they were, after the commit; first {first}",
                    model=session.life.name, layer=first, session=session.id,
                    tensors=[entry.step.path for entry in wrong],
                ),
                session.settings.contract,
            )  # fmt: skip

    def end(self, session: WeightLoadSession, committed: bool) -> None:
        """An update is over. What left with it is looked for anew when the next one begins."""
        self._held, self._now = {}, []
        kinds = {change["kind"] for change in session.report.contract_changes}
        adopted = session.report.storage != "pinned"
        if committed and (adopted or kinds & {"added", "removed", "moved", "joined"}):
            self._changed = True
            self._allowed = {
                change["path"] for change in session.report.contract_changes if change["kind"] != "elsewhere"
            }


def sealed(life: Lifecycle, by: str) -> None:
    """A host captured addresses of a model. Telemetry of a kind: a failure is heard of, and ends nothing."""
    if life.status != "ready":
        return
    try:
        life.addresses.capture(by)
    except errors.ConfigError as error:
        life.note(f"{life.name}: addresses were captured without what a finder tells of: {error}")
    logging.getLogger("weightlife").info(
        "%s: %d tensors keep their addresses from here on (%s)", life.name, len(life.addresses.entries), by
    )


__all__ = ["Entry", "Seal", "sealed"]
