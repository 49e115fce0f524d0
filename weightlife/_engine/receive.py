# SPDX-License-Identifier: Apache-2.0
"""Receiving: a dispatch mode that sees every write of a load, whichever way it is made.

While a loader runs, each operation on a storage that belongs to the model is looked up here. A write is entered in
the ledger under the source name that is current; a write to memory that serves is redirected to its stage (copy on
write). Nothing is buffered: a sender may reuse its buffer for the
next tensor as soon as the loader returns.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from weightlife import errors
from weightlife._engine.ledger import Region, region
from weightlife._engine.skeleton import view_on
from weightlife._engine.untraced import UntracedMode


@dataclass
class Track:
    """One storage of the model during a session.

    `number` is the constructor's storage number (None: nothing that a load is known to write). A *placeholder* has
    no generation A behind it; a *live* storage serves as A and is written only through `stage`.
    """

    number: int | None
    storage: torch.UntypedStorage
    nbytes: int
    dtype: torch.dtype
    placeholder: bool
    path: str
    stage: torch.UntypedStorage | None = None
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (object, its A view)
    owners: set[int] = field(default_factory=set)  # modules from which it is reached
    written: Counter[Region] = field(default_factory=Counter)  # in this epoch
    sequence: dict[Region, tuple[int, int]] = field(default_factory=dict)  # last write: number, call
    ever: set[Region] = field(default_factory=set)
    irregular: bool = False  # writes that can't be mapped to elements
    raw: bool = False  # its memory was handed out
    retired: int = 0  # id of the layer that was processed early: nobody may touch this any more

    @property
    def current(self) -> torch.UntypedStorage:
        """The storage that holds generation B (or A, where B has not been written)."""
        return self.storage if self.stage is None else self.stage

    @property
    def numel(self) -> int:
        """Elements of `dtype`."""
        return self.nbytes // self.dtype.itemsize


@dataclass(frozen=True)
class _Signature:
    """Which arguments of an operator are written, and whether it only makes views."""

    writes: frozenset[int]
    keyword_writes: frozenset[str]
    passive: bool


# By identity: hashing an operator is a Python call of a microsecond. The operator itself is kept alive beside it.
_SIGNATURES: dict[int, tuple[_Signature, Any]] = {}


def signature_of(func: Any) -> _Signature:
    known = _SIGNATURES.get(id(func))
    if known is not None:
        return known[0]
    arguments = func._schema.arguments
    writes = {i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write}
    aliasing = any(a.alias_info is not None for a in arguments)
    names = frozenset(arguments[i].name for i in writes)
    # `set_` writes no memory: it gives the tensor another storage, which is noticed by comparing storages.
    passive = (aliasing and not writes) or func._schema.name == "aten::set_"
    made = _Signature(frozenset(writes), names, passive)
    _SIGNATURES[id(func)] = (made, func)
    return made


OnWrite = Callable[[Track, torch.Tensor, Any, tuple[Any, ...]], None]


class Receiver(UntracedMode):
    """Looks up every storage that an operation touches.

    Args:
        index: live storage identity -> track. Grows as stages are made.
        on_write: called before a write lands, with the track, the destination view, the operator and arguments.
        stage: gives a live track its stage (and repoints the tensors on it); None while a first load is only
            recorded.
    """

    def __init__(
        self,
        index: dict[int, Track],
        on_write: OnWrite,
        stage: Callable[[Track], None] | None,
        on_read: Callable[[Track, torch.Tensor, Any], None] | None = None,
        on_retired: Callable[[Track], errors.WeightlifeError] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.on_retired = on_retired
        self.on_write = on_write
        self.stage = stage
        self.on_read = on_read
        self.error: BaseException | None = None
        self.writes = 0
        self.suspended = False  # a forward pass on A runs from inside the source
        self.trusted = False  # the source is the host's own reader: it never touches the model
        self.lost: BaseException | None = None  # what ended a source that was pulled in another thread
        self.source_seconds = 0.0  # inside the source, over all calls
        self._puller = 0  # the thread that is inside the source now (0: none)

    @property
    def pulling(self) -> bool:
        """Whether the calling thread is inside the source.

        A loader may pull in a thread of its own, ahead of the one that writes: what that one does is not the source's.
        """
        return self._puller == threading.get_ident()

    def _track_of(self, value: Any) -> Track | None:
        """The track of a tensor argument, or None: no tensor, no memory of its own, not the model's."""
        if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
            return None
        return self.index.get(value.untyped_storage()._cdata)

    @staticmethod
    def _on_stage(track: Track, value: torch.Tensor) -> torch.Tensor:
        """The same elements in generation B's memory, if there is one beside A's."""
        if track.stage is None or value.untyped_storage()._cdata == track.stage._cdata:
            return value
        return view_on(track.stage, value.dtype, value.storage_offset(), value.shape, value.stride())

    def prepare(self, value: Any, written: bool, func: Any, args: tuple[Any, ...]) -> Any:
        """A tensor argument, with memory behind it, redirected to generation B where that exists."""
        if isinstance(value, (list, tuple)):
            done = [self.prepare(v, written, func, args) for v in value]
            return type(value)(done) if any(a is not b for a, b in zip(done, value, strict=True)) else value
        track = self._track_of(value)
        if track is None:
            return value
        if track.retired and self.on_retired is not None:
            raise self.on_retired(track)
        if self._puller and self.pulling and (track.placeholder or track.stage is not None):
            raise errors.SessionStateError(
                f"the source reads {track.path} of the model while that is being replaced",
                hint="compute what you send before the update begins (a list, not a generator over live weights)",
            )
        if written and self.stage is not None and not track.placeholder and track.stage is None:
            self.stage(track)
        value = self._on_stage(track, value)
        if written:
            self.writes += 1
            self.on_write(track, value, func, args)
        elif self.on_read is not None:
            self.on_read(track, value, func)
            value = self._on_stage(track, value)  # reading may have made the stage
        return value

    def redirect(self, value: Any, written: bool) -> Any:
        """A tensor argument on generation B, without any entry in the ledger."""
        track = self._track_of(value)
        if track is None:
            return value
        if written and self.stage is not None and not track.placeholder and track.stage is None:
            self._stage_quietly(track)
        return self._on_stage(track, value)

    def _stage_quietly(self, track: Track, copy: bool = False) -> None:
        """Stage from a function mode, where this mode is active: making a stage is no write of the loader's."""
        assert self.stage is not None
        before, self.suspended = self.suspended, True
        try:
            self.stage(track)
            if copy:
                whole = (track.nbytes,)
                view_on(track.current, torch.uint8, 0, whole, (1,)).copy_(
                    view_on(track.storage, torch.uint8, 0, whole, (1,))
                )
        finally:
            self.suspended = before

    def enter(self, value: Any) -> None:
        """A tensor that was written where no mode could see it."""
        track = self._track_of(value)
        if track is not None:
            self.on_write(track, value, None, ())

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose raw memory is asked for: never that of A, and its writes will have to be found."""
        track = self._track_of(tensor)
        if track is None:
            return tensor
        if self.stage is not None and not track.placeholder and track.stage is None:
            # Writes can't be seen: the rest must be A's (in place there is no stage, and nothing changes).
            self._stage_quietly(track, copy=True)
        track.raw = True
        return self._on_stage(track, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = _SIGNATURES.get(id(func))
        signature = signature_of(func) if known is None else known[0]
        if signature.passive or self.suspended:
            return func(*args, **kwargs) if kwargs else func(*args)
        try:
            new = [
                self.prepare(value, position in signature.writes, func, args)
                if isinstance(value, (torch.Tensor, list, tuple))
                else value
                for position, value in enumerate(args)
            ]
            keywords = (
                {
                    name: self.prepare(value, name in signature.keyword_writes, func, args)
                    for name, value in kwargs.items()
                }
                if kwargs
                else {}
            )
        except BaseException as error:
            # What is raised inside a dispatch mode may surface as another type: keep the original.
            self.error = self.error or error
            raise
        out = func(*new, **keywords)
        # An in-place operation returns its argument: give the caller its own object back.
        for position in signature.writes:
            if position < len(args) and out is new[position]:
                return args[position]
        return out

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        begin: Callable[[Any, Any, bool], None],
        between: Callable[[], None],
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The source, item by item. Its own operations are kept out of the mode.

        `begin` sees each name and tensor before the loader does, and whether writes that follow belong to it;
        `between` runs after the loader is done with it. A loader that pulls in a thread of its own writes an earlier
        tensor meanwhile: then no write belongs to a name, and nobody knows when the loader is done with one.
        """
        return self._items(weights, begin, between, threading.get_ident())

    def raise_lost(self) -> None:
        """Raise what ended the source in a thread of the loader's."""
        if self.lost is not None:
            raise self.lost

    def _items(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        begin: Callable[[Any, Any, bool], None],
        between: Callable[[], None],
        home: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        plain = isinstance(weights, (list, tuple))
        source = iter(weights)
        while True:
            here = self._puller = threading.get_ident()
            began = perf_counter()
            try:
                try:
                    item = self._outside(source) if self.trusted and not plain else next(source)
                finally:
                    self.source_seconds += perf_counter() - began
                self._puller = 0
                begin(item[0], item[1], here == home)
            except StopIteration:
                return
            except BaseException as error:
                if here != home:
                    self.lost = (
                        error  # a thread's exception reaches nobody: the call must not end as if all had come
                    )
                raise
            finally:
                self._puller = 0
            yield item
            if here == home:
                between()

    def _outside(self, source: Iterator[Any]) -> Any:
        """`next(source)` with this mode popped: safetensors' own operators are not the ledger's business.

        They would cost 19 us a tensor under the mode.
        """
        depth = torch._C._len_torch_dispatch_stack()
        if depth == 0 or torch._C._get_dispatch_stack_at(depth - 1) is not self:
            return next(source)
        mode = _pop_mode()
        try:
            return next(source)
        finally:
            _push_mode(mode)


def region_of(track: Track, view: torch.Tensor) -> Region | None:
    """The region that a view covers on its track's storage, in elements of the track's dtype.

    None where the view's element size is no multiple of the track's (the storage is then treated as irregular).
    """
    if view.dtype.itemsize == track.dtype.itemsize:
        if view.is_contiguous():  # every expert has an offset of its own: no use in a cache
            numel, offset = view.numel(), int(view.storage_offset())
            return Region(offset, (numel,), (1,)) if numel != 1 else Region(offset, (), ())
        return region(view.storage_offset(), tuple(view.shape), view.stride())
    ratio, rest = divmod(view.dtype.itemsize, track.dtype.itemsize)
    if rest or not ratio:
        size = track.dtype.itemsize
        start, length = int(view.storage_offset()) * view.dtype.itemsize, view.numel() * view.dtype.itemsize
        if view.is_contiguous() and start % size == 0 and length % size == 0:
            return region(start // size, (length // size,), (1,))
        return None
    strides = tuple(stride * ratio for stride in view.stride())
    return region(view.storage_offset() * ratio, (*view.shape, ratio), (*strides, 1))


__all__ = ["Receiver", "Track", "region_of", "signature_of"]
