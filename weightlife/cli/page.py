# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file: nothing is fetched, and nothing of a checkpoint can become markup or a script.

Three things see to that. Jinja escapes every value, after control and bidirectional characters were made visible
(``errors.clean``); the layer table travels as JSON without a ``<``, and its script puts values on the page as text; and
the page's own policy allows only the one style sheet and the one script whose digests it names.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from weightlife._version import __version__
from weightlife.errors import clean
from weightlife.report import format_bytes, format_seconds
from weightlife.runs import view
from weightlife.runs.reader import Run, StoredSession
from weightlife.runs.view import Update

__all__ = ["MAX_ROWS", "render"]

MAX_ROWS = 400_000
"""Rows of layer tables in one page. 100,000 take 9 MB and a second of a browser's time; older loads are left out."""
_LANES = 64
_PROBLEMS = 50
_CHANGES = 100
_NAME = 300
_LETTERS = "PRVHQAMCB"
_OTHER = len(_LETTERS)


def render(run: Run, updates: list[Update], baseline: tuple[Run, list[Update]] | None = None) -> str:
    """The page. ``baseline`` is the run to compare with, and its loads."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
    )
    style, script = _template("report.css"), _template("report.js")
    layers = _layers(updates)
    longest = max((u.seconds for u in updates), default=0.0)
    loads = [_load(u, longest, layers["sessions"]) for u in updates]
    opened = (
        [load for load in loads if load["problems"]] or [load for load in loads if load["in_part"]] or loads
    )
    for load in opened[-1:]:
        load["open"] = True
    return environment.get_template("report.html").render(
        title=run.path.name,
        path=str(run.path),
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M UTC}",
        version=__version__,
        verdict=_verdict(updates),
        # not escaped: both are files of this package, and a digest of what is escaped would not fit
        style=Markup(style),
        script=Markup(script),
        style_hash=Markup(_digest(style)),
        script_hash=Markup(_digest(script)),
        loads=loads,
        problem_count=sum(len(load["problems"]) + load["more_problems"] for load in loads),
        layers=layers if layers["labels"] else None,
        comparison=None if baseline is None else _comparison(view.compare(updates, baseline[1])),
        compared_with="" if baseline is None else str(baseline[0].path),
        older=run.older,
        files=run.files,
        file_problems=run.problems,
    )


def _template(name: str) -> str:
    return resources.files("weightlife.cli").joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _visible(value: object) -> object:
    """Every value that is put on the page: text on one line, with what can't be seen made visible."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else clean(value, 2000)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verdict(updates: list[Update]) -> str:
    if not updates:
        return "No session is stored here."
    bad = [u for u in updates if not u.good]
    text = f"{len(updates)} load{'s' if len(updates) != 1 else ''}, "
    text += "all of them good." if not bad else f"{len(bad)} not as it should be."
    part = sum(u.not_sent > 0 for u in updates)
    text += f" {part} left some of the old weights in place." if part else ""
    last: dict[str, Update] = {u.first.model: u for u in updates}
    # the newest three: what serves now is the question, and drafts are models too
    for model, update in list(last.items())[-3:]:
        text += (
            f" The last one of {clean(model, 80) or 'the model'}: {update.outcome}, {view.result(update)}."
        )
    return text


def _style(phase: str) -> dict[str, Any]:
    names = list(view.PHASES)
    index = names.index(phase) if phase in names else _OTHER
    return {"index": index, "letter": _LETTERS[index] if index < _OTHER else "\u00b7"}


def _load(update: Update, longest: float, sessions: dict[int, int]) -> dict[str, Any]:
    report, slowest = update.first, max(update.ranks, key=lambda s: s.report.seconds)
    found = view.problems(update)
    lanes, total = _lanes(update)
    changes = [
        (c.get("path", ""), c.get("kind", ""), c) for s in update.ranks for c in s.report.contract_changes
    ]
    return {
        "number": update.number,
        "operation": operation(report.operation),
        "model": clean(report.model, 120) or "a model",
        "outcome": update.outcome,
        "in_part": update.not_sent > 0,
        "result": view.result(update),
        "started": _date(update.start_ns),
        "ranks": update.ranks,
        "world": report.world_size,
        "missing": update.missing_ranks,
        "tensors": update.tensors,
        "size": format_bytes(update.nbytes),
        "rate": view.rate(update.nbytes, update.seconds),
        "time": format_seconds(update.seconds) if slowest.ended else "?",
        "share": round(_percent(update.seconds, longest), 1),
        "headline": view.headline(slowest),
        "open": False,
        "lanes": lanes,
        "more_lanes": max(0, len(update.ranks) - _LANES),
        "exact": all(s.spans or not s.report.phases for s in update.ranks),
        "ticks": [format_seconds(total * part / 4) for part in (1, 2, 3, 4)] if total > 0 else [],
        "phases": _phases(update),
        "attributed": [
            {"name": clean(name, 120), "time": format_seconds(seconds)}
            for name, seconds in sorted(view.attributed(slowest).items(), key=lambda item: -item[1])
        ],
        "slow_layers": [
            {"name": clean(name, _NAME), "time": format_seconds(seconds)}
            for name, seconds in sorted(view.layer_seconds(slowest).items(), key=lambda item: -item[1])[:10]
        ],
        "facts": _facts(update),
        "layers": f"{report.layers_touched} written, {report.layers_untouched} not ("
        + ", ".join(f"{count} {clean(name)}" for name, count in sorted(report.layers_by_strategy.items())) + ")",
        "layer_session": sessions.get(id(update.ranks[0])),
        "problems": found[:_PROBLEMS],
        "more_problems": max(0, len(found) - _PROBLEMS),
        "changes": [{"path": path, "kind": kind, "detail": _rest(more)} for path, kind, more in changes[:_CHANGES]],
        "change_count": len(changes),
        "notes": view.notes(update),
    }  # fmt: skip


