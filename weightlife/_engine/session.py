# SPDX-License-Identifier: Apache-2.0
"""One weight load on one model: prepare, receive, finish, or abort."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import completeness, derived, fill, operators, processing, storage, streams
from weightlife._engine.account import Account
from weightlife._engine.footprint import Plan
from weightlife._engine.host_copies import HostCopies
from weightlife._engine.intake import Intake
from weightlife._engine.operators import CustomOperators
from weightlife._engine.overlap import SideCopies
from weightlife._engine.receive import Receiver
from weightlife._engine.replicas import Held
from weightlife._engine.stage import Stage
from weightlife._engine.states import State, move
from weightlife._engine.streaming import Streamer
from weightlife._engine.trust import Trust
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._declared import Header
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.sent import Sent
    from weightlife.config import Settings


class WeightLoadSession:
    """One load. Made by a `Lifecycle`, which also decides who may enter it.

    Args:
        life: the model's lifecycle.
        opened_by: what opened it, for reports ("reload_weights", "load_weights", ...).
        operation: reload, update, implicit or kernel_format.
        explicit: the caller says when it ends. An implicit session ends at the next real batch.
        partial: what must be covered at finish: forbid, by_layer or allow.
        source: where the weights come from, for reports.
        settings: override the model's for this session.
    """

    told = True  # listeners hear of it

    def __init__(
        self,
        life: Lifecycle,
        opened_by: str,
        operation: str,
        explicit: bool,
        partial: str,
        source: str = "",
        settings: Settings | None = None,
    ) -> None:
        self.life = life
        self.id = uuid.uuid4().hex[:12]  # 48 bits: a word of the ranks' vote
        self.opened_by = opened_by
        self.explicit = explicit
        self.partial = partial
        self._state = State.IDLE
        self.settings = settings or life.settings
        self.announced: dict[str, Header] | None = None  # all that may arrive, where the sender said so
        self.waited_batches = 0
        self.warned = False
        self.sent: Sent | None = None  # a sender's table of digests
        self.intake = Intake(self)
        self.stage: Stage | None = None
        self.receiver: Receiver | None = None
        self.operators: CustomOperators | None = None
        self.voted = False
        self.whole = False  # one call of the host receives everything: control does not return in between
        self.ends_with_call = False  # its loader said that the update ends with the call that is running
        self.refresh = False  # process again what a client may have written in place
        self.idle: set[int] = set()
        self.processed: set[int] = set()
        self.written: dict[int, Any] = {}
        self.streamer: Streamer | None = None
        self.side_copies = SideCopies(storage.copier(self))  # of layers that are processed early
        self.held: Held | None = None  # what the ranks compare
        self.trust: Trust | None = None  # items whose writes are known need not be observed
        self.kept_alive: list[tuple[frozenset[int], torch.UntypedStorage]] = []
        self.foreign_modes = False  # a client's own dispatch mode stood over a call
        self.kernel_format = operation == "kernel_format"
        self._error: BaseException | None = None
        rank, world = life.host.rank()
        self.report = LoadReport(
            session_id=self.id, model=life.name, operation=operation, source=source, opened_by=opened_by,
            rank=rank, world_size=world, started_at=datetime.now(timezone.utc).isoformat(),
            isolation=self.settings.isolation, versions=life.host.versions(),
        )  # fmt: skip
        self.account = Account(self.report, life.model, self.told)

    @property
    def plan(self) -> Plan:
        """What goes back to the constructor's state in this session."""
        return self.life.plan

    @property
    def scope(self) -> set[int] | None:
        """The storages that this session is to write, where that is not all that its kind demands."""
        return None

    @property
    def state(self) -> State:
        """Where the session stands; setting it takes a step of `states.TRANSITIONS`, or raises SessionStateError."""
        return self._state

    @state.setter
    def state(self, new: State) -> None:
        self._state = move(self._state, new)

    # -- phases ------------------------------------------------------------------------------------------------

    def phase(self, name: str | None) -> None:
        """End the running phase and begin another (None: only end)."""
        count, size = {
            "receive": (self.intake.tensors, self.intake.nbytes),
            "copy_back": (self.report.tensors_copied, self.report.bytes_copied),
        }.get(self.account.running or "", (0, 0))
        self.account.phase(name, count, size)

    # -- prepare -----------------------------------------------------------------------------------------------

    def prepare(self, before: Callable[[WeightLoadSession], None] | None = None) -> None:
        """Check that the update may begin, then put the model into the format that loaders write.

        Args:
            before: a further check, which raises what it finds. Its ranks may find different things.

        Raises:
            RefusedLayerError: a layer cannot be restored, or the host forbids an update now. Nothing was touched.
        """
        life = self.life
        self._expect(State.IDLE)
        reason = life.host.refuse_reason(self.report.operation)
        if reason is not None:
            raise errors.RefusedLayerError(reason, model=life.name, session=self.id)
        refused = life.plan.refused
        if refused:
            raise errors.RefusedLayerError(
                f"{len(refused)} layers cannot be restored safely: {refused[0].reason}",
                model=life.name, layer=refused[0].path, session=self.id,
            )  # fmt: skip
        self.phase("prepare")
        if before is not None:
            try:
                before(self)
            except BaseException:
                self.life.vote(False, self)
                raise
        storage.choose(self)
        life.addresses.begin(self)
        life.derived.begin(self)
        isolated = self.settings.isolation == "staged"
        self.report.isolation_why = "the setting" if isolated else "the setting: the engine is paused"
        self.stage = Stage(
            life.model, life.skeleton, Plan() if self.kernel_format else life.plan, life.host.skip,
            isolated, life.fill, life.addresses.known().values(),
        )  # fmt: skip
        resized = self.stage.resized(life.manifest.expected)
        if resized is not None:
            raise errors.RefusedLayerError(
                f"{resized.path} has another size than the first load left: {resized.nbytes} bytes now",
                model=life.name, layer=resized.path, session=self.id,
                hint="a model that was converted after its first load (.half(), .bfloat16()) has to be built again",
            )  # fmt: skip
        self.receiver = self._watch(self.stage)
        if self._may_stream():
            self.streamer = Streamer(self)
            self.receiver.on_retired = self.streamer.refuse
        self.stage.present()
        if self._may_trust():
            self.trust = Trust(self)
        if self.report.world_size > 1 and self.settings.rank_values != "off" and not self.kernel_format:
            self.held = Held(self, life.replicas)
        self.state = State.PREPARED
        self.phase("receive")

    def _watch(self, stage: Stage) -> Receiver:
        """The mode, and the one for custom operators, that see what happens to a stage."""
        receiver = Receiver(
            stage.index,
            self.intake.on_write,
            lambda track: storage.before_first_write(self, track),
            self.intake.on_read,
        )
        receiver.copies = HostCopies.of(self.life.model)
        self.operators = CustomOperators(receiver, None)
        return receiver

    def _may_trust(self) -> bool:
        """Whether the first load taught rules, and nothing asks to look at every tensor."""
        rules = self.life.manifest.rules
        return (
            rules is not None
            and not rules.off
            and self.settings.watch_writes == "sampled"
            and not self.kernel_format
            and self.sent is None
            and self.settings.nonfinite == "off"
            and self.partial != "allow"
        )

    def _may_stream(self) -> bool:
        """Whether layers may be processed before the finish: the caller says when it ends, and nothing comes twice.

        Beside a whole generation A nothing is gained: raw memory turns into processed memory of the same size.
        """
        return (
            self.explicit
            and self.settings.isolation == "in_place"
            and self.report.storage == "pinned"
            and not self.kernel_format
            and self.settings.processing == "as_complete"
            and self.settings.surplus == "strict"
            and not self.life.manifest.provisional
            and self.sent is None  # whether it is what the sender had is known at the end
        )

    @contextmanager
    def hooks_run_now(self) -> Iterator[None]:
        """The inside of a hook that runs while the loader waits: nothing is entered in the ledger."""
        assert self.operators is not None
        self.state, self.intake.recording = State.PROCESSING, False
        try:
            with self.life.entered(), nullcontext() if self.life.manifest.custom else self.operators:
                yield
        finally:
            self.state, self.intake.recording = State.RECEIVING, True

    # -- receive -----------------------------------------------------------------------------------------------

    def receive(self, load: Callable[[Any], Any], weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Run one call of the host's loader with its source observed."""
        intake, receiver = self.intake, self.receiver
        assert receiver is not None
        intake.calls += 1
        intake.sources.clear()
        intake.unplaced = False
        began = time.perf_counter()
        with self.inside():
            self.state = State.RECEIVING
            intake.recording = True
            stopped = False
            trust = self.trust if self.trust is not None and self.trust.serves(load) else None
            try:
                try:
                    items = receiver.stream(weights, intake.begin, intake.end, trust)
                    if trust is not None and receiver.copies is not None:
                        items = receiver.copies.by_rule(items, receiver)
                    out = load(streams.as_given(weights, items))
                    receiver.raise_lost()
                finally:
                    stopped = receiver.aside
                    if stopped:
                        intake.unobserved()
                        receiver.stand()
                    if trust is not None:
                        trust.cut = stopped
                        trust.fold()
            except errors.WeightlifeError:
                raise
            except Exception as error:
                problem = intake.explain(error)
                if problem is None:
                    raise
                raise problem from error
            finally:
                intake.recording = False
                self.account.load_seconds += time.perf_counter() - began
        if trust is not None and stopped:  # what it did after that was not observed
            raise trust.broken("a loader that read its source to the end did not", [intake.name])
        if intake.unplaced:  # it may stand in the place of a parameter
            self.note_replaced()
        return out

    @property
    def pulling(self) -> bool:
        """Whether the running code is the source, not the host's loader."""
        return self.receiver is not None and self.receiver.pulling

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The inside of the lifecycle: contexts of the first load, generation B shown, writes observed."""
        assert self.stage is not None and self.receiver is not None and self.operators is not None
        self._expect(State.PREPARED, State.RECEIVING, State.PROCESSING)
        self.stage.show_b()
        with ExitStack() as stack:
            stack.enter_context(self.life.entered())
            stack.enter_context(self._observed())
            try:
                yield
            except BaseException as error:
                hidden = self.receiver.error
                self.receiver.error = None
                if hidden is not None and hidden is not error:
                    raise hidden from None
                raise

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Writes are seen, below a client's own dispatch modes."""
        assert self.receiver is not None and self.operators is not None
        # Custom operators and raw memory are looked for where hooks run, and in loaders that were seen to use
        # them: every `.data` and `.shape` of 2,304 expert tensors through a function mode is 70 ms.
        watched = self.state is State.PROCESSING or self.life.manifest.custom
        with operators.below_foreign_modes() as foreign:
            self.foreign_modes = self.foreign_modes or bool(foreign)
            with self.operators if watched else nullcontext(), self.receiver, operators.again(foreign):
                yield

    def write_directly(self, call: Callable[[], Any]) -> Any:
        """Run a call of the host that writes parameters itself, without a loader. Use it `inside()`."""
        self.state = State.RECEIVING
        self.intake.recording = True
        try:
            return call()
        finally:
            self.intake.recording = False

    def problem(self, error: errors.WeightlifeError, policy: str) -> None:
        """Raise, warn about or ignore a violation, by policy; the report has it in any case.

        Raises:
            the given error, if the policy is `strict`.
        """
        if policy == "off":
            return
        self.account.violation(error)
        if policy == "strict":
            raise error
        self.life.tell(logging.WARNING, str(error), self.id)

    # -- finish ------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Validate, process, settle and commit. On any exception the caller aborts.

        Raises:
            CompletenessError, StorageMovedError, or what a hook of the host raised, unchanged.
        """
        self._expect(State.PREPARED, State.RECEIVING)
        with self.life.entered():
            self._finish()

    def _finish(self) -> None:
        assert self.stage is not None
        self.phase("validate")
        self.stage.show_b()
        if self.trust is not None:
            self.trust.check()
        self.note_replaced()
        if self.sent is not None:
            different = self.sent.problem(self)
            if different is not None:
                self.problem(different, "strict")
        touched = self.touched()
        completeness.check(self, touched)
        early: set[int] = set()
        if self.streamer is not None:
            early = self.streamer.done
            self.streamer.close()
        self.state = State.PROCESSING
        if not self.kernel_format:
            self._rebuild(touched, early)
        self.phase("validate")
        self.state = State.VALIDATING
        self.life.addresses.look_again(self)
        self.life.addresses.mirrors.check(self)
        self.life.addresses.check_derived(self)
        settler = storage.Settler(self.stage)
        settlement = settler.settle()
        self.life.addresses.hold(self, settler)
        settlement.changes += derived.kept(self)
        storage.check(self, settlement)
        if self.held is not None:
            self.held.close()
        self.life.vote(True, self)
        self.phase("copy_back")
        self._commit(settlement, touched)

    def _rebuild(self, touched: set[int], early: set[int]) -> None:
        """Generation B in kernel format. `touched`: layers that were written; `early`: those processed already."""
        assert self.stage is not None
        if self.held is not None:
            self.held.take()
        # Outside the modes: filling a stage from the storage that it stands for must not be redirected to it.
        wanted = fill.restore(self, touched)
        self.processed = wanted
        if self.life.manifest.provisional:  # the commit makes one of it
            self.written = {n: t.written.copy() for n, t in self.stage.by_number.items() if t.written}
        self.stage.forget_placeholders()
        with self.inside():
            self._process(wanted - early)
        self.stage.put_back_unmade(self.idle)

    def note_replaced(self) -> None:
        """Enter what a loader replaced instead of writing it."""
        assert self.stage is not None
        sources = self.intake.sources
        came = self.life.manifest.came(self.intake.received)
        placed = self.stage.note_replaced(sources, came)
        if self.kernel_format:
            return
        placed.update(self.stage.note_assigned(self.life.manifest.casts, sources, came))
        for path, write in placed.items():
            entry = self.intake.received.get(path)
            if entry is not None and not entry.writes:
                entry.wrote(*write)

    def touched(self) -> set[int]:
        """Ids of the modules with a slot on a storage that was written."""
        assert self.stage is not None
        storages = self.life.skeleton.storages
        return {
            layer
            for number, track in self.stage.by_number.items()
            if track.ever or track.irregular
            for layer in storages[number].layers
        }

    def check_ready(self) -> None:
        """Whether the next pass may be the end of this session: its touched layers are whole.

        Raises:
            HalfTouchedLayerError, MissingTensorError: they are not.
        """
        lacking = None if self.sent is None else self.sent.missing(self)
        if lacking is not None:
            raise lacking
        if not self.life.manifest.provisional:
            error = completeness.missing(self, self.touched())
            if error is not None:
                raise error

    def _process(self, wanted: set[int]) -> None:
        life = self.life
        idle_deferred = [m for m in life.model.modules() if id(m) in self.idle and life.host.is_deferred(m)]
        if idle_deferred and not life.host.rerun_deferred():
            self.report.notes.append(
                f"{len(idle_deferred)} late hooks of untouched layers did not run: what they derive from others is old"
            )
        skipped = set() if life.host.rerun_deferred() else self.idle
        processing.run(
            life.model, life.host, lambda layer: id(layer) in wanted, lambda layer: id(layer) not in skipped,
            self.phase, self.account.layer,
        )  # fmt: skip

    def _commit(self, settlement: storage.Settlement, touched: set[int]) -> None:
        stage, life = self.stage, self.life
        assert stage is not None
        life.committing = True
        if self.report.storage == "pinned":
            size = storage.commit_pinned(stage, settlement, self.operators, storage.copier(self))
            self.copied(len(settlement.moves), size)
            life.addresses.verify(self)
        # What native code of layers that were not made again still points to stays, too.
        kept = [(owners, memory) for owners, memory in life.keep_alive if not owners <= self.processed]
        life.keep_alive = kept + self.kept_alive + settlement.keep_alive
        life.committing = False
        self.phase(None)
        self.state = State.COMMITTED
        life.learn_from(self)
        life.derived.committed(self)
        if self.held is not None:
            self.held.learn()
        if self.settings.digests == "commit":
            self.phase("digest")
            life.digests.keep(self.report)
            self.phase(None)
        self._close("committed", touched)

    def abort(self, error: BaseException | None = None, outcome: str = "aborted") -> None:
        """Back to A exactly. Idempotent."""
        if self.state in (State.COMMITTED, State.ABORTED):
            return
        self.phase("abort")
        if self.trust is not None and not self.life.unsafe and self.trust.strayed():
            self.life.poison("an item that ran by rule was not written where its rule says")
        touched = self.touched() if self.stage is not None else set()
        if self.stage is not None:
            self.side_copies.join()  # or a copy that still runs lands on what is undone here
            with self.life.entered():
                self.life.addresses.before_revert()
                self.life.derived.aborted(self)
                self.stage.revert()
                self.life.addresses.after_revert()
        self.phase(None)
        self.state = State.ABORTED
        self._error = error
        self.report.error = None if error is None else errors.safe_text(error)
        self._close("poisoned" if self.life.poisoned else outcome, touched)

    def _close(self, outcome: str, touched: set[int]) -> None:
        life, report, account = self.life, self.report, self.account
        if self.receiver is not None:
            account.source_seconds = self.receiver.source_seconds
            account.copy_seconds = self.receiver.copies.seconds if self.receiver.copies else 0.0
        account.total(outcome, self.intake.tensors, self.intake.nbytes)
        life.addresses.end(self, outcome == "committed")
        again = self.intake.epochs - 1
        if again:
            report.notes.append(f"layers were sent anew {again} times: later values replaced earlier ones")
        account.layers(life.plan, touched)
        if outcome == "committed":
            report.notes += life.notes_after_commit()
        life.closed(self)
        account.closed(self._error or report.error or "")
        self._error = None
        if self.stage is not None:
            self.stage.drop()
        self.stage = self.receiver = self.operators = self.streamer = self.trust = self.held = None

    def copied(self, tensors: int, size: int) -> None:
        """So much went into the memory that serves."""
        self.report.tensors_copied += tensors
        self.report.bytes_copied += size

    def _expect(self, *states: State) -> None:
        if self.state not in states:
            raise errors.SessionStateError(
                f"the session is {self.state.value}", model=self.life.name, session=self.id
            )


__all__ = ["State", "WeightLoadSession"]
