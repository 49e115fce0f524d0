# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of one model: its first load, then any number of sessions, at most one at a time."""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from typing import Any

import torch

from weightlife import errors
from weightlife._engine import ranks, slots
from weightlife._engine.contexts import LoadContext
from weightlife._engine.events import NOTE, SESSION_END, SESSION_START, bus
from weightlife._engine.first_load import FirstLoad
from weightlife._engine.footprint import Plan
from weightlife._engine.manifest import Manifest, expected_from
from weightlife._engine.session import WeightLoadSession
from weightlife._engine.skeleton import Skeleton, storage_key
from weightlife._engine.slots import RESERVED_ATTRIBUTE
from weightlife._engine.turns import Turn
from weightlife.config import Settings
from weightlife.hosts.protocol import Host
from weightlife.report import LoadReport

current: ContextVar[WeightLoadSession | None] = ContextVar("weightlife_session", default=None)
"""The session that the running call belongs to: set only while a call is inside the lifecycle."""

_owners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Lifecycle]] = weakref.WeakKeyDictionary()
_registry: weakref.WeakValueDictionary[int, Lifecycle] = weakref.WeakValueDictionary()
_released: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()
"""Models whose lifecycle `uninstall()` took: in kernel format, and no first load any more. What native code of theirs
points to lives as long as they do."""


class OpenSessions:
    """How many sessions are open or models poisoned in this process: the guard's one comparison."""

    count = 0


