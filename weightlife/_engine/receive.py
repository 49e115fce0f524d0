# SPDX-License-Identifier: Apache-2.0
"""Receiving: sees every write of a load, whichever way it is made.

While a loader runs, each operation on a storage that belongs to the model is looked up here. A write is entered in
the ledger under the source name that is current; a write to memory that serves is redirected to its stage (copy on
write). Nothing is buffered: a sender may reuse its buffer for the
next tensor as soon as the loader returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from weightlife import errors
from weightlife._engine import streams
from weightlife._engine.signatures import SIGNATURES, signature_of
from weightlife._engine.skeleton import view_on
from weightlife._engine.track import Track
from weightlife._engine.watching import Watch, dispatches

if TYPE_CHECKING:
    from weightlife._engine.host_copies import HostCopies
    from weightlife._engine.trust import Trust

_PLAIN = (torch.Tensor, torch.nn.Parameter)

OnWrite = Callable[[Track, torch.Tensor, Any, tuple[Any, ...]], None]


class Receiver(Watch):
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
        super().__init__()
        self.index = index
        self.on_retired = on_retired
        self.on_write = on_write
        self.stage = stage
        self.on_copy = self._copy if stage is None else None
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
        self.wrapped = False  # a tensor came by whose class has a dispatch of its own
        self.exhausted = True  # the last source was read to its end
        self.after: Callable[[], None] | None = None  # called when it is, by `items`
        self.puller = 0  # the thread that is inside the source now (0: none)

    @property
    def pulling(self) -> bool:
        """Whether the calling thread is inside the source.

        A loader may pull in a thread of its own, ahead of the one that writes: what that one does is not the source's.
        """
        return self.puller == threading.get_ident()

    def _track_of(self, value: Any) -> Track | None:
        """The track of a tensor argument, or None: no tensor, no memory of its own, not the model's."""
        if not isinstance(value, torch.Tensor) or value.is_meta or value.layout is not torch.strided:
            return None
        return self.index.get(value.untyped_storage()._cdata)

    @staticmethod
    def _on_stage(track: Track, value: torch.Tensor) -> torch.Tensor:
        """The same elements in generation B's memory, if there is one beside A's or beside what stood there first."""
        if track.stage is None and not track.moved:
            return value
        current = track.current
        if value.untyped_storage()._cdata == current._cdata:
            return value
        return view_on(current, value.dtype, value.storage_offset(), value.shape, value.stride())

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
        if self.puller and self.pulling and (track.placeholder or track.stage is not None):
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

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """What is done inside is our own, and no write of the loader's."""
        before, self.suspended = self.suspended, True
        try:
            yield
        finally:
            self.suspended = before

    def stage_quietly(self, track: Track, copy: bool = False) -> None:
        """Stage where this mode is active: making a stage is no write of the loader's."""
        assert self.stage is not None
        with self.quietly():
            self.stage(track)
            if copy:
                whole = (track.nbytes,)
                view_on(track.current, torch.uint8, 0, whole, (1,)).copy_(
                    view_on(track.storage, torch.uint8, 0, whole, (1,))
                )

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
        if types and not self.wrapped:
            self.wrapped = any(dispatches(cls) for cls in types)
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
            index, to, given = self.index, args[0], args[1]
            plain = type(to) in _PLAIN and to.layout is torch.strided
            track = index.get(to.untyped_storage()._cdata) if plain else self._track_of(to)
            if track is not None:
                self.writes += 1
                self.on_write(track, to, func, args)
            plain = type(given) in _PLAIN and given.layout is torch.strided
            track = index.get(given.untyped_storage()._cdata) if plain else self._track_of(given)
            if track is not None:
                self.odd = True
                if self.on_read is not None:
                    self.on_read(track, given, func)
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
        home = threading.get_ident()
        if trust is not None:
            return streams.ruled(self, weights, begin, between, trust, home)
        return streams.items(self, weights, begin, between, home)

    def raise_lost(self) -> None:
        """Raise what ended the source in a thread of the loader's."""
        if self.lost is not None:
            raise self.lost


__all__ = ["Receiver"]
