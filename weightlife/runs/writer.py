# SPDX-License-Identifier: Apache-2.0
"""Keeps sessions in files: a listener of the bus, a bounded queue, and one daemon thread that writes.

Nothing here may fail or hold up a load. The listener puts plain references into the queue; encoding and writing happen
in the thread. At the end of a session the listener waits for ``PATIENCE`` at most (measured on two busy cores:
0.2 ms without layers, 3.6 ms with 600), so that a worker that is killed right after an update has left its record; a directory that hangs costs that much and no more. What was dropped is counted and
said once.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightlife._engine import events
from weightlife._version import __version__
from weightlife.errors import clean
from weightlife.runs import MANIFESTS, MAX_FILE_BYTES, MAX_LINE_BYTES, SCHEMA_VERSION, SESSIONS, TRACES
from weightlife.runs.trace import SessionTrace

if TYPE_CHECKING:
    from weightlife._engine.events import Bus, Event
    from weightlife.report import LoadReport

__all__ = ["PATIENCE", "QUEUE", "RunWriter", "keep", "status"]

PATIENCE = 0.05
"""Seconds that the end of a session waits for its record to be written."""
QUEUE = 96
"""Records that may wait; a session brings three, and a model keeps its last 32 reports in any case."""
SLOW_LAYERS = 20
"""Layers whose processing time is kept with a session, the slowest first."""

_START = ("model", "operation", "source", "opened_by", "rank", "world_size", "started_at")
_MAX_OPEN = 64
_FAREWELL = 2.0
_log = logging.getLogger("weightlife")


@dataclass
class _File:
    """One open file; ``torn`` after a write that was cut short."""

    path: Path
    descriptor: int
    size: int = 0
    torn: bool = False


@dataclass
class _State:
    """All that belongs to one process: made anew after a fork."""

    pid: int
    stem: str
    waiting: deque[Callable[[], tuple[str, int, dict[str, Any]] | None]] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    busy: bool = False
    thread: threading.Thread | None = None
    stopping: bool = False
    files: dict[tuple[str, int], _File] = field(default_factory=dict)
    open: OrderedDict[str, SessionTrace] = field(default_factory=OrderedDict)
    taught: dict[str, Callable[[], Any]] = field(default_factory=dict)  # session -> makes its manifest


class RunWriter:
    """Appends what the events of a bus say to files below ``folder``. Thread-safe; safe over a fork.

    ``status()`` tells what was written, dropped and refused. Never raises into the bus on a failing file system.
    """

    def __init__(self, folder: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES) -> None:
        # absolute: a process may change its directory later
        self.folder = Path(folder).absolute()
        self.max_file_bytes = max_file_bytes
        self.written = 0
        self.dropped = 0
        self.error = ""
        self._slow = False
        self._state = self._fresh()

    @staticmethod
    def _fresh() -> _State:
        host = re.sub(r"[^A-Za-z0-9]+", "-", socket.gethostname())[:40].strip("-") or "host"
        now = datetime.now(timezone.utc)
        # the random part: a pid comes back within a second where containers start, and nobody can lay a link there
        return _State(os.getpid(), f"{now:%Y%m%dT%H%M%SZ}-{host}-{os.getpid()}-{os.urandom(3).hex()}")

    def subscribe(self, bus: Bus = events.bus) -> Callable[[], None]:
        """Listen to ``bus``; returns the function that ends it and closes the files."""
        stop = bus.subscribe(self)
        atexit.register(self.close)

        def end() -> None:
            stop()
            self.close()
            atexit.unregister(self.close)

        return end

    def status(self) -> dict[str, Any]:
        """Plain data for ``weightlife.status()``."""
        return {
            "folder": str(self.folder),
            "written": self.written,
            "dropped": self.dropped,
            "error": self.error or None,
        }

    def flush(self, timeout: float = _FAREWELL) -> bool:
        """Wait until everything is written, or ``timeout`` seconds; whether it is."""
        state = self._state
        with state.changed:
            return state.changed.wait_for(lambda: not state.waiting and not state.busy, timeout)

    def close(self) -> None:
        """Write what waits, within two seconds, and close the files. A later event opens new ones."""
        state = self._state
        if state.pid != os.getpid():
            return
        self.flush()
        with state.changed:
            state.stopping = True
            state.changed.notify_all()
            thread = state.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)
        if thread is None or not thread.is_alive():
            for file in state.files.values():
                os.close(file.descriptor)
        self._state = self._fresh()

    # -- in the thread of the load -----------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        """Take one event of the bus."""
        if self._state.pid != os.getpid():
            self._state = self._fresh()
        state, report = self._state, event.data.get("report")
        if event.name == events.SESSION_START:
            with state.changed:
                # all that waited is written: what was slow was a long record, not a directory that hangs
                self._slow = self._slow and bool(state.waiting or state.busy)
                state.open[event.session_id] = SessionTrace.begun(event)
                while len(state.open) > _MAX_OPEN:
                    state.open.popitem(last=False)
            head = {key: _value(event.data, report, key) for key in _START}
            self._put(lambda: self._start_record(event, head))
        elif event.name == events.SESSION_END and report is not None:
            with state.changed:
                seen = state.open.pop(event.session_id, None)
            self._put(lambda: self._session_record(event, report, seen))  # type: ignore[arg-type]
            if seen is not None:
                self._put(lambda: self._trace_record(event, report, seen))  # type: ignore[arg-type]
            make = state.taught.pop(event.session_id, None)
            if make is not None:  # last: it may be 11 MB, and the record of the session is wanted more
                self._put(lambda: self._keep_manifest(state, report, make))  # type: ignore[arg-type]
            # where the last wait was in vain and is not over yet, none is made: a directory that hangs costs once
            self._slow = not self.flush(0 if self._slow else PATIENCE)
        elif event.name == events.MANIFEST:
            state.taught[event.session_id] = event.data["make"]  # type: ignore[assignment]
        elif event.session_id in state.open:
            with state.changed:
                seen = state.open.get(event.session_id)
                if seen is not None:
                    seen.take(event)

    def _put(self, make: Callable[[], tuple[str, int, dict[str, Any]] | None]) -> None:
        state = self._state
        with state.changed:
            if len(state.waiting) >= QUEUE:
                self._drop("the directory is too slow")
                return
            state.waiting.append(make)
            if state.thread is None:
                state.thread = threading.Thread(
                    target=self._work, args=(state,), name="weightlife-runs", daemon=True
                )
                state.thread.start()
            state.changed.notify_all()

    # -- in the thread that writes -----------------------------------------------------------------------------

    def _work(self, state: _State) -> None:
        while True:
            with state.changed:
                state.changed.wait_for(lambda: state.waiting or state.stopping)
                if not state.waiting:
                    return
                make = state.waiting.popleft()
                state.busy = True
            try:
                record = make()
                if record is not None:
                    self._append(state, *record)
            except Exception as error:  # noqa: BLE001 - a full or vanished disk must not end the thread
                self._drop(f"{type(error).__name__}: {error}")
            finally:
                with state.changed:
                    state.busy = False
                    state.changed.notify_all()

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if not self.error:
            _log.warning("weightlife: sessions are not kept in %s (%s)", clean(self.folder), clean(why, 300))
        self.error = clean(why, 300)

    def _append(self, state: _State, kind: str, rank: int, record: dict[str, Any]) -> None:
        data = _line(record)
        if len(data) > MAX_LINE_BYTES and kind == SESSIONS:
            data = _line(_fitting(record, len(data)))
        file = state.files.get((kind, rank))
        if file is None:
            file = state.files[kind, rank] = self._open(self.folder / f"{state.stem}.rank{rank}.{kind}.jsonl")
        elif file.size and file.size + len(data) > self.max_file_bytes:
            os.close(file.descriptor)
            del state.files[kind, rank]
            file.path.replace(file.path.with_suffix(f".old{file.path.suffix}"))
            file = state.files[kind, rank] = self._open(file.path)
        if file.torn:
            data = b"\n" + data  # the torn line stays alone, and readers skip it
        # One write for one line: nobody who reads at the same time sees two records mixed.
        count = os.write(file.descriptor, data)
        file.size += count
        file.torn = count != len(data)
        if file.torn:
            raise OSError("a record was cut short: is the disk full?")
        self.written += 1

    def _open(self, path: Path) -> _File:
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return _File(path, os.open(path, flags, 0o666))

    def _keep_manifest(self, state: _State, report: LoadReport, make: Callable[[], Any]) -> None:
        """One file a model and rank; a later manifest takes the place of a former one."""
        model = re.sub(r"[^A-Za-z0-9_]+", "-", report.model)[:60]
        self.folder.mkdir(parents=True, exist_ok=True)
        make().save(self.folder / f"{state.stem}.rank{_rank(report.rank)}.{model}.{MANIFESTS}")
        self.written += 1

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": kind,
            "weightlife": __version__,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written_at": time.time(),
        }

    def _start_record(self, event: Event, head: dict[str, Any]) -> tuple[str, int, dict[str, Any]]:
        plain = {
            key: value if isinstance(value, int) else clean(value, 1000)
            for key, value in head.items()
            if value is not None
        }
        record = {**self._head("start"), "session_id": event.session_id, "wall_ns": event.wall_ns, **plain}
        return SESSIONS, _rank(head.get("rank")), record

    def _session_record(
        self, event: Event, report: LoadReport, seen: SessionTrace | None
    ) -> tuple[str, int, dict[str, Any]]:
        record = {**self._head("session"), "wall_ns": event.wall_ns, "report": report.to_dict()}
        if seen is not None and seen.layer_seconds:
            slowest = sorted(seen.layer_seconds.items(), key=lambda item: item[1], reverse=True)
            record["slow_layers"] = [{"layer": name, "seconds": s} for name, s in slowest[:SLOW_LAYERS]]
        return SESSIONS, _rank(report.rank), record

    def _trace_record(
        self, event: Event, report: LoadReport, seen: SessionTrace
    ) -> tuple[str, int, dict[str, Any]]:
        resource = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or "weightlife",
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
        return TRACES, _rank(report.rank), seen.encode(event, report, resource, __version__)


_current: tuple[RunWriter, Callable[[], None]] | None = None
_lock = threading.Lock()


def keep(folder: str | None) -> None:
    """Keep this process's sessions in ``folder`` from now on; None: no longer. One directory a process."""
    global _current
    with _lock:
        if _current is not None:
            if folder is not None and _current[0].folder == Path(folder).absolute():
                return
            _current[1]()
            _current = None
        if folder is not None:
            writer = RunWriter(folder)
            _current = (writer, writer.subscribe())


def status() -> dict[str, Any] | None:
    """What ``keep`` set up: folder, records written and dropped, the last error. None: nothing is kept."""
    return None if _current is None else _current[0].status()


def _line(record: dict[str, Any]) -> bytes:
    # ASCII: no character of a name can end the line or upset a reader's decoder
    return (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode("ascii")


def _fitting(record: dict[str, Any], size: int) -> dict[str, Any]:
    """The record within ``MAX_LINE_BYTES``: lists that grow with the model lose their tail, counted in ``left_out``."""
    report, left_out = record["report"], {}
    for name in ("layers", "contract_changes", "violations", "notes"):
        items = report.get(name)
        if size <= MAX_LINE_BYTES or not items:
            continue
        here = len(_line(items))
        # an even share a piece is a guess: a tenth more goes, so that one round is enough
        keep = max(0, int(len(items) * (here - (size - MAX_LINE_BYTES)) / here * 0.9))
        left_out[name] = len(items) - keep
        report[name] = items[:keep]
        size -= here - len(_line(report[name]))
    record["left_out"] = left_out
    return record


def _value(data: Any, report: Any, key: str) -> Any:
    return data[key] if key in data else getattr(report, key, None)


def _rank(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**6 else 0
