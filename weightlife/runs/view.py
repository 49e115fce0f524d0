# SPDX-License-Identifier: Apache-2.0
"""What a run means: sessions of several ranks put together, where their time went, what changed between two runs.

Plain data for the terminal, the page and ``--json``. Fields of a report that this version may not know (attributed
time, seconds of a layer) are read from the stored record, and may be absent.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightlife import errors
from weightlife.report import LoadReport, format_bytes, format_seconds
from weightlife.runs.reader import Run, StoredSession

__all__ = [
    "PHASES", "RESULTS", "Problem", "Segment", "Update", "compare", "headline", "layer_seconds", "notes", "problems",
    "rate", "result", "segments", "times", "to_dict", "updates",
]  # fmt: skip

PHASES = {
    "prepare": "bring the model into the form that loaders write",
    "receive": "take tensors from the source and run the host's loaders; between calls, wait for the sender",
    "validate": "check that what arrived is complete and correct; wait for other ranks",
    "process": "the host's own processing of a first load",
    "process_quant": "processing of quantised and repacked layers",
    "process_attention": "processing of attention layers",
    "process_model": "the model's own hook",
    "copy_back": "put the new values into the memory that the engine reads",
    "abort": "put the old weights back",
}
"""What happens in each phase."""

RESULTS = {
    "committed": "the new weights serve",
    "aborted": "the old weights serve, unchanged",
    "refused": "the old weights serve; nothing was touched",
    "poisoned": "NOTHING SERVES until a complete update commits",
    "observed": "the host's own path ran; weightlife changed nothing",
    "open": "no end was stored: it is running, or its process died in it",
}
# the worst first: what an update of several ranks is called when they differ
_ORDER = ("poisoned", "aborted", "refused", "open", "observed", "committed")
_LAYERS_COMPARED = 500


@dataclass
class Segment:
    """A piece of time on one rank, in seconds from the session's start. ``exact`` is False where the place is guessed."""

    name: str
    start: float
    seconds: float
    calls: int = 1
    error: str = ""
    exact: bool = True


@dataclass
class Update:
    """One load as all ranks saw it, lowest rank first."""

    number: int
    ranks: list[StoredSession] = field(default_factory=list)

    @property
    def first(self) -> LoadReport:
        """The report of the lowest rank."""
        return self.ranks[0].report

    @property
    def outcome(self) -> str:
        """The worst outcome of its ranks."""
        return min((s.report.outcome for s in self.ranks), key=_ORDER.index)

    @property
    def good(self) -> bool:
        """Whether every rank ended as it should."""
        return self.outcome in ("committed", "observed") and not any(s.report.error for s in self.ranks)

    @property
    def not_sent(self) -> int:
        """Tensors of a complete load that this one left out, on the rank that lacked most."""
        return max(s.report.tensors_not_sent for s in self.ranks) if self.outcome == "committed" else 0

    @property
    def start_ns(self) -> int:
        """When the first rank began."""
        return min(s.start_ns for s in self.ranks)

    @property
    def seconds(self) -> float:
        """From the first rank's start to the last rank's end."""
        return max(0.0, (max(s.end_ns for s in self.ranks) - self.start_ns) / 1e9)

    @property
    def tensors(self) -> int:
        """Tensors received by all ranks."""
        return sum(s.report.tensors_received for s in self.ranks)

    @property
    def nbytes(self) -> int:
        """Bytes received by all ranks."""
        return sum(s.report.bytes_received for s in self.ranks)

    @property
    def missing_ranks(self) -> int:
        """Ranks of which nothing is stored."""
        return max(0, self.first.world_size - len(self.ranks))


@dataclass
class Problem:
    """Something that was not as it must be, in words, with the next step."""

    code: str
    title: str
    message: str
    layer: str = ""
    tensors: list[str] = field(default_factory=list)
    hint: str = ""
    ranks: list[int] = field(default_factory=list)


def updates(run: Run) -> list[Update]:
    """Sessions of several ranks that are one load: of one update, as they voted, with the same model and operation.

    Where one has not voted (a first load, a failure before it), overlapping in time decides. Clocks of several machines
    differ: within two seconds counts as overlapping.
    """
    found: list[Update] = []
    for session in sorted(run.sessions, key=lambda s: (s.start_ns, s.report.rank)):
        report = session.report
        for update in reversed(found[-64:]):
            first = update.first
            if (
                (report.model, report.operation, report.world_size)
                == (first.model, first.operation, first.world_size)
                and report.world_size > 1
                and all(report.rank != s.report.rank for s in update.ranks)
                and _together(session, update)
            ):
                update.ranks = sorted([*update.ranks, session], key=lambda s: s.report.rank)
                break
        else:
            found.append(Update(len(found) + 1, [session]))
    return found


