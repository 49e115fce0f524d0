# SPDX-License-Identifier: Apache-2.0
"""A run as a trace for Perfetto and ``chrome://tracing``: the "Trace Event Format", JSON object form.

A process of ours is a process there, a model a thread. Times are microseconds of the epoch, as the format wants them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weightlife.errors import clean
from weightlife.runs import view
from weightlife.runs.reader import StoredSession
from weightlife.runs.view import Update

__all__ = ["trace_events"]


def trace_events(updates: Iterable[Update]) -> dict[str, Any]:
    """Complete events ("X") for sessions and phases, instant events ("i") for problems."""
    events: list[dict[str, Any]] = []
    processes: dict[tuple[str, int, int], int] = {}
    threads: dict[tuple[int, str], int] = {}
    for update in updates:
        for session in update.ranks:
            report = session.report
            key = (session.host, session.pid, report.rank)
            if key not in processes:
                # ids of ours: pids of two machines may be equal
                processes[key] = len(processes) + 1
                name = f"rank {report.rank}, {clean(session.host, 60)} {session.pid}"
                events.append(_named("process_name", processes[key], 0, name))
            pid = processes[key]
            tid = threads.get((pid, report.model))
            if tid is None:
                tid = threads[pid, report.model] = len(threads) + 1
                events.append(_named("thread_name", pid, tid, clean(report.model) or "model"))
            events += _session(update, session, pid, tid)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _session(update: Update, session: StoredSession, pid: int, tid: int) -> Iterable[dict[str, Any]]:
    report, start = session.report, session.start_ns / 1e3
    where = {"pid": pid, "tid": tid}
    yield {
        **where, "ph": "X", "name": clean(f"{report.operation} {report.model}"), "cat": "session",
        "ts": start, "dur": max(0.0, report.seconds * 1e6),
        "args": {
            "load": update.number, "session": clean(report.session_id), "outcome": report.outcome,
            "source": clean(report.source), "opened_by": clean(report.opened_by), "generation": report.generation,
            "tensors": report.tensors_received, "bytes": report.bytes_received, "error": clean(report.error or "", 1000),
        },
    }  # fmt: skip
    for segment in view.segments(session):
        yield {
            **where, "ph": "X", "name": clean(segment.name), "cat": "phase",
            "ts": start + segment.start * 1e6, "dur": max(0.0, segment.seconds * 1e6),
            "args": {"calls": segment.calls, "exact": segment.exact, "error": clean(segment.error, 1000)},
        }  # fmt: skip
    for violation in report.violations:
        yield {
            **where, "ph": "i", "s": "t", "name": clean(f"{violation.code} {violation.message}", 300),
            "cat": "violation", "ts": start + max(0.0, report.seconds * 1e6),
            "args": {"layer": clean(violation.layer), "tensors": [clean(name) for name in violation.tensors[:8]]},
        }  # fmt: skip


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
