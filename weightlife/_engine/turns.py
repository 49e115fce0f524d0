# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is on one model: a load call or a pass, one thread at a time.

A lock of `threading` would do, were it not for passes of plain modules. They are entered and left by hooks on the
module's forward, and torch runs no hook when a `BaseException` (Ctrl-C, a timeout's `SystemExit`) ends a forward:
such a pass never leaves. Here it is known by its frame, which runs no more, and loses its turn to whoever waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

from weightlife import errors

# How often a waiting thread looks whether the pass that it waits for is still running. Passes take milliseconds.
LOOK_SECONDS = 0.05


@dataclass(eq=False)
class Pass:
    """A pass that hooks entered: its thread, the frame that runs it, and what is to be undone after it."""

    thread: int
    frame: FrameType
    stack: ExitStack


def _over(frame: FrameType) -> bool:
    """Whether a frame runs no more, whatever its thread does now. Empties one that is kept by a traceback.

    Not by looking for it on the stack of its thread: `sys._current_frames()` stopped a process for good (two threads in
    it, one of them collecting garbage; python/cpython#106883), and another thread's frames die while one walks them.
    """
    try:
        frame.clear()
    except RuntimeError:  # "cannot clear an executing frame"
        return False
    return True


class Turn:
    """A reentrant lock that knows the passes of its holder."""

    def __init__(self) -> None:
        self._free = threading.Condition(threading.Lock())
        self._holder = 0
        self._depth = 0
        self._owner = ""  # the load call that has it, in words
        self._hooked: list[Pass] = []
        self.taken = 0  # how often it went to a thread
        self.passes = 0  # that run now: one inside another, if more than one
        self._pass_thread = 0

    def take(self, patient: bool) -> bool:
        """Whether the calling thread has the turn now. A running pass is waited for, a load only if `patient`."""
        me = threading.get_ident()
        while True:
            if self._hooked:
                self.bury()
            with self._free:
                if self._holder in (0, me):
                    self._holder = me
                    self.taken += self._depth == 0
                    self._depth += 1
                    return True
                if self._owner and not patient:
                    return False
                self._free.wait(LOOK_SECONDS)

    def give_back(self) -> None:
        """The reverse of `take`, by whoever holds the turn."""
        with self._free:
            self._depth -= 1
            if self._depth == 0:
                self._holder = 0
                self._free.notify()

    @contextmanager
    def owned(self, what: str, model: str, session: str) -> Iterator[None]:
        """A load call's turn.

        Args:
            what: the caller, for whoever meets it.
            model: for the error.
            session: the id of the open session, for the error.

        Raises:
            SessionConflictError: another load call is inside now (both are named), or this is called from a pass.
        """
        me = f"{what} in thread {threading.current_thread().name}"
        self.bury()
        if self.in_pass():
            raise errors.SessionConflictError(
                f"{what} was called from inside a pass of the model", model=model, session=session
            )
        # A running pass ends by itself: wait for it. Another load is a second owner.
        if not self.take(patient=False):
            raise errors.SessionConflictError(
                f"{me} met {self._owner or 'another owner'}", model=model, session=session
            )
        before, self._owner = self._owner, me
        try:
            yield
        finally:
            self._owner = before
            self.give_back()

    def in_pass(self) -> bool:
        """Whether the calling thread is inside a pass."""
        return self.passes > 0 and self._pass_thread == threading.get_ident()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass takes the same turn, and waits for a load call that is inside."""
        self.take(patient=True)
        try:
            yield
        finally:
            self.give_back()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The length of the pass itself. Use it inside `passing()`."""
        self.passes += 1
        self._pass_thread = threading.get_ident()
        try:
            yield
        finally:
            self.passes -= 1

    def enter(self, frame: FrameType, stack: ExitStack) -> None:
        """A pass began: `frame` runs it, `stack` holds the turn for it."""
        self._hooked.append(Pass(threading.get_ident(), frame, stack))

    def leave(self) -> None:
        """The last pass of the calling thread ended."""
        self.bury()
        me = threading.get_ident()
        for running in reversed(self._hooked):
            if running.thread == me:
                self._hooked.remove(running)
                running.stack.close()
                return

    def bury(self) -> None:
        """End the passes that died without leaving, the innermost first."""
        for running in reversed(self._hooked):
            if not _over(running.frame):
                continue
            with self._free:
                # The dead pass's own thread may come back at this moment: it has to wait until A or B stands again.
                if running not in self._hooked:
                    continue  # somebody else was faster
                self._hooked.remove(running)
                self._holder = threading.get_ident()
            running.stack.close()


__all__ = ["Pass", "Turn"]
