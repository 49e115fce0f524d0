# SPDX-License-Identifier: Apache-2.0
"""Receiving: a dispatch mode that sees every write of a load, whichever way it is made.

While a loader runs, each operation on a storage that belongs to the model is looked up here. A write is entered in
the ledger under the source name that is current; a write to memory that serves is redirected to its stage (copy on
write). Nothing is buffered: a sender may reuse its buffer for the
next tensor as soon as the loader returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode

from weightlife import errors
from weightlife._engine.signatures import SIGNATURES, signature_of
from weightlife._engine.skeleton import DTYPE_NAMES, view_on
from weightlife._engine.track import Track
from weightlife._engine.untraced import UntracedMode

if TYPE_CHECKING:
    from weightlife._engine.host_copies import HostCopies
    from weightlife._engine.trust import Trust


# What torch's own functions for it call, without the Python round it: twice for each item that runs by rule.
_push, _pop = torch._C._push_on_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack
_length, _at = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_stack_at

_PAIRS = (tuple, list)

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
        self.copies: HostCopies | None = None  # times copies to a device; None: the model is on the host
        self.sent_on = 0  # identity of the storage on which the present source tensor is
        self.odd = False  # the item under way did more than copy its tensor; whoever asks resets it
        self.aside = False  # the mode is off the stack, for items whose writes are known
        self.exhausted = True  # the last source was read to its end
        self._depth = -2  # of the stack below it, once it stepped aside in this call
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
        if not written and value.untyped_storage()._cdata == self.sent_on:
            return value  # the sender's tensor is a view of what serves: its values are A's
        redirected = self._on_stage(track, value)
        if redirected is not value:
            self.odd = (
                True  # by a view of the memory that serves: without this mode it would have been written
            )
        value = redirected
        if written:
            self.writes += 1
            self.on_write(track, value, func, args)
            return value
        self.odd = True
        if self.on_read is not None:
            self.on_read(track, value, func)
            value = self._on_stage(track, value)  # reading may have made the stage
        return value

    def redirect(self, value: Any, written: bool) -> Any:
        """A tensor argument on generation B, without any entry in the ledger."""
        track = self._track_of(value)
        if track is None:
            return value
        if written and self.stage is not None and not track.placeholder and track.stage is None:
            self.stage_quietly(track)
        return self._on_stage(track, value)

    def stage_quietly(self, track: Track, copy: bool = False) -> None:
        """Stage where this mode is active: making a stage is no write of the loader's."""
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
            self.stage_quietly(track, copy=True)
        track.raw = True
        return self._on_stage(track, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = SIGNATURES.get(id(func))
        signature = signature_of(func) if known is None else known[0]
        if signature.passive or self.suspended:
            if signature.replaces:
                self.odd = True
            return func(*args, **kwargs) if kwargs else func(*args)
        if not signature.copies:
            self.odd = True
        elif self.stage is None and not kwargs:
            return self._copy(func, args)
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
        out = func(*new, **keywords) if self.copies is None else self.copies.run(func, new, keywords)
        # An in-place operation returns its argument: give the caller its own object back.
        for position in signature.writes:
            if position < len(args) and out is new[position]:
                return args[position]
        return out

    def _copy(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`copy_` while a first load is only recorded: nothing is redirected. Nine in ten operations of a load."""
        try:
            track = self._track_of(args[0])
            if track is not None:
                self.writes += 1
                self.on_write(track, args[0], func, args)
            track = self._track_of(args[1])
            if track is not None:
                self.odd = True
                if self.on_read is not None:
                    self.on_read(track, args[1], func)
        except BaseException as error:
            self.error = self.error or error
            raise
        return func(*args) if self.copies is None else self.copies.run(func, args, {})

    def stream(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        begin: Callable[[Any, Any, bool], torch.Tensor | None],
        between: Callable[[], None],
        trust: Trust | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The source, item by item. Its own operations are kept out of the mode.

        `begin` sees each name and tensor before the loader does, and whether writes that follow belong to it, and
        returns what the loader gets instead of the tensor (None: the tensor);
        `between` runs after the loader is done with it. A loader that pulls in a thread of its own writes an earlier
        tensor meanwhile: then no write belongs to a name, and nobody knows when the loader is done with one.

        With `trust`, items that have a rule are handed over with the mode off the stack.
        """
        self.exhausted = False
        if trust is not None:
            return self._ruled(weights, begin, between, trust, threading.get_ident())
        return self._items(weights, begin, between, threading.get_ident())

    def raise_lost(self) -> None:
        """Raise what ended the source in a thread of the loader's."""
        if self.lost is not None:
            raise self.lost

    def _items(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        begin: Callable[[Any, Any, bool], torch.Tensor | None],
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
                instead = begin(item[0], item[1], here == home)
            except StopIteration:
                self.exhausted = True
                return
            except BaseException as error:
                if here != home:
                    self.lost = (
                        error  # a thread's exception reaches nobody: the call must not end as if all had come
                    )
                raise
            finally:
                self._puller = 0
            self.odd = False
            yield item if instead is None else (item[0], instead)
            if here == home:
                between()

    def _ruled(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        begin: Callable[[Any, Any, bool], torch.Tensor | None],
        between: Callable[[], None],
        trust: Trust,
        home: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As `_items`, for a source whose items may have rules. What is not by rule goes the same way as there."""
        plain = isinstance(weights, (list, tuple))
        # A list and the host's own reader do nothing with the model. A generator may, and is watched.
        quiet, reader = plain or self.trusted, self.trusted
        source, ident, clock = iter(weights), threading.get_ident, perf_counter
        names, received, ready, seen, index = trust.names, trust.received, trust.ready, trust.seen, self.index
        kinds, pending, simple = DTYPE_NAMES, trust.pending, trust.simple
        self._depth = -2  # another call may have found other modes
        tensors, strided, length, push, pop = torch.Tensor, torch.strided, _length, _push, _pop
        while True:
            if self.aside and ident() != home:
                # The mode can't be put back onto another thread's stack: what that one writes meanwhile is not seen.
                if self.lost is None:
                    self.lost = trust.broken("a loader went on to read its source in another thread", [])
            elif self.aside and not quiet:
                if length() == self._depth:
                    push(self)
                    self.aside = False
                else:
                    self.stand()
            here = self._puller = ident()
            began = clock()
            try:
                item = (
                    next(source)
                    if plain or self.aside or not quiet or here != home
                    else self._outside(source)
                )
            except StopIteration:
                if here == home:
                    self.stand()
                self.exhausted = True
                return
            except BaseException as error:
                if here == home:
                    self.stand()
                if here != home:
                    self.lost = error
                raise
            finally:
                self.source_seconds += clock() - began
                self._puller = 0
            if here == home and type(item) in _PAIRS and len(item) == 2:
                name, tensor = item
                # What `trust.rule` and `trust.take` do, for most of 94,000 tensors, without the calls: 0.7 us each.
                if (
                    simple
                    and type(name) is str
                    and (entry := names.get(name)) is not None
                    and entry.kind in seen
                    and type(tensor) is tensors
                    and tensor.shape == entry.shape
                    and kinds[tensor.dtype] is entry.dtype
                    and tensor.layout is strided
                    and tensor.is_contiguous()
                    and name not in received
                    and (reader or tensor.untyped_storage()._cdata not in index)
                    and len(entry.writes) == 1
                    and ready.get(entry.writes[0][0])
                    and trust.left > 1
                ):
                    if not self.aside:
                        if length() == self._depth + 1:
                            pop(None)
                            self.aside = True
                        elif not self._step_aside():
                            entry = None
                    if entry is not None:
                        trust.left -= 1
                        received[name] = entry
                        pending.append(entry)
                        yield item
                        continue
                entry = trust.rule(name, tensor)
                if entry is not None and (self.aside or self._step_aside()):
                    trust.take(name, entry)
                    yield item
                    if trust.streamer is not None and trust.streamer.ready:
                        self.stand()
                        between()
                    continue
            if here == home:
                self.stand()
            try:
                if here == home:
                    trust.observe(str(item[0]))
                instead = begin(item[0], item[1], here == home)
            except BaseException as error:
                if here != home:
                    self.lost = error
                raise
            self.odd = False
            yield item if instead is None else (item[0], instead)
            if here == home:
                between()

    def _step_aside(self) -> bool:
        """Take the mode off the stack, if it is on top of it. Whether it is off now."""
        depth = _length()
        if depth == 0 or _at(depth - 1) is not self:
            return False
        _pop(None)
        self._depth = depth - 1
        self.aside = True
        return True

    def stand(self) -> None:
        """Be on the stack again, where the mode was: below what was entered meanwhile."""
        if not self.aside:
            return
        self.aside = False
        if _length() == self._depth:
            _push(self)
            return
        above = []
        while _length() > self._depth:
            above.append(_pop_mode())
        _push_mode(self)
        for mode in reversed(above):
            _push_mode(mode)

    def _outside(self, source: Iterator[Any]) -> Any:
        """`next(source)` with this mode popped: safetensors' own operators are not the ledger's business.

        They would cost 19 us a tensor under the mode.
        """
        depth = _length()
        if depth == 0 or _at(depth - 1) is not self:
            return next(source)
        _pop(None)
        try:
            return next(source)
        finally:
            _push(self)


__all__ = ["Receiver"]
