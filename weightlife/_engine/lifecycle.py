# SPDX-License-Identifier: Apache-2.0
"""The lifecycle of one model: its first load, then any number of sessions, at most one at a time."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import collect, contract, ranks, registry, runtime, slots
from weightlife._engine.contexts import LoadContext
from weightlife._engine.events import MANIFEST, bus
from weightlife._engine.first_load import FirstLoad
from weightlife._engine.footprint import Plan
from weightlife._engine.manifest import Manifest, expected_from
from weightlife._engine.registry import (
    OpenSessions,
    all_lifecycles,
    current,
    forget,
    of,
    owner_of,
    release,
    released,
)
from weightlife._engine.skeleton import Skeleton
from weightlife._engine.telling import Teller
from weightlife._engine.turns import Turn
from weightlife.config import Settings
from weightlife.hosts.protocol import Host
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._engine import replicas
    from weightlife._engine.derived import Derived
    from weightlife._engine.seal import Seal
    from weightlife._engine.session import WeightLoadSession
    from weightlife._engine.streaming import Unit
    from weightlife._manifest import Manifest as PublicManifest

# What only updates need (sessions, their stages, addresses, manifests to show) is imported with the first of them:
# half of this package, 12 ms and 2,500 objects for every garbage collection of a start-up.


class Lifecycle(Teller):
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
        super().__init__(type(model).__name__)
        self.host = host
        self.settings = settings
        self.fill = fill
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
        self.routed: Manifest | None = (
            None  # after a dummy start: what headers tell, until the first real load
        )
        self.context = LoadContext.current()
        self.session: WeightLoadSession | None = None
        self.failed: errors.WeightlifeError | None = None
        self.observing = False
        self.must_complete = False  # an implicit update failed: its tail must not be taken for another one
        self.poisoned = ""  # why the model must not serve
        self.unsafe = False
        self.committing = False
        self.generation = 0
        self.contract: dict[tuple[int, slots.Key], Any] = {}
        self.keep_alive: list[tuple[frozenset[int], torch.UntypedStorage]] = []
        self.turn = Turn()
        self.expected: dict[str, Any] | None = None  # a sender's table, until an update has met it
        self.digests = runtime.Digests(self)
        self.flow: dict[int, Any] = {}  # storages that the first processing computed, until the first update
        self.agreed: set[tuple[int, slots.Key]] = (
            set()
        )  # numbers after the first load, until addresses are sealed
        self.hooks: list[Any] = []  # handles of forward hooks on a plain module
        self.late_layers: set[int] = set()  # were seen to be touched after they were complete
        self.links: list[tuple[int, int]] = []  # layers of which one needs the other when it is rebuilt
        self.loader: Callable[[Any], Any] | None = None  # of a plain module, where it was wrapped
        self.first_by = ""  # the asynchronous loader whose first load waits for something
        self._units: tuple[Manifest, list[Unit]] | None = None
        self.own_mode: str | None = None  # a mode that was given for this model alone
        self.votes = ranks.Ballot(host)
        registry.enter(self, model)

    def __del__(self) -> None:
        """A model that is dropped with a session open, or poisoned, no longer counts for the guard."""
        if OpenSessions is None:  # the interpreter is going down
            return
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

    @functools.cached_property
    def addresses(self) -> Seal:
        """The contract of addresses."""
        from weightlife._engine.seal import Seal

        return Seal(self)

    @functools.cached_property
    def derived(self) -> Derived:
        """What processing derives from weights, and when it was made."""
        from weightlife._engine.derived import Derived

        return Derived(self)

    @functools.cached_property
    def replicas(self) -> replicas.Memory:
        """What is kept of values across ranks."""
        from weightlife._engine import replicas

        return replicas.Memory()

    def layer_path(self, ident: int) -> str:
        """Module path by id, for messages."""
        layer = self.plan.layers.get(ident)
        return layer.path if layer is not None else ""

    def streamable(self) -> list[Unit]:
        """Layers that may be processed as soon as they are complete. Found once for each manifest."""
        from weightlife._engine import streaming

        if self._units is None or self._units[0] is not self.manifest:
            self._units = (self.manifest, streaming.units(self))
        return [unit for unit in self._units[1] if unit.ident not in self.late_layers]

    # -- entering ----------------------------------------------------------------------------------------------

    def owned(self, what: str) -> AbstractContextManager[None]:
        """One caller at a time; the same thread may re-enter.

        Raises:
            SessionConflictError: another thread is inside now (both are named), or a pass of this one.
        """
        return self.turn.owned(what, self.name, self.session.id if self.session else "")

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
        return session is not None and session is self.session

    def refuse_from_source(self, what: str) -> None:
        """A source that starts a load of the model that is pulling from it, or a hook that is processing its layers.

        Raises:
            SessionConflictError: it does. The outer session is unharmed if its source survives that.
        """
        session = self.session
        if session is not None and session.state.value in ("processing", "validating") and self.is_inside():
            raise errors.SessionConflictError(
                f"{what} was called by a hook of the update that is running ({session.opened_by}): what it loads would"
                " be neither counted nor processed", model=self.name, session=session.id,
                hint="load before the update finishes, or after it",
            )  # fmt: skip
        if session is not None and session.pulling:
            raise errors.SessionConflictError(
                f"{what} was called by the source of the update that is running ({session.opened_by})",
                model=self.name, session=session.id,
            )  # fmt: skip

    # -- opening and ending ------------------------------------------------------------------------------------

    def open(
        self,
        opened_by: str,
        operation: str,
        explicit: bool,
        partial: str,
        source: str = "",
        *,
        settings: Settings | None = None,
        before: Callable[[WeightLoadSession], None] | None = None,
        expected: dict[str, Any] | None = None,
    ) -> WeightLoadSession:
        """Prepare a session.

        Args:
            opened_by: as for `WeightLoadSession`, and so are the next five.
            operation: see there.
            explicit: see there.
            partial: see there.
            source: see there.
            settings: see there.
            before: a check that runs before anything is touched, and raises what it finds.
            expected: the table of digests of a sender, for this session alone.

        Raises:
            SessionConflictError: one is open. SessionStateError: the model has not had its first load.
            RefusedLayerError: an update must not begin. What `before` raises. Nothing was touched.
        """
        from weightlife._engine.sent import Sent
        from weightlife._engine.session import WeightLoadSession

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
        session = WeightLoadSession(self, opened_by, operation, explicit, partial, source, settings)
        table = self.expected if expected is None else expected
        session.sent = None if table is None else Sent(table)
        self.failed = None
        self.unsafe = False
        self.session = session
        OpenSessions.count += 1
        try:
            with self.entered():
                session.prepare(before)
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

    def load_weights(self, load: Callable[[Any], Any], weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """A call of the model's `load_weights` from anywhere: first load, chunk of a session, or a bare call."""
        if self.status == "observed" or registry.routing.get() is self:
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
                changed = contract.recreated(self)
                if changed is not None:
                    # A client with a lifecycle of its own: its load runs as it is, and the report says so.
                    why = f"{changed} was re-created by the caller"
                    return self.observe("load_weights", load, (weights,), {}, why)
                session = self.open("load_weights", "implicit", False, self.settings.partial_update)
            token = current.set(session)
            try:
                out = session.receive(load, weights)
            except BaseException as error:
                self.abort(error)
                raise
            finally:
                current.reset(token)
            if session.ends_with_call:
                self.finish("the end of load_weights, which its loader said to be that of the update")
            return out

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

    def healed(self) -> None:
        """A generation is there again that may serve."""
        if self.poisoned:
            self.poisoned = ""
            OpenSessions.count -= 1

    def lost(self, reason: str) -> None:
        """The weights are gone (a level-2 sleep). An open update is dropped."""
        self.abort(errors.SessionFailedError(reason, model=self.name))
        self.poison(reason)
        self.digests.forget(reason)

    # -- somebody else at work on the model --------------------------------------------------------------------

    def seal(self) -> None:
        """Remember which tensor stands in every slot that a load writes or that processing makes."""
        self.contract = contract.read(self, self.model.modules())

    def contract_changed(self, only: torch.nn.Module | None = None) -> str | None:
        """The first slot that no longer holds what was sealed, or None: somebody else is at work on the model."""
        return contract.changed(self, only)

    def observe(
        self,
        what: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why: str = "",
        told: str = "",
    ) -> Any:
        """Run a load of the host's own and change nothing: time, outcome, and what moved go into a report."""
        return contract.observe(self, what, call, args, kwargs, why, told)

    def vote(self, ok: bool, session: WeightLoadSession | None) -> None:
        """Compare this rank's outcome with the others'.

        Raises:
            RankMismatchError: they differ. Nothing was committed here.
        """
        if session is not None:
            session.voted = True
        started = time.perf_counter()
        try:
            self.votes.cast(ok, session, self.name)
        finally:
            if session is not None:
                spent = session.report.attributed
                spent["ranks"] = spent.get("ranks", 0.0) + time.perf_counter() - started

    # -- after the first load and after commits ----------------------------------------------------------------

    def learned(self, plan: Plan, manifest: Manifest, report: LoadReport) -> None:
        """The first load is over."""
        self.plan, self.manifest = plan, manifest
        self.first = None
        self.status = "ready"
        self.seal()
        self.agreed = collect.agreeing(holder.obj for holder in self.skeleton.holders.values())
        self.digests.keep(report)
        if manifest.provisional:
            from weightlife._engine import routing

            if told := routing.at_start(self):
                report.notes.append(told)
        report.generation = self.generation
        self.reports.append(report)
        self.say(report)
        self._taught(report.session_id)

    def _taught(self, session: str) -> None:
        """For listeners: there is a manifest that was not there before."""
        known = self.manifest if not self.manifest.provisional else self.routed
        if known is not None:
            bus.emit(MANIFEST, session, make=functools.partial(self._manifest_of, known))

    def _manifest_of(self, known: Manifest) -> PublicManifest:
        from weightlife._engine import export

        return export.manifest_of(self, known=known)

    def learn_from(self, session: WeightLoadSession) -> None:
        """After a commit: a new generation, and what it teaches."""
        self.generation += 1
        self.healed()
        self.seal()
        if session.sent is not None and session.sent.table is self.expected:
            self.expected = None
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
            self.manifest = Manifest(
                False, expected_from(received, written), received, session.intake.casts, session.intake.spread
            )
            from weightlife._engine import routing

            routing.compare(self, session)
            self._taught(session.id)


__all__ = [
    "Lifecycle", "OpenSessions", "all_lifecycles", "current", "forget", "of", "owner_of", "release", "released",
]  # fmt: skip