class Lifecycle:
    """Everything that weightlife keeps for one model. Lives on the model itself, so it dies with it.

    Args:
        model: as the constructor made it, before its first load.
        host: how to reach the framework.
        settings: frozen settings.
        provisional: the first load will be a dummy.
        fill: tests poison fresh memory with it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        host: Host,
        settings: Settings,
        provisional: bool = False,
        fill: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self.name = type(model).__name__
        self.host = host
        self.settings = settings
        self.fill = fill
        self.log = logging.getLogger("weightlife")
        self.status = "loading"
        self.observed: str | None = host.observe_reason()
        self.skeleton: Skeleton
        self.first: FirstLoad | None = None
        if self.observed is None:
            self.skeleton = Skeleton(model, host.skip, provisional)
            self.first = FirstLoad(self, provisional)
        else:
            self.status = "observed"
        self.aliases = {} if self.observed is not None else self.skeleton.aliases()
        self.plan = Plan()
        self.manifest = Manifest()
        self.context = LoadContext.current()
        self.session: WeightLoadSession | None = None
        self.failed: errors.WeightlifeError | None = None
        self.observing = False
        self.must_complete = False  # an implicit update failed: its tail must not be taken for another one
        self.poisoned = ""  # why the model must not serve
        self.unsafe = False
        self.committing = False
        self.generation = 0
        self.reports: deque[LoadReport] = deque(maxlen=32)
        self.contract: dict[tuple[int, slots.Key], Any] = {}
        self.keep_alive: list[tuple[frozenset[int], torch.UntypedStorage]] = []
        self.turn = Turn()
        self._owner = ""
        self._passes = 0
        self._pass_thread = 0
        self.hooks: list[Any] = []  # handles of forward hooks on a plain module
        self.own_mode: str | None = None  # a mode that was given for this model alone
        self.votes = ranks.Ballot(host)
        for module in model.modules():
            _owners[module] = weakref.ref(self)
        vars(model)[RESERVED_ATTRIBUTE] = self
        _registry[id(model)] = self

    def __del__(self) -> None:
        """A model that is dropped with a session open, or poisoned, no longer counts for the guard."""
        # The constructor may have raised before these were there.
        OpenSessions.count -= (getattr(self, "session", None) is not None) + bool(
            getattr(self, "poisoned", "")
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has no lifecycle of its own yet."""
        return

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled model leaves its lifecycle behind."""
        return (type(None), ())

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        model = self._model()
        if model is None:
            raise errors.SessionStateError("the model is gone", model=self.name)
        return model

    def layer_path(self, ident: int) -> str:
        """Module path by id, for messages."""
        layer = self.plan.layers.get(ident)
        return layer.path if layer is not None else ""

    def has_hook(self, ident: int) -> bool:
        """Whether a module is processed by a hook of its own."""
        module = self.skeleton.holders[ident].obj
        return (
            self.host.layer_hook(module) is not None or self.host.is_deferred(module) or module is self.model
        )

    def nearest_hooked(self, ident: int) -> int:
        """The nearest module above one that has a hook (-1: none)."""
        path = self.layer_path(ident)
        while path:
            path = path.rpartition(".")[0]
            for other, layer in self.plan.layers.items():
                if layer.path == path and self.has_hook(other):
                    return other
        return -1

    # -- entering ----------------------------------------------------------------------------------------------

    @contextmanager
    def owned(self, what: str) -> Iterator[None]:
        """One caller at a time; the same thread may re-enter.

        Raises:
            SessionConflictError: another thread is inside now. Both are named.
        """
        me = f"{what} in thread {threading.current_thread().name}"
        self.turn.bury()
        if self._passes and self._pass_thread == threading.get_ident():
            raise errors.SessionConflictError(
                f"{what} was called from inside a pass of the model", model=self.name,
                session=self.session.id if self.session else "",
            )  # fmt: skip
        # A running pass ends by itself: wait for it. Another load is a second owner.
        if not self.turn.take(blocking=bool(self._passes)):
            raise errors.SessionConflictError(
                f"{me} met {self._owner or 'another owner'}", model=self.name,
                session=self.session.id if self.session else "",
            )  # fmt: skip
        before, self._owner = self._owner, me
        try:
            yield
        finally:
            self._owner = before
            self.turn.give_back()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass takes the same turn, and waits for a load call that is inside."""
        self.turn.take(blocking=True)
        try:
            yield
        finally:
            self.turn.give_back()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The length of the pass itself. Use it inside `passing()`."""
        self._passes += 1
        self._pass_thread = threading.get_ident()
        try:
            yield
        finally:
            self._passes -= 1

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Contexts of the first load."""
        with ExitStack() as stack:
            stack.enter_context(self.host.contexts())
            stack.enter_context(self.context.entered())
            yield

    def is_inside(self) -> bool:
        """Whether the running call already is inside a session of this model."""
        session = current.get()
        # A task that was started from a source inherits the variable, and may outlive the session.
        return session is not None and session is self.session

    def refuse_from_source(self, what: str) -> None:
        """A source that starts a load of the model that is pulling from it.

        Raises:
            SessionConflictError: it does. The outer session is unharmed if its source survives that.
        """
        session = self.session
        if session is not None and session.pulling:
            raise errors.SessionConflictError(
                f"{what} was called by the source of the update that is running ({session.opened_by})",
                model=self.name, session=session.id,
            )  # fmt: skip

    # -- opening and ending ------------------------------------------------------------------------------------

    def open(
        self, opened_by: str, operation: str, explicit: bool, partial: str, source: str = ""
    ) -> WeightLoadSession:
        """Prepare a session.

        Raises:
            SessionConflictError: one is open. SessionStateError: the model has not had its first load.
            RefusedLayerError: an update must not begin. Nothing was touched.
        """
        if self.first is not None:
            raise errors.SessionStateError(
                f"{opened_by}: the model has not had its first load", model=self.name,
                hint="load it once without a session; what that load does is what updates are held to",
            )  # fmt: skip
        if self.session is not None or self.is_inside():
            other = self.session
            raise errors.SessionConflictError(
                f"{opened_by} wants to begin while {other.opened_by if other else 'a load'} is open",
                model=self.name, session=other.id if other else "",
            )  # fmt: skip
        if self.poisoned:
            partial = "forbid"  # there is no A to keep: only a complete update heals
        elif not explicit and self.must_complete:
            partial = "forbid"
        session = WeightLoadSession(self, opened_by, operation, explicit, partial, source)
        self.failed = None
        self.unsafe = False
        self.session = session
        OpenSessions.count += 1
        try:
            with self.entered():
                session.prepare()
        except BaseException as error:
            session.abort(error, "refused")
            raise
        return session

    def closed(self, session: WeightLoadSession) -> None:
        """Called by a session that ended: keep its report, free the place."""
        if self.session is session:
            self.session = None
            OpenSessions.count -= 1
        session.report.generation = self.generation
        self.reports.append(session.report)
        self.say(session.report)

    @staticmethod
    def text_of(error: BaseException | None) -> str | None:
        """What the report says of an error."""
        return None if error is None else errors.safe_text(error)

    def say(self, report: LoadReport) -> None:
        """One line a session."""
        self.tell(logging.INFO, report.summary_line(), report.session_id)

    def tell(self, level: int, text: str, session: str = "") -> None:
        """A line in the log. A filter or handler of somebody that raises must not undo a commit, or end a pass."""
        try:
            self.log.log(level, "%s", text)
        except Exception as error:  # noqa: BLE001 - telemetry may never break a load
            bus.emit(NOTE, session, message=f"the log line failed: {type(error).__name__}")

    def load_weights(self, load: Callable[[Any], Any], weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """A call of the model's `load_weights` from anywhere: first load, chunk of a session, or a bare call."""
        if self.status == "observed":
            return load(weights)
        if self.is_inside():
            self.refuse_from_source("load_weights")
            return load(weights)
        if self.first is not None:
            with self.owned("the first load"):
                return self.first.receive(load, weights)
        with self.owned("load_weights"):
            failed, self.failed = self.failed, None
            if failed is not None:
                raise failed
            session = self.session
            if session is None:
                changed = self.contract_changed()
                if changed is not None:
                    return self.stand_aside(changed, load, weights)
                session = self.open("load_weights", "implicit", False, self.settings.partial_update)
            token = current.set(session)
            try:
                return session.receive(load, weights)
            except BaseException as error:
                self.abort(error)
                raise
            finally:
                current.reset(token)

    def end_implicit(self) -> None:
        """An implicit session left open ends where an explicit one begins: committed if whole, else dropped."""
        session = self.session
        if session is None or session.explicit:
            return
        try:
            self.finish("the next update")
        except errors.CompletenessError as error:
            self.note(f"an incomplete update was dropped when another one began: {error}")

    def finish_explicit(self, by: str) -> None:
        """The end of an explicit session.

        Raises:
            SessionStateError: it died before; what came after its failure is dropped, and never taken for an update.
        """
        session = self.session
        if session is not None and not session.explicit:
            self.abort(
                errors.SessionStateError(f"{by}: the update that this belongs to failed", model=self.name)
            )
        self.finish(by)

    def finish(self, by: str) -> None:
        """End the open session, committing it.

        Raises:
            SessionStateError: none is open (an earlier failure aborted it). Else what `finish` of the session raises,
            after the abort.
        """
        with self.owned(by):
            session = self.session
            if session is None:
                self.vote(False, None)
                last = self.reports[-1].error if self.reports else None
                raise errors.SessionStateError(
                    f"{by}: no session is open" + (f"; the last one failed: {last}" if last else ""),
                    model=self.name,
                )
            token = current.set(session)
            try:
                session.finish()
            except BaseException as error:
                if not session.voted:
                    self.vote(False, session)
                self.abort(error)
                raise
            finally:
                current.reset(token)

    def abort(self, error: BaseException | None = None) -> None:
        """Abort the open session, if any: A serves again, or the model is poisoned where there is no way back."""
        session = self.session
        if session is None:
            return
        if self.unsafe or self.committing:
            self.poison(f"an update failed where it could not be undone: {errors.safe_text(error)}")
        self.committing = False
        if session.intake.tensors:
            self.must_complete = True
        session.abort(error)

    def abort_on_request(self, reason: str) -> bool:
        """Abort the open session for somebody who did not open it. Returns whether there was one.

        Raises:
            SessionConflictError: a load call is inside now.
        """
        if self.session is None:
            return False
        with self.owned("abort"):
            self.refuse_from_source("abort")
            if self.is_inside():
                raise errors.SessionConflictError(
                    "abort was called by the load that it would end: raise an exception instead",
                    model=self.name,
                )
            text = "aborted on request" + (f": {reason}" if reason else "")
            was_open = self.session is not None
            self.abort(errors.SessionFailedError(text, model=self.name))
            return was_open

    def poison(self, reason: str) -> None:
        """There is no generation that may serve: refuse passes until a complete update commits."""
        if not self.poisoned:
            OpenSessions.count += 1
        self.poisoned = reason
        self.note(f"{self.name} must not serve: {reason}")

    def lost(self, reason: str) -> None:
        """The weights are gone (a level-2 sleep). An open update is dropped."""
        self.abort(errors.SessionFailedError(reason, model=self.name))
        self.poison(reason)

    # -- the contract ------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Remember which tensor stands in every slot that a load writes or that processing makes."""
        self.contract = self._slots(self.model.modules())

    def _slots(self, modules: Iterable[torch.nn.Module]) -> dict[tuple[int, slots.Key], Any]:
        # Parameters, and buffers that are rebuilt. Others are the model's own business: the first forward pass with
        # YaRN replaces the rotary cache, and is no client at work.
        return {
            (id(module), key): (id(value), storage_key(value), value.shape)
            for module in modules
            for key, value in slots.read(module).items()
            if isinstance(value, torch.Tensor)
            and (key[0] == "param" or (key[0] == "buffer" and key in self.plan.restore.get(id(module), {})))
        }

    def contract_changed(self, only: torch.nn.Module | None = None) -> str | None:
        """The first slot that no longer holds what was sealed, or None: somebody else is at work on the model."""
        modules = list(self.model.modules()) if only is None else [only]
        now = self._slots(modules)
        wanted = {id(module) for module in modules}
        sealed = {key: value for key, value in self.contract.items() if key[0] in wanted}
        for key in [*sealed, *(key for key in now if key not in sealed)]:
            if now.get(key) != sealed.get(key):
                return slots.step(self.layer_path(key[0]), key[1])
        return None

    def stand_aside(self, changed: str, load: Callable[[Any], Any], weights: Any) -> Any:
        """A client with a lifecycle of its own re-created parameters: its load runs as it is, and the report says so."""
        return self.observe("load_weights", load, (weights,), {}, f"{changed} was re-created by the caller")

    def observe(
        self,
        what: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str = "",
    ) -> Any:
        """Run a load of the host's own and change nothing: time, outcome, and what moved go into a report."""
        if self.observing:
            return call(*args, **kwargs)
        report = LoadReport(
            session_id=uuid.uuid4().hex[:12], model=self.name, operation="reload", opened_by=what,
            generation=self.generation, versions=self.host.versions(), outcome="observed",
            started_at=datetime.now(timezone.utc).isoformat(),
            notes=[f"the host's own path: {why or self.observed or 'mode is observe'}"],
        )  # fmt: skip
        if not why:
            self.seal()  # else it stays what it was: the caller is followed until his parameters are back
        bus.emit(SESSION_START, report.session_id, report=report)
        started = time.perf_counter()
        self.observing = True
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            report.error = errors.safe_text(error)
            raise
        finally:
            self.observing = False
            report.seconds = time.perf_counter() - started
            moved = None if why else self.contract_changed()
            if moved is not None:
                self.seal()
                report.contract_changes.append(
                    {"path": moved, "kind": "moved", "detail": "first of those that moved"}
                )
                self.tell(
                    logging.WARNING, f"{self.name}: {errors.clean(moved)} is another tensor after {what}"
                )
            self.reports.append(report)
            bus.emit(
                SESSION_END, report.session_id, report=report, outcome="observed", error=report.error or ""
            )
            self.say(report)

    def vote(self, ok: bool, session: WeightLoadSession | None) -> None:
        """Compare this rank's outcome with the others'.

        Raises:
            RankMismatchError: they differ. Nothing was committed here.
        """
        if session is not None:
            session.voted = True
        self.votes.cast(ok, session, self.name)

    # -- after the first load and after commits ----------------------------------------------------------------

    def learned(self, plan: Plan, manifest: Manifest, report: LoadReport) -> None:
        """The first load is over."""
        self.plan, self.manifest = plan, manifest
        self.first = None
        self.status = "ready"
        self.seal()
        report.generation = self.generation
        self.reports.append(report)
        self.say(report)

    def learn_from(self, session: WeightLoadSession) -> None:
        """After a commit: a new generation, and what it teaches."""
        self.generation += 1
        if self.poisoned:
            self.poisoned = ""
            OpenSessions.count -= 1
        self.seal()
        self.must_complete = False
        if session.kernel_format or session.stage is None:
            return
        if not self.manifest.provisional:
            return
        written = session.written
        complete = session.partial == "forbid" or all(
            number in written or storage.kept is not None or storage.constant is not None
            for number, storage in enumerate(self.skeleton.storages)
            if any(issubclass(self.skeleton.tensors[i].cls, torch.nn.Parameter) for i in storage.tensors)
        )
        if complete:
            received = dict(session.intake.received)
            self.manifest = Manifest(False, expected_from(received, written), received)

    def notes_after_commit(self) -> list[str]:
        """What the host wants a caller to know. B serves already: a host that fails here is only heard of."""
        try:
            return self.host.commit_notes()
        except Exception as error:  # noqa: BLE001 - B serves
            self.tell(
                logging.ERROR,
                f"the host's notes after a commit failed: {errors.clean(errors.safe_text(error), 500)}",
            )
            return [f"the host's notes are missing: {type(error).__name__}"]

    def note(self, message: str) -> None:
        """One fact for the log and for listeners."""
        self.tell(logging.WARNING, errors.clean(message, 2000))
        bus.emit(NOTE, self.session.id if self.session else "", message=message)


def of(model: Any) -> Lifecycle | None:
    """The lifecycle of a model, if it has one."""
    if not isinstance(model, torch.nn.Module):
        return None
    found = vars(model).get(RESERVED_ATTRIBUTE)
    return found if isinstance(found, Lifecycle) else None


def owner_of(layer: torch.nn.Module) -> Lifecycle | None:
    """The lifecycle of the model that a layer is part of."""
    found = _owners.get(layer)
    return None if found is None else found()


def all_lifecycles() -> list[Lifecycle]:
    """Every live model's lifecycle in this process."""
    return list(_registry.values())


def forget(model: torch.nn.Module) -> None:
    """Remove the lifecycle of a model (uninstall)."""
    found = vars(model).pop(RESERVED_ATTRIBUTE, None)
    if isinstance(found, Lifecycle):
        if found.poisoned:
            OpenSessions.count -= 1
            found.poisoned = ""
        for handle in found.hooks:
            handle.remove()
        for module in model.modules():
            owner = _owners.get(module)
            if owner is not None and owner() is found:
                del _owners[module]
        _registry.pop(id(model), None)


def release(model: torch.nn.Module) -> None:
    """Forget a model that has been loaded (uninstall): later loads of it are the host's own."""
    found = of(model)
    forget(model)
    if found is not None and found.first is None:
        _released[model] = [memory for _, memory in found.keep_alive]


def released(model: Any) -> bool:
    """Whether a model was loaded under a weightlife that is uninstalled since."""
    return isinstance(model, torch.nn.Module) and model in _released


__all__ = [
    "Lifecycle", "OpenSessions", "all_lifecycles", "current", "forget", "of", "owner_of", "release", "released",
]  # fmt: skip