def _lanes(update: Update) -> tuple[list[dict[str, Any]], float]:
    """One lane a rank, on one scale, and the scale's length in seconds."""
    placed = []
    for session in update.ranks[:_LANES]:
        offset = (session.start_ns - update.start_ns) / 1e9
        placed.append((session, [(offset + s.start, s) for s in view.segments(session)]))
    total = max([update.seconds, *(at + s.seconds for _, found in placed for at, s in found)])
    lanes = []
    for session, found in placed:
        drawn = []
        for at, s in found:
            # at least a third of a percent: what is there can be seen and pointed at
            width = min(max(_percent(s.seconds, total), 0.3), 100.0)
            x = min(max(0.0, _percent(at, total)), 100.0 - width)
            words = f"{clean(s.name, 80)}: {format_seconds(s.seconds)}, from {format_seconds(max(0.0, at))}"
            words += f", {s.calls} calls" if s.calls > 1 else ""
            words += f", failed: {clean(s.error, 200)}" if s.error else ""
            drawn.append({"x": f"{x:.3f}", "width": f"{width:.3f}", "middle": f"{x + width / 2:.3f}",
                          "lettered": width > 4, "words": words, "style": _style(s.name)})  # fmt: skip
        spoken = ", ".join(f"{clean(n, 40)} {format_seconds(t)}" for n, t, _ in view.times(session))
        lanes.append(
            {
                "rank": session.report.rank,
                "time": format_seconds(session.report.seconds) if session.ended else "not ended",
                "segments": drawn,
                "words": f"rank {session.report.rank}: {spoken or 'no phases stored'}",
            }
        )
    return lanes, total


def _phases(update: Update) -> list[dict[str, Any]]:
    by_name: dict[str, list[tuple[float, int]]] = {}
    for session in update.ranks:
        for name, seconds, calls in view.times(session):
            by_name.setdefault(name, []).append((seconds, calls))
    total = max(s.report.seconds for s in update.ranks)
    return [
        {
            "name": clean(name, 80),
            "what": view.PHASES.get(name, ""),
            "style": _style(name),
            "time": format_seconds(max(found)[0]),
            "share": round(_percent(max(found)[0], total), 1),
            "fastest": format_seconds(min(found)[0]),
            "calls": max(calls for _, calls in found),
        }
        for name, found in by_name.items()
    ]


def _facts(update: Update) -> list[tuple[str, str]]:
    report = update.first
    copied = [s.raw.get("bytes_copied") for s in update.ranks]
    trace = report_field(update.ranks[0], "trace_id")
    rows = [
        ("session", report.session_id),
        ("update", report.update_id if report.world_size > 1 else ""),
        ("source", report.source),
        ("opened by", report.opened_by),
        ("weights", f"generation {report.generation}"),
        ("received", f"{update.tensors} tensors, {format_bytes(update.nbytes)}"),
        ("copied back", format_bytes(sum(c for c in copied if isinstance(c, int))) if any(copied) else ""),
        ("isolation", _because(report.isolation, report.isolation_why)),
        ("storage", _because(report.storage, report.storage_why)),
        ("peak memory", format_bytes(report.peak_bytes) if report.peak_bytes is not None else ""),
        ("trace", trace),
        ("processes", ", ".join(f"{clean(s.host, 60)} {s.pid}" for s in update.ranks[:16])),
        ("versions", ", ".join(f"{clean(k)} {clean(v)}" for k, v in report.versions.items())),
    ]
    return [(name, text) for name, text in rows if text]


def report_field(session: StoredSession, key: str) -> str:
    """A text of the stored report that this version may not know."""
    value = session.raw.get(key)
    return value if isinstance(value, str) else ""


