# SPDX-License-Identifier: Apache-2.0
"""What a piece of work costs a process: wall, CPU seconds and page faults from inside, memory from outside."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def measured(out: dict[str, float], collect: bool = True) -> Iterator[None]:
    """Fill `out` with `seconds`, `cpu_seconds` and `faults` of the body."""
    if collect:
        gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    try:
        yield
    finally:
        out["seconds"] = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        out["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        out["faults"] = after.ru_minflt - before.ru_minflt


def trim() -> None:
    """Give memory that the allocator only keeps for later back to the system, where it can (glibc)."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def peak_of() -> Iterator[list[int]]:
    """The highest private memory of this process during the body over the level before it, in bytes, in a list of one."""
    watch, done, out = Watch(os.getpid()), threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.0005):
            watch.sample()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield out
        watch.sample()
    finally:
        done.set()
        thread.join()
        out[0] = watch.over or 0


class Watch:
    """The highest private memory of another process, read from outside so that it costs that process nothing.

    Private means resident and not of a mapped file: the kernel's own peak (VmHWM) counts the pages of a checkpoint
    that is read through a mapping, which drowns the figure. Linux only; elsewhere it knows nothing.
    """

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.level = self.peak = self.read()

    def read(self) -> int | None:
        """Private resident bytes now."""
        with suppress(OSError, ValueError, IndexError):
            _, resident, shared = (int(word) for word in self._file.read_text().split()[:3])
            return (resident - shared) * self._page
        return None

    def sample(self) -> None:
        """Look once."""
        now = self.read()
        if now is not None:
            self.peak = max(self.peak or 0, now)

    @property
    def over(self) -> int | None:
        """The peak over the level at the start, in bytes."""
        return None if self.peak is None or self.level is None else self.peak - self.level
