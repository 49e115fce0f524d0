# SPDX-License-Identifier: Apache-2.0
"""The first load of a model: the host's own path, watched. Everything that a reload needs is learned here."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import cuts, footprint, ledger, rules, slots, spots, streams, watching
from weightlife._engine.account import Account
from weightlife._engine.contexts import LoadContext
from weightlife._engine.flow import Flow
from weightlife._engine.host_copies import HostCopies
from weightlife._engine.ledger import Region
from weightlife._engine.manifest import Manifest, Received
from weightlife._engine.operators import CustomOperators, Sampled, WriteObserver
from weightlife._engine.receive import Receiver
from weightlife._engine.signatures import COPY_OPERATORS, accumulates, signature_of, spreads
from weightlife._engine.skeleton import dtype_name, own_memory, storage_key
from weightlife._engine.track import Track, region_of
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COPY = torch.ops.aten.copy_.default


class FirstLoad:
    """Records the ledger while the host loads, and the footprint while it processes. Changes nothing."""

    def __init__(self, life: Lifecycle, provisional: bool) -> None:
        self.life = life
        self.provisional = provisional
        self.received: dict[str, Received] = {}
        self.current: Received | None = None
        self.expected: dict[int, Counter[Region]] = {}
        self.irregular: set[int] = set()
        self.casts: dict[tuple[int, str], set[Region]] = {}
        self.spread: set[int] = set()
        self.raw: set[int] = set()
        self.custom = False
        self.reads_first: set[int] = set()
        self._unplaced = (
            False  # a name wrote nothing that was seen: its tensor may stand in a parameter's place
        )
        self._own: dict[int, int | None] = {}  # tensors that were given memory of their own, and that
        self._item = 0  # how many tensors have come; what happens after the last one counts as one more
        self._last_write: dict[int, int] = {}
        self._last_read: dict[int, int] = {}
        self.sources: set[int] = set()  # storages of the tensors that came
        self.learner = rules.Learner(life.skeleton, life.host.rank()[1])
        self._receiver: Receiver | None = None
        self._wrapped = False  # tensors of a class with a dispatch of its own are about
        self._kind: rules.Kind | None = None
        self._tensor: Any = None
        self._cuts: list[cuts.Cut | None] = []  # what the writes of the present name take of it
        self._twice: set[str] = set()
        self._shared: dict[tuple[cuts.Cut | None, ...], tuple[cuts.Cut | None, ...]] = {}
        self.tensors = 0
        self.nbytes = 0
        rank, world = life.host.rank()
        self.report = LoadReport(
            session_id=uuid.uuid4().hex[:12], model=life.name, operation="first_load", opened_by="load_model",
            rank=rank, world_size=world, started_at=datetime.now(timezone.utc).isoformat(),
            isolation="none", isolation_why="nothing served before", storage="adopted",
            storage_why="the host's own allocation", versions=life.host.versions(),
        )  # fmt: skip
        self.failed = ""  # what ended the last call, until its tensor has come again
        self._failed_name = ""
        self._name = ""
        self.dead = ""  # processing failed half way: nothing can be made of this model any more
        self.account = Account(self.report, life.model)
        self._paths: dict[int, str] = {}
        self._hooked: set[int] = set()  # layers whose hook is running: a hook may call its base class's

    def receive(self, load: Callable[[Any], Any], weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Run the host's loader with every write entered in the ledger.

        Raises:
            SessionStateError: an earlier call's processing failed. Else what the loader raises.
        """
        if self.dead:
            raise errors.SessionStateError(
                f"the first load's processing failed half way: {self.dead}", model=self.life.name,
                hint="build the model again, and load that one",
            )  # fmt: skip
        index: dict[int, Track] = {}
        life, skeleton = self.life, self.life.skeleton
        for key, number in skeleton.table().items():
            made = skeleton.storages[number]
            tensor = next((t for i in made.tensors if (t := skeleton.tensors[i].ref()) is not None), None)
            if tensor is not None and skeleton.storage_of(tensor) == number:
                index[key] = Track(number, tensor.untyped_storage(), made.nbytes, made.dtype, False, "")
        receiver = Receiver(index, self._on_write, None, self._on_read)
        receiver.trusted = True  # nothing is read from the source that could be of this model
        copies = receiver.copies = HostCopies.of(self.life.model)
        operators = CustomOperators(receiver, None)
        self.learner.call(load)
        kinds = self.learner.kinds
        sampled = Sampled(operators, kinds, self.learner.calls)

        quick = self._plain_tensors()

        def begin(name: Any, tensor: Any, followed: bool) -> None:
            text = str(name)
            # In a thread of the loader's the stacks of modes are others.
            kind = sampled.begin(text, tensor) if followed else rules.kind_of(kinds, text, tensor)
            if followed:
                # Two alike were seen under the mode, and nothing of a class with a dispatch of its own.
                if quick and sampled.off and type(tensor) in _PLAIN and not receiver.wrapped:
                    if not receiver.keyed:
                        receiver.by_key()
                else:
                    receiver.by_mode()
            self._begin(text, tensor, followed, kind)

        def end() -> None:
            self._end(not receiver.odd)

        def after() -> None:
            sampled.stand()
            receiver.by_mode()

        receiver.after = after
        self._receiver = receiver

        self.account.phase("receive")
        started, before = time.perf_counter(), (self.tensors, self.nbytes)
        try:
            with LoadContext.first(skeleton.inference), sampled, receiver:
                out = load(streams.as_given(weights, receiver.stream(weights, begin, end)))
            receiver.raise_lost()
            if not self._failed_name:
                self.failed = ""
            self._note_assigned()
            if self._unplaced or self.tensors == before[0]:
                self._own_given(self._given())
            self._unplaced = False
            return out
        except BaseException as error:
            self.failed, self._failed_name = errors.safe_text(error), self._name
            if watching.could_not_show(error):
                self._wrapped = True
                raise errors.BypassError(
                    "the loader uses tensors of a class that has a dispatch of its own, and did not for others like it",
                    model=life.name, tensors=[self._name] if self._name else [], session=self.report.session_id,
                    hint="load again, or set watch_writes='all'",
                ) from error  # fmt: skip
            raise
        finally:
            self._wrapped = self._wrapped or receiver.wrapped
            self._name = ""
            self._receiver = None
            self.learner.whole = self.learner.whole and receiver.exhausted
            self.custom = self.custom or operators.used
            self.raw |= {track.number for track in index.values() if track.raw and track.number is not None}
            self.account.source_seconds += receiver.source_seconds
            self.account.copy_seconds += copies.seconds if copies else 0.0
            self.account.load_seconds += time.perf_counter() - started
            self.account.phase(None, self.tensors - before[0], self.nbytes - before[1])

    def _plain_tensors(self) -> bool:
        """Whether no tensor of the model has a dispatch of its own, and not all is to be seen under the mode."""
        classes = {made.cls for made in self.life.skeleton.tensors}
        if self._wrapped or self.life.settings.watch_writes != "sampled":
            return False
        return not any(map(watching.dispatches, classes))

    def _on_read(self, track: Track, view: torch.Tensor, func: Any) -> None:
        """A loader that reads what it has not written needs the constructor's value at every later load, too."""
        number = track.number
        if number is None:
            return
        self._last_read[number] = self._item
        if number in self.reads_first:
            return
        part = region_of(track, view)
        if part is None or part.numel == 0 or self.expected.get(number, Counter())[part]:
            return
        if ledger.uncovered(part, track.numel, self.expected.get(number, Counter())):
            self.reads_first.add(number)
            self.life.skeleton.keep_unwritten(number, None)

    def _begin(self, name: str, tensor: Any, followed: bool, kind: rules.Kind) -> None:
        like = kind.like
        if isinstance(tensor, torch.Tensor):
            if like is None:
                nbytes = tensor.numel() * tensor.element_size()
                like = kind.like = (tuple(tensor.shape), dtype_name(tensor), nbytes)
            self.sources.add(storage_key(tensor) or 0)
        elif like is None:
            like = kind.like = ((), "", 0)
        entry = Received(like[0], like[1], like[2], like)
        if name in self.received:
            self.learner.again(self.received[name])
            self._twice.add(name)  # the two may be two parts
        self._name, self.received[name] = name, entry
        self._kind, self._tensor = kind, tensor
        self._cuts = []
        if name == self._failed_name:
            self._failed_name = ""
        self.current = entry if followed else None
        self.tensors += 1
        self._item += 1
        self.nbytes += like[2]
        self._unplaced = self._unplaced or not followed

    def _end(self, plain: bool) -> None:
        if self.current is not None:
            self._unplaced = self._unplaced or not self.current.writes
            if self._name not in self._twice:
                taken = tuple(self._cuts)
                self.current.cuts = self._shared.setdefault(taken, taken)
            if self._kind is not None:
                self.learner.end(self.current, self._kind, self._tensor, plain)
        self.current = self._tensor = None
        self._item += 1

    def _late(self) -> set[int]:
        """Storages that are touched when no source tensor is under way, or after all of their layer has come.

        Between two tensors `_item` is even. Layers are compared whole: a loader may read one weight of a layer again
        while another one is still to come.
        """
        complete: dict[int, int] = {}
        for number, when in self._last_write.items():
            for layer in self.life.skeleton.storages[number].layers:
                complete[layer] = max(complete.get(layer, 0), when)
        late = {number for number, when in self._last_write.items() if when % 2 == 0}
        for number, when in self._last_read.items():
            layers = self.life.skeleton.storages[number].layers
            if any(when > complete.get(layer, 0) for layer in layers):
                late.add(number)
        return late

    def _on_write(self, track: Track, view: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        number = track.number
        assert number is not None
        given = args[1] if len(args) > 1 else None
        copies = func is _COPY
        if (
            not (copies and given is self._tensor)
            and self._receiver is not None
            and not rules.copies_own(func, args, self._tensor)
        ):
            self._receiver.odd = True
        chosen = None if copies else spots.written(func, args, view)
        if not copies and (
            accumulates(func, args, int(track.storage._cdata)) or (chosen is not None and not chosen.known)
        ):
            self._on_read(track, view, func)
        part = None
        for where in (view,) if chosen is None else chosen.views:
            part = region_of(track, where)
            if part is None:
                self.irregular.add(number)
                return
            if part.numel == 0:
                if chosen is None:
                    return
                continue
            known = self.expected.get(number)
            if known is None:
                known = self.expected[number] = Counter()
            known[part] = known.get(part, 0) + 1  # by get: a counter's own way for what it lacks is Python
            if self.current is not None:
                self.current.wrote(number, part)
                same = chosen is None and view.dtype.itemsize == track.dtype.itemsize
                self._cuts.append(cuts.cut_of(func, args, view, self._tensor) if same else None)
        if part is None:
            return
        self._last_write[number] = self._item
        if isinstance(given, torch.Tensor) and chosen is None:  # there it is an index, or a mask
            if (copies or signature_of(func).name in COPY_OPERATORS) and given.shape != view.shape:
                if spreads(view, given):
                    self.spread.add(number)
            if given.dtype is not view.dtype:
                self.casts.setdefault((number, dtype_name(given)), set()).add(part)

    def _given(self) -> dict[int, torch.Tensor]:
        """Tensors that the loader gave other data (`.data =`), by their number."""
        skeleton = self.life.skeleton
        found: dict[int, torch.Tensor] = {}
        for index, made in enumerate(skeleton.tensors):
            tensor = made.ref()
            if tensor is None or skeleton.storage_of(tensor) == made.storage:
                continue
            if made.dtype.itemsize == skeleton.storages[made.storage].dtype.itemsize:
                found[index] = tensor
        return found

    def _own_given(self, given: dict[int, torch.Tensor]) -> None:
        """Copy what the loader only lent them, before their sender uses the buffer again: at the end of each call."""
        for index, tensor in given.items():
            if self._own.get(index, 0) != storage_key(tensor):
                own_memory(tensor, self.sources)
                self._own[index] = storage_key(tensor)

    @property
    def came(self) -> bool:
        """Whether a loader brought anything, by name or without one."""
        return bool(
            self.received or self.expected or self.irregular or (self.learner.calls and self._given())
        )

    def _note_replaced(self) -> None:
        """Tensors that the loader gave other data count as written whole, under their own name."""
        if not self.learner.calls:
            return
        skeleton, given = self.life.skeleton, self._given()
        self._own_given(given)
        for index in given:
            made = skeleton.tensors[index]
            part = ledger.region(made.offset, made.shape, made.stride)
            self.expected.setdefault(made.storage, Counter())[part] += 1
        for holder, key, index in skeleton.module_slots() if given else ():
            if index in given and slots.own(holder.obj, key) is given[index]:
                made = skeleton.tensors[index]
                entry = self.received.get(slots.step(holder.path, key))
                if entry is not None and not entry.writes:
                    entry.wrote(made.storage, ledger.region(made.offset, made.shape, made.stride))
        self._note_assigned()

    def _note_assigned(self) -> None:
        """Slots in which the loader put a tensor of its own count as written whole, under their own name."""
        skeleton = self.life.skeleton
        for holder, key, index in skeleton.module_slots():
            made = skeleton.tensors[index]
            now = slots.own(holder.obj, key)
            if now is None or now is made.ref() or made.storage in self.expected:
                continue
            if tuple(now.shape) != made.shape or skeleton.storage_of(now) is not None:
                continue  # of another kind, or tied to another tensor of the model
            own_memory(now, self.sources)
            part = ledger.region(made.offset, made.shape, made.stride)
            self.expected[made.storage] = Counter({part: 1})
            if now.dtype != made.dtype:
                self.casts.setdefault((made.storage, dtype_name(now)), set()).add(part)
            entry = self.received.get(slots.step(holder.path, key))
            if entry is not None and not entry.writes:
                entry.wrote(made.storage, part)

    def process(self, call: Callable[[], Any]) -> Any:
        """Run the host's whole processing, then learn what it changed."""
        life, skeleton = self.life, self.life.skeleton
        self.account.phase("process")
        self._note_replaced()
        provisional = not (self.expected or self.irregular or self.raw)
        if not provisional:
            for number in range(len(skeleton.storages)):
                written = self.expected.get(number)
                if number in self.irregular:
                    continue
                if not written:
                    skeleton.keep_unwritten(number, None)
                    continue
                book = ledger.StorageLedger(skeleton.storages[number].numel, written)
                if not book.covered():
                    skeleton.keep_unwritten(number, book.mask())
        if not provisional and self.learner.ranks > 1 and life.settings.rank_values != "off":
            from weightlife._engine import replicas

            life.replicas.first = replicas.shards(skeleton, self.received, self.expected)
        life.context = LoadContext.current()
        loaded = footprint.by_loader(skeleton)
        table = skeleton.table()
        flow = Flow(key for key, number in table.items() if provisional or number in self.expected)
        observer = WriteObserver(table, flow)
        try:
            with LoadContext.first(skeleton.inference), CustomOperators(None, observer.note, flow), observer:
                out = call()
        except BaseException as error:
            self.dead = errors.safe_text(error)
            raise
        plan = footprint.learn(skeleton, life.model, observer.written, loaded)
        if not provisional:
            for number in range(len(skeleton.storages)):
                if number not in plan.rebuilt_storages and number not in self.reads_first:
                    skeleton.drop_kept(number)
            self._refuse_raw(plan)
        life.flow = flow.derived(table)
        skeleton.forget_identities()
        manifest = Manifest(
            provisional, self.expected, self.received, self.casts, self.spread, self.reads_first
        )
        manifest.custom = self.custom or bool(self.raw)
        manifest.late = self._late()
        manifest.rules = rules.rules_of(manifest, skeleton, self.learner, self.raw | self.irregular)
        self.account.phase(None)
        self._close(plan, manifest)
        return out

    def hook(self, layer: torch.nn.Module, name: str, call: Callable[[], Any]) -> Any:
        """Run a layer's hook and note the time."""
        if id(layer) in self._hooked:
            return call()
        self._hooked.add(id(layer))
        started = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - started
            self._hooked.discard(id(layer))
            if not self._paths:
                self._paths = {id(module): path for path, module in self.life.model.named_modules()}
            path = self._paths.get(id(layer), "")
            self.account.layer(path, name, seconds)

    def _refuse_raw(self, plan: footprint.Plan) -> None:
        """Layers that a loader filled through raw memory can't be followed: a reload of them is refused."""
        for number in self.raw | self.irregular:
            storage = self.life.skeleton.storages[number]
            book = ledger.StorageLedger(storage.numel, self.expected.get(number, Counter()))
            if book.covered():
                continue
            for ident in storage.layers:
                if ident in plan.layers:
                    path = plan.layers[ident].path
                    reason = (
                        "its loader writes in a way that can't be followed (raw memory, parts of elements)"
                    )
                    plan.layers[ident] = footprint.LayerPlan(path, "refuse", reason)

    def _close(self, plan: footprint.Plan, manifest: Manifest) -> None:
        report = self.report
        loaded = manifest.layers(self.life.skeleton)
        self.account.total("committed", self.tensors, self.nbytes)
        self.account.layers(plan, loaded)
        if manifest.provisional:
            report.notes.append(
                "a dummy first load: what a complete load writes is learned from the first real one"
            )
        self.life.learned(plan, manifest, report)
        self.account.closed()