def _layers(updates: list[Update]) -> dict[str, Any]:
    """Layer tables of each load's lowest rank, newest first until ``MAX_ROWS``; equal tables and texts once."""
    strings: dict[str, int] = {}
    tables: dict[tuple[tuple[int, ...], ...], int] = {}
    picked: list[tuple[Update, StoredSession]] = []
    count, skipped = 0, 0
    for update in reversed(updates):
        session = update.ranks[0]
        if not session.report.layers:
            continue
        count += len(session.report.layers)
        if count > MAX_ROWS and picked:
            skipped += 1
            continue
        picked.append((update, session))
    sessions: list[dict[str, Any]] = []
    labels: list[str] = []
    places: dict[int, int] = {}
    for update, session in reversed(picked):
        places[id(session)] = len(sessions)
        labels.append(
            f"{update.number} {operation(update.first.operation)} of {clean(update.first.model, 60)}, {update.outcome}"
        )
        sessions.append(_layer_session(session, strings, tables))
    data = {"strings": list(strings), "sessions": sessions,
            "tables": [dict(zip(("names", "strategies", "reasons"), t, strict=True)) for t in tables]}  # fmt: skip
    cut = sum(s.left_out.get("layers", 0) for _, s in picked)
    left_out = [f"The tables of {skipped} older loads are left out."] if skipped else []
    left_out += [f"{cut} layers were too many for the stored records."] if cut else []
    return {
        "sessions": places,
        "labels": labels,
        "first": [
            {"name": clean(layer.name, _NAME), "strategy": layer.strategy, "reason": layer.reason,
             "written": "written" if layer.touched else "not written"}
            for layer in (picked[0][1].report.layers[:100] if picked else ())
        ],
        "left_out": " ".join(left_out),
        "json": _script_json(data),
    }  # fmt: skip


def _layer_session(
    session: StoredSession, strings: dict[str, int], tables: dict[tuple[tuple[int, ...], ...], int]
) -> dict[str, Any]:
    def number(text: str) -> int:
        return strings.setdefault(clean(text, _NAME), len(strings))

    layers, spent = session.report.layers, view.layer_seconds(session)
    columns = tuple(
        tuple(number(text) for text in column)
        for column in zip(*((layer.name, layer.strategy, layer.reason) for layer in layers), strict=True)
    )
    return {
        "table": tables.setdefault(columns, len(tables)),
        "untouched": [order for order, layer in enumerate(layers) if not layer.touched],
        "seconds": [(order, spent[layer.name]) for order, layer in enumerate(layers) if layer.name in spent],
    }


def _script_json(data: object) -> Markup:
    """JSON that can't end the element it stands in, whatever its texts hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _comparison(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for part in parts:
        before, after = part["loads"]
        outcomes = [
            ", ".join(f"{n} {o}" for o, n in sorted(side.items())) or "none" for side in part["outcomes"]
        ]
        words = f"Loads before: {outcomes[0]}. Now: {outcomes[1]}."
        fresh = [code for code in part["problems"][1] if code not in part["problems"][0]]
        gone = [code for code in part["problems"][0] if code not in part["problems"][1]]
        words += f" New problems: {', '.join(fresh)}." if fresh else ""
        words += f" No longer there: {', '.join(gone)}." if gone and after else ""
        rows = [{**row, "before": _figure(row, "before"), "after": _figure(row, "after"), "change": change(row)}
                for row in part["rows"]]  # fmt: skip
        out.append(
            {
                **part,
                "operation": operation(part["operation"]),
                "words": words,
                "rows": rows if before and after else [],
            }
        )
    return out


def _figure(row: dict[str, Any], side: str) -> str:
    value = row[side]
    if value is None:
        return "none"
    return format_bytes(int(value)) if row["unit"] == "By" else format_seconds(value)


def change(row: dict[str, Any]) -> str:
    """How a figure moved, in words; below five percent is noise of a single run."""
    ratio = row["ratio"]
    if ratio is None or ratio <= 0:
        return ""
    if 0.95 <= ratio <= 1.05:
        return "about equal"
    up, down = ("more", "less") if row["unit"] == "By" else ("slower", "faster")
    return f"\u25b2 {ratio:.2f} times, {up}" if ratio > 1 else f"\u25bc {ratio:.2f} times, {down}"


def operation(name: str) -> str:
    """An operation in words."""
    return name.replace("_", " ")


def _because(what: str, why: str) -> str:
    return f"{clean(what)} ({clean(why, 300)})" if what and why else clean(what)


def _rest(record: dict[str, Any]) -> str:
    known = record.get("detail")
    more = [f"{key}={value}" for key, value in record.items() if key not in ("path", "kind", "detail")]
    return clean(", ".join([*([str(known)] if known else []), *more]), 500)


def _percent(part: float, whole: float) -> float:
    return min(100.0, max(0.0, 100 * part / whole)) if whole > 0 else 0.0


def _date(nanoseconds: int) -> str:
    if not nanoseconds:
        return ""
    try:
        return f"{datetime.fromtimestamp(nanoseconds / 1e9, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return ""