def _together(session: StoredSession, update: Update) -> bool:
    voted = {s.report.update_id for s in update.ranks} - {""}
    if session.report.update_id and voted:
        return voted == {session.report.update_id}
    return session.start_ns <= max(s.end_ns for s in update.ranks) + 2_000_000_000


def result(update: Update) -> str:
    """What serves after a load, in words."""
    report = next((s.report for s in update.ranks if s.report.outcome == update.outcome), update.first)
    if report.operation == "first_load" and report.outcome in ("aborted", "refused"):
        return "nothing serves: the first load failed"
    if update.not_sent:
        return f"the new weights serve, beside old values of what was not sent (tensors: {update.not_sent})"
    return RESULTS.get(update.outcome, "")


def segments(session: StoredSession) -> list[Segment]:
    """The phases of a session in time: from its spans, or laid end to end in the report's order."""
    root = next((span for span in session.spans if span.is_root), None)
    if root is not None:
        return [
            Segment(
                s.name, (s.start_ns - root.start_ns) / 1e9, (s.end_ns - s.start_ns) / 1e9, s.calls, s.error
            )
            for s in session.spans
            if not s.is_root
        ]
    out, at = [], 0.0
    for phase in session.report.phases:
        seconds = max(0.0, phase.seconds)
        out.append(Segment(phase.name, at, seconds, phase.calls, exact=False))
        at += seconds
    return out


def times(session: StoredSession) -> list[tuple[str, float, int]]:
    """(phase, seconds, calls) in order, and what is in no phase."""
    rows = [(p.name, max(0.0, p.seconds), p.calls) for p in session.report.phases]
    rest = session.report.seconds - sum(row[1] for row in rows)
    if rest > max(0.001, 0.01 * session.report.seconds):
        rows.append(("in no phase", rest, 1))
    return rows


def attributed(session: StoredSession) -> dict[str, float]:
    """Where time went across phases, where the record says so: seconds by activity, and by class of hook."""
    out = {}
    for key in ("attributed", "processing"):
        table = session.raw.get(key)
        for name, seconds in table.items() if isinstance(table, dict) else ():
            if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0:
                out[f"{'hooks of ' if key == 'processing' else ''}{name}"] = float(seconds)
    return out


def notes(update: Update) -> list[str]:
    """What the ranks noted, each thing once, at most twenty."""
    return list(dict.fromkeys(note for s in update.ranks for note in s.report.notes))[:20]


def layer_seconds(session: StoredSession) -> dict[str, float]:
    """Seconds of processing by layer, as far as they were kept."""
    found = dict(session.slow_layers)
    layers = session.raw.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        seconds = layer.get("seconds") if isinstance(layer, dict) else None
        if isinstance(seconds, float) and seconds > 0:
            found[str(layer.get("name", ""))] = seconds
    return found


def rate(nbytes: float, seconds: float) -> str:
    """``1.2 GiB/s``, or nothing where it can't be told."""
    return f"{format_bytes(int(nbytes / seconds))}/s" if seconds > 1e-6 and nbytes > 0 else ""


def headline(session: StoredSession) -> str:
    """Where the time of one session went, in a sentence."""
    rows = times(session)
    total = session.report.seconds
    if not rows or total <= 0:
        return "No times were stored."
    name, seconds, _ = max(rows, key=lambda row: row[1])
    text = f"{100 * min(1.0, seconds / total):.0f} % of {format_seconds(total)} went into {errors.clean(name, 80)}"
    if name in PHASES:
        text += f": {PHASES[name]}"
    speed = rate(session.report.bytes_received, seconds) if name == "receive" else ""
    return f"{text} ({speed})." if speed else f"{text}."


def problems(update: Update) -> list[Problem]:
    """Violations and errors of all ranks; equal ones once, with the ranks that had them."""
    found: dict[tuple[str, ...], Problem] = {}
    for session in update.ranks:
        report = session.report
        known = errors.from_message(report.error or "")
        mine = [(v.code, v.message, v.layer, v.tensors) for v in report.violations]
        # an error that is no violation (a source that raised, a time-out of the vote)
        if report.error and not (known and any(code == known.code for code, *_ in mine)):
            mine.append(
                (known.code, known.message, known.layer, list(known.tensors))
                if known
                else ("", report.error, "", [])
            )
        for code, message, layer, tensors in mine:
            kind = errors.CODES.get(code)
            same = known is not None and known.code == code and known.layer == layer
            problem = found.setdefault(
                (code, message, layer),
                Problem(
                    code,
                    (kind.__doc__ or "").split("\n", 1)[0] if kind else "The load ended with an error.",
                    message,
                    layer,
                    tensors,
                    known.hint
                    if same and known
                    else kind.default_hint
                    if kind
                    else _next_step(report.outcome),
                ),
            )
            problem.ranks.append(report.rank)
        if not session.ended:
            found.setdefault(
                ("", "open", ""),
                Problem("", "No end was stored.", "The session is running, or its process ended in it.",
                        hint="weightlife trace tail follows it; look for the process's last log lines"),
            ).ranks.append(report.rank)  # fmt: skip
    return list(found.values())


