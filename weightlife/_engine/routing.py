# SPDX-License-Identifier: Apache-2.0
"""Which names of a checkpoint go where, found without a byte of it: the loader runs over tensors on the meta device.

The module tree shows the constructor's parameters as meta tensors while the model's own loader is given meta tensors
of the names, shapes and dtypes that headers tell. Every write is observed as in a real load, and none has memory to
land in. What comes out is a *provisional* manifest: what these names would write, if loaders do with values what they
do without them. A loader that reads values can't be routed, and says so.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlife import errors
from weightlife._declared import Header
from weightlife._engine import export, ledger, registry, slots, spots
from weightlife._engine.footprint import Plan
from weightlife._engine.manifest import Manifest, Received
from weightlife._engine.signatures import COPY_OPERATORS, signature_of, spreads
from weightlife._engine.skeleton import Skeleton, TensorSkeleton, dtype_name, tokens
from weightlife._engine.stage import Stage
from weightlife._engine.track import Track, region_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.session import WeightLoadSession

_META = torch.device("meta")


def everything(skeleton: Skeleton, plan: Plan) -> Plan:
    """A plan that puts every slot with a tensor back to what the constructor made, and what processing changed."""
    restore = {ident: dict(changed) for ident, changed in plan.restore.items()}
    for ident, state in skeleton.states.items():
        for key, value in state.items():
            if any(True for _ in tokens(value)):
                restore.setdefault(ident, {}).setdefault(key, value)
    return Plan(restore)


class MetaStage(Stage):
    """The constructor's state of a model with tensors that have no memory."""

    def __init__(self, life: Lifecycle) -> None:
        super().__init__(life.model, life.skeleton, everything(life.skeleton, life.plan), life.host.skip)
        self.meta: dict[int, Track] = {}  # meta storage identity -> track
        self._numbers: dict[int, Track] = {}

    def _track_of(self, made: TensorSkeleton) -> Track:
        track = self._numbers.get(made.storage)
        if track is None:
            skeleton = self.skeleton.storages[made.storage]
            storage = torch.UntypedStorage(skeleton.nbytes, device=_META)
            track = Track(made.storage, storage, skeleton.nbytes, skeleton.dtype, True, made.path)
            self._numbers[made.storage] = self.meta[int(storage._cdata)] = track
        return track

    def replaced(self) -> Iterator[tuple[int, ledger.Region, list[str], torch.Tensor]]:
        """Parameters that the loader gave other data, or another tensor: storage, region, names, what is there now."""
        given = {
            index: tensor
            for index, tensor in self.placeholders.items()
            if int(tensor.untyped_storage()._cdata) not in self.meta
        }
        paths: dict[int, list[str]] = {index: [] for index in given}
        others = []
        for holder, key, index in self.skeleton.module_slots():
            made, now = self.skeleton.tensors[index], slots.own(holder.obj, key)
            if index in given and now is given[index]:
                paths[index].append(slots.step(holder.path, key))
            if now is None or now is self.placeholders.get(index) or tuple(now.shape) != made.shape:
                continue
            if now.is_meta and int(now.untyped_storage()._cdata) not in self.meta:
                others.append((made, slots.step(holder.path, key), now))
        for index, tensor in given.items():
            made = self.skeleton.tensors[index]
            yield made.storage, ledger.region(made.offset, made.shape, made.stride), paths[index], tensor
        for made, path, now in others:
            yield made.storage, ledger.region(made.offset, made.shape, made.stride), [path], now


