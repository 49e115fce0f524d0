# SPDX-License-Identifier: Apache-2.0
"""Stored runs on a terminal: the table of loads, one load in full, a comparison, a line a session."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.table import Table
from rich.text import Text

from weightlife.cli.output import OUTCOME_STYLES, emit_json, stderr, stdout, text
from weightlife.errors import clean
from weightlife.report import format_bytes, format_seconds
from weightlife.runs import view
from weightlife.runs.reader import Run, StoredSession
from weightlife.runs.view import Update

__all__ = ["print_problems", "print_run", "print_session"]


def print_run(found: Run, updates: list[Update], compared: list[dict[str, Any]] | None) -> None:
    """All loads, the last that was not good (or complete) in full, and the comparison if there is one."""
    out = stdout()
    if not updates:
        out.print(text(f"No session is stored in {found.path}.", limit=1000))
        out.print(text("next: weightlife doctor, with the variables of the process that loads", "bold"))
    else:
        table = Table(
            "load",
            "result",
            "model",
            "started (UTC)",
            "ranks",
            "received",
            "time",
            box=None,
            padding=(0, 2, 0, 0),
        )
        for update in updates:
            table.add_row(*_row(update))
        out.print(table)
        worth = [u for u in updates if not u.good] or [u for u in updates if u.not_sent] or updates
        shown = worth[-1]
        out.print()
        _print_load(shown)
    for part in compared or ():
        _print_comparison(part)
    if found.older:
        out.print(text(f"{found.older} older sessions are not shown; --last shows more"))
    for problem in found.problems:
        stderr().print(text(problem, "yellow", 500))


def _row(update: Update) -> list[Text]:
    report, outcome = update.first, update.outcome
    ranks = f"{len(update.ranks)}" + (f" of {report.world_size}" if update.missing_ranks else "")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(min(update.start_ns / 1e9, 2**35)))
    return [
        text(f"{update.number} {report.operation}"),
        text(outcome + ", in part" * (update.not_sent > 0), OUTCOME_STYLES.get(outcome, "")),
        text(report.model, limit=40),
        text(started if update.start_ns else ""),
        text(ranks),
        text(f"{update.tensors} tensors, {format_bytes(update.nbytes)}"),
        text(format_seconds(update.seconds)),
    ]


def _print_load(update: Update) -> None:
    """One load in full."""
    out = stdout()
    slowest = max(update.ranks, key=lambda s: s.report.seconds)
    title = Text(f"load {update.number}: ").append_text(
        text(update.outcome, OUTCOME_STYLES.get(update.outcome, ""))
    )
    out.print(title.append(f", {view.result(update)}"))
    out.print(text(f"  {view.headline(slowest)}", limit=500))
    width = max((len(clean(name, 40)) for name, *_ in view.times(slowest)), default=0)
    for name, seconds, calls in view.times(slowest):
        share = 100 * seconds / slowest.report.seconds if slowest.report.seconds > 0 else 0.0
        bar = "#" * round(share / 2.5)
        more = f"  ({calls} calls)" if calls != 1 else ""
        out.print(
            text(f"  {clean(name, 40):<{width}}  {format_seconds(seconds):>7} {share:5.1f} %  {bar}{more}")
        )
    parts = sorted(view.attributed(slowest).items(), key=lambda item: -item[1])[:8]
    if parts:
        spent = ", ".join(f"{clean(name, 60)} {format_seconds(seconds)}" for name, seconds in parts)
        out.print(text(f"  of which  {spent}", limit=1000))
    for note in view.notes(update):
        out.print(text(f"  note: {note}", limit=600))
    for problem in view.problems(update)[:20]:
        out.print(text(f"  {problem.code or 'error'} {problem.message}", "red", 600))
        if problem.layer:
            out.print(text(f"    in {problem.layer}", limit=400))
        if problem.tensors:
            out.print(text(f"    {', '.join(clean(t) for t in problem.tensors[:8])}", limit=1500))
        out.print(text(f"    next: {problem.hint}", "bold", 600))


def _print_comparison(part: dict[str, Any]) -> None:
    from weightlife.cli.page import change

    out = stdout()
    out.print()
    before, after = part["loads"]
    out.print(text(f"{part['operation']} of {part['model']}: {before} loads before, {after} now"))
    for row in part["rows"]:
        if row["before"] is None or row["after"] is None:
            continue
        show = (lambda v: format_bytes(int(v))) if row["unit"] == "By" else format_seconds
        out.print(
            text(
                f"  {clean(row['name'], 40):<20} {show(row['before']):>9} -> {show(row['after']):>9}  {change(row)}"
            )
        )
    for layer in part["layers"]["changed"][:20]:
        out.print(text(f"  {layer['name']}: {layer['before']} -> {layer['after']}", limit=400))


def print_session(session: StoredSession, as_json: bool) -> None:
    """One line: that a session began, or how it ended."""
    if as_json:
        kind = "session" if session.ended else "start"
        document = {
            "schema_version": 1,
            "kind": kind,
            "host": session.host,
            "pid": session.pid,
            "report": session.raw,
        }
        emit_json(document, line=True)
        return
    report = session.report
    if session.ended:
        line = text(report.summary_line(), OUTCOME_STYLES.get(report.outcome, ""), 4000)
    else:
        line = text(
            f"session {report.session_id} {report.operation} {report.model} rank{report.rank}: began "
            f"(opened by {report.opened_by}, {session.host} {session.pid})", "dim", 1000,
        )  # fmt: skip
    stdout().print(line, soft_wrap=True)
    sys.stdout.flush()


def print_problems(problems: list[str]) -> None:
    """Print and empty the list."""
    for problem in problems:
        stderr().print(text(problem, "yellow", 500))
    problems.clear()