def _next_step(outcome: str) -> str:
    if outcome == "poisoned":
        return errors.PoisonedModelError.default_hint
    return (
        "it came from the loader or the sender, not from weightlife: mend its cause and send the update again"
    )


# -- two runs --------------------------------------------------------------------------------------------------------


def compare(one: list[Update], other: list[Update]) -> list[dict[str, Any]]:
    """How ``one`` differs from ``other`` (the baseline), by model and operation; medians over committed loads."""
    keys = dict.fromkeys((u.first.model, u.first.operation) for u in (*other, *one))
    out = []
    for model, operation in keys:
        mine, theirs = (
            [u for u in side if (u.first.model, u.first.operation) == (model, operation)]
            for side in (one, other)
        )
        out.append(
            {
                "model": model,
                "operation": operation,
                "loads": [len(theirs), len(mine)],
                "outcomes": [dict(Counter(u.outcome for u in side)) for side in (theirs, mine)],
                "rows": _rows(theirs, mine),
                "versions": _versions(theirs, mine),
                "layers": _layers(theirs, mine),
                "problems": [
                    sorted({p.code or p.title for u in side for p in problems(u)}) for side in (theirs, mine)
                ],
            }
        )
    return out


def _rows(theirs: list[Update], mine: list[Update]) -> list[dict[str, Any]]:
    """Figures of both sides. Of several ranks the slowest counts: it is the one that everybody waits for."""
    figures = [[_figures(u) for u in side if u.good] for side in (theirs, mine)]
    names = dict.fromkeys(name for side in figures for one in side for name in one)
    rows = []
    for name in names:
        values = [[one[name] for one in side if name in one] for side in figures]
        before, after = (statistics.median(v) if v else None for v in values)
        ratio = after / before if before and after is not None else None
        rows.append({"name": name, "unit": "By" if name == "bytes received" else "s",
                     "before": before, "after": after, "ratio": ratio})  # fmt: skip
    return rows


def _figures(update: Update) -> dict[str, float]:
    out: dict[str, float] = {"whole load": update.seconds, "bytes received": float(update.nbytes)}
    for session in update.ranks:
        for phase, seconds, _ in times(session):
            out[phase] = max(out.get(phase, 0.0), seconds)
    return out


def _versions(theirs: list[Update], mine: list[Update]) -> list[dict[str, str]]:
    before, after = (side[-1].first.versions if side else {} for side in (theirs, mine))
    return [
        {"name": name, "before": before.get(name, ""), "after": after.get(name, "")}
        for name in sorted({*before, *after})
        if before and after and before.get(name) != after.get(name)
    ]


def _layers(theirs: list[Update], mine: list[Update]) -> dict[str, Any]:
    """Layers whose strategy or reason is another one, or which only one side has; from the last load of each side."""
    if not theirs or not mine:
        return {"changed": [], "more": 0}
    before, after = (
        {layer.name: (layer.strategy, layer.reason) for layer in side[-1].first.layers}
        for side in (theirs, mine)
    )
    changed = [
        {"name": name, "before": _because(before.get(name)), "after": _because(after.get(name))}
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
    return {"changed": changed[:_LAYERS_COMPARED], "more": max(0, len(changed) - _LAYERS_COMPARED)}


def _because(layer: tuple[str, str] | None) -> str:
    return "not there" if layer is None else f"{layer[0]} ({layer[1]})" if layer[1] else layer[0]


# -- as plain data ---------------------------------------------------------------------------------------------------


def to_dict(run: Run, found: Iterable[Update]) -> dict[str, Any]:
    """The run for ``--json``; reports as they were stored."""
    return {
        "schema_version": 1,
        "path": str(run.path),
        "files": run.files,
        "older_sessions": run.older,
        "problems": run.problems,
        "loads": [_load(update) for update in found],
    }


def _load(update: Update) -> dict[str, Any]:
    return {
        "number": update.number,
        "model": update.first.model,
        "operation": update.first.operation,
        "outcome": update.outcome,
        "good": update.good,
        "tensors_not_sent": update.not_sent,
        "seconds": update.seconds,
        "bytes_received": update.nbytes,
        "problems": [vars(problem) for problem in problems(update)],
        "ranks": [_rank(session) for session in update.ranks],
    }


def _rank(session: StoredSession) -> dict[str, Any]:
    more: Mapping[str, Any] = {
        "pid": session.pid,
        "host": session.host,
        "ended": session.ended,
        "headline": headline(session),
        "segments": [vars(segment) for segment in segments(session)],
        "slow_layers": [{"layer": name, "seconds": seconds} for name, seconds in session.slow_layers],
        "left_out": session.left_out,
    }
    return {"rank": session.report.rank, **more, "report": session.raw}