class Router(TorchDispatchMode):
    """Sees where a loader writes. Nothing is written: destinations have no memory."""

    def __init__(self, stage: MetaStage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stage = stage
        self.received: dict[str, Received] = {}
        self.expected: dict[int, Counter[ledger.Region]] = {}
        self.casts: dict[tuple[int, str], set[ledger.Region]] = {}
        self.spread: set[int] = set()
        self.name = ""
        self.error: errors.RoutingError | None = None
        self._current: Received | None = None

    def stream(self, headers: Mapping[str, Header]) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor without memory for each header.

        Raises:
            RoutingError: a header has no dtype that torch has, or no shape.
        """
        for name, header in headers.items():
            dtype = getattr(torch, header.dtype, None)
            if not isinstance(dtype, torch.dtype) or header.shape is None:
                raise self._fail(
                    f"dtype {header.dtype or 'unknown'} and shape {header.shape} make no tensor", name
                )
            tensor = torch.empty(header.shape, dtype=dtype, device=_META)
            nbytes = tensor.numel() * tensor.element_size()
            self.name = name
            self._current = self.received[name] = Received(header.shape, header.dtype, nbytes)
            yield name, tensor
            self._current = None
        self.name = ""

    def _fail(self, message: str, name: str = "") -> errors.RoutingError:
        names = [name or self.name] if name or self.name else []
        self.error = self.error or errors.RoutingError(message, tensors=names)
        return self.error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            raise self._fail("the loader decides by a value of the tensor, which a header does not tell")
        signature = signature_of(func)
        for position in signature.writes:
            if position < len(args):
                self._written(args[position], func, args)
        for name in signature.keyword_writes & kwargs.keys():
            self._written(kwargs[name], func, args)
        return func(*args, **kwargs)

    def _written(self, value: Any, func: Any, args: tuple[Any, ...]) -> None:
        if isinstance(value, (list, tuple)):
            for position, one in enumerate(value):
                given = args[1][position] if len(args) > 1 and isinstance(args[1], (list, tuple)) else None
                self._written_one(one, func, args, given)
        else:
            self._written_one(value, func, args, args[1] if len(args) > 1 else None)

    def _written_one(self, view: Any, func: Any, args: tuple[Any, ...], given: Any) -> None:
        if not isinstance(view, torch.Tensor) or view.layout is not torch.strided:
            return
        identity = int(view.untyped_storage()._cdata)
        if identity in self.stage.index:
            raise self._fail("the loader writes memory that serves, and not a parameter")
        track = self.stage.meta.get(identity)
        if track is None or track.number is None:
            return
        chosen = spots.written(func, args, view)
        for where in (view,) if chosen is None else chosen.views:
            part = region_of(track, where)
            if part is None:
                raise self._fail(f"the loader writes {track.path} in pieces smaller than its elements")
            if part.numel:
                self._enter(track.number, part)
        if not isinstance(given, torch.Tensor) or func._schema.name not in COPY_OPERATORS:
            return
        if spreads(view, given):
            self.spread.add(track.number)
        part = region_of(track, view)
        if given.dtype != view.dtype and part is not None:
            self.casts.setdefault((track.number, dtype_name(given)), set()).add(part)

    def _enter(self, number: int, part: ledger.Region) -> None:
        self.expected.setdefault(number, Counter())[part] += 1
        if self._current is not None:
            self._current.wrote(number, part)

    def finish(self) -> Manifest:
        """What was seen, as a manifest that is provisional."""
        for number, part, paths, now in self.stage.replaced():
            if part in self.expected.get(number, ()):
                continue
            self.expected.setdefault(number, Counter())[part] += 1
            for path in paths:
                entry = self.received.get(path)
                if entry is not None and not entry.writes:
                    entry.wrote(number, part)
            made = self.stage.skeleton.storages[number].dtype
            if now.dtype != made:
                self.casts.setdefault((number, dtype_name(now)), set()).add(part)
        return Manifest(True, self.expected, self.received, self.casts, self.spread)


def route(
    life: Lifecycle, headers: Mapping[str, Header], load: Callable[[Any], Any] | None = None
) -> Manifest:
    """Where the tensors of a checkpoint would go. The model that serves is not touched, nor any memory.

    Passes wait meanwhile: for a fraction of a millisecond a tensor.

    Args:
        life: a model that has had its first load.
        headers: names, dtypes and shapes.
        load: the loader of a plain module, which gets (name, tensor) pairs; by default the host's.

    Raises:
        RoutingError: the loader can't run without values, or there is none. SessionStateError: an update is open.
        SessionConflictError: a load is inside now.
    """
    call = load or life.host.loader()
    if call is None:
        raise errors.RoutingError(
            "the loader of this model is not known", model=life.name,
            hint="give it: weightlife.manifest(model, checkpoint=..., loader=...)",
        )  # fmt: skip
    with life.owned("routing a checkpoint"):
        if life.session is not None or life.first is not None or life.is_inside():
            raise errors.SessionStateError(
                "a checkpoint can't be routed while a load is open", model=life.name,
                session=life.session.id if life.session else "",
            )  # fmt: skip
        if life.plan.refused:
            layer = life.plan.refused[0]
            raise errors.RoutingError(
                f"a layer can't be shown without memory: {layer.reason}", model=life.name, layer=layer.path
            )
        with shown(life) as stage:
            router = Router(stage)
            try:
                with router:
                    call(router.stream(headers))
            except Exception as error:
                raise _problem(life, router, error) from error
            if router.error is not None:  # a loader that catches everything
                raise _problem(life, router, router.error)
            return router.finish()


def _problem(life: Lifecycle, router: Router, error: Exception) -> errors.RoutingError:
    """What is raised inside a dispatch mode may surface as another type: the first cause, with the model's name."""
    found = router.error
    if found is None:
        message = f"the loader can't run without values: {type(error).__name__}: {errors.safe_text(error)}"
        found = errors.RoutingError(message, tensors=[router.name] if router.name else [])
    found.model = life.name
    return found


@contextmanager
def shown(life: Lifecycle) -> Iterator[MetaStage]:
    """The module tree without memory, and as it was afterwards, whatever the loader did to it."""
    # Passes look at this count first; one that comes from another thread then waits for the turn.
    registry.OpenSessions.count += 1
    token = registry.routing.set(life)
    try:
        stage = MetaStage(life)
        with life.entered():
            try:
                stage.present()
                yield stage
            finally:
                stage.revert()
    finally:
        registry.routing.reset(token)
        registry.OpenSessions.count -= 1


def at_start(life: Lifecycle) -> str:
    """After a dummy first load: route what the configured checkpoint's headers tell, if there is one.

    Returns what came of it in words, or nothing. Never raises: a start must not fail for it.
    """
    if life.settings.source == "off":
        return ""
    began = time.perf_counter()
    try:
        source = life.host.headers(None)
        if source is None or not source.headers:
            return ""
        life.routed = route(life, source.headers)
    except Exception as error:  # noqa: BLE001 - the reason is told: this start has no provisional manifest
        return f"no provisional manifest: {errors.clean(errors.safe_text(error), 400)}"
    seconds = time.perf_counter() - began
    return f"a provisional manifest of {len(life.routed.names)} names, from headers alone ({seconds:.2f} s)"


def compare(life: Lifecycle, session: WeightLoadSession) -> None:
    """After the first real load, which replaced the provisional manifest: say what differed."""
    if life.routed is None:
        return
    before, life.routed = life.routed, None
    try:
        told = export.manifest_of(life, left_out=False, known=before)
        found = told.diff(export.manifest_of(life, left_out=False))
    except Exception as error:  # noqa: BLE001 - B serves already
        text = errors.clean(errors.safe_text(error), 300)
        session.report.notes.append(f"this load could not be compared with what the headers had told: {text}")
        return
    if not found:
        session.report.notes.append("this load is the manifest now; it is what the headers had told")
        return
    counts = {
        "names that did not come": found.removed, "names that the headers had not": found.added,
        "other shapes": found.shapes, "other dtypes": found.dtypes, "other elements": found.moved,
    }  # fmt: skip
    said = [
        f"{len(rows)} {what} ({errors.clean(_name(rows[0]))} first)" for what, rows in counts.items() if rows
    ]
    text = f"this load is the manifest now; it differs from what the headers had told: {'; '.join(said)}"
    session.report.notes.append(text)
    if found.removed:
        life.tell(logging.WARNING, f"{life.name}: {text}", session.id)


def _name(row: Any) -> str:
    return row if isinstance(row, str) else str(row[0])


__all__ = ["MetaStage", "Router", "at_start", "compare", "everything", "route", "shown"]
