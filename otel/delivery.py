# SPDX-License-Identifier: Apache-2.0
"""Telemetry is finished and flushed in a daemon thread: a load waits for it 50 ms at most, and usually 1 or 2.

The SDK's `force_flush` blocks for as long as an exporter does (its time limit is ignored), and a synchronous
processor exports in `span.end()`. Neither may be on the load's path. Not flushing at all would lose the spans of
workers that are killed rather than ended, which is how most of them go.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["BACKLOG", "PATIENCE", "Delivery"]

PATIENCE = 0.05
"""Seconds that one session waits for its spans to be on their way."""
BACKLOG = 64
"""Jobs that may wait behind one that hangs; later ones are dropped and counted."""
_AT_EXIT = 0.5

Job = Callable[[], object]

_log = logging.getLogger("weightlife")


class Delivery:
    """A queue of jobs and the thread that runs them.

    The thread is made at the first job, and again in a forked child. Thread-safe. A job that raises is counted.
    """

    def __init__(self, patience: float = PATIENCE, backlog: int = BACKLOG) -> None:
        self._patience = patience
        self._backlog = backlog
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pid = 0
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._pending = 0
        self._told = False
        self.dropped = 0
        """Jobs given up because too many waited already."""
        self.failed = 0
        """Jobs that raised."""

    def submit(self, job: Job) -> bool:
        """Run `job` soon. False: it was dropped, since an exporter hangs and too many jobs wait behind it."""
        with self._lock:
            if self._pid != os.getpid():
                self._start()
            if self._pending >= self._backlog:
                self.dropped += 1
                first, self._told = not self._told, True
            else:
                self._pending += 1
                self._jobs.put(job)
                return True
        if first:
            _log.warning(
                "traces and metrics are not taken by their exporter in time: some are dropped from now on"
            )
        return False

    def wait(self) -> bool:
        """Wait until all jobs are done, `patience` seconds at most. Whoever finds older work stuck does not wait."""
        return self.drain(self._patience)

    @property
    def pending(self) -> int:
        """Jobs that have not ended."""
        with self._lock:
            return self._pending if self._pid == os.getpid() else 0

    def drain(self, seconds: float) -> bool:
        """Wait until all jobs are done, `seconds` at most. Returns whether they are."""
        deadline = time.monotonic() + seconds
        with self._idle:
            if self._pid != os.getpid():
                return True
            while self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not self._idle.wait(left):
                    return not self._pending
            return True

    def _start(self) -> None:
        first = self._pid == 0
        self._pid = os.getpid()
        self._jobs = queue.SimpleQueue()
        self._pending = 0
        threading.Thread(
            target=self._run, args=(self._jobs,), name="weightlife-telemetry", daemon=True
        ).start()
        if first:
            # Exit handlers run last in, first out: before the SDK's own shutdown, which was registered earlier.
            atexit.register(self.drain, _AT_EXIT)
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        # The thread that may hold the lock does not exist in the child.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._pending = 0

    def _run(self, jobs: queue.SimpleQueue[Job]) -> None:
        while True:
            job = jobs.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - an exporter's or processor's error must not end the thread
                self.failed += 1
                if self.failed == 1:
                    _log.warning(
                        "weightlife: telemetry failed (%s)", type(error).__qualname__, exc_info=error
                    )
            finally:
                del job
                with self._idle:
                    self._pending -= 1
                    if not self._pending:
                        self._idle.notify_all()
