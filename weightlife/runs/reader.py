# SPDX-License-Identifier: Apache-2.0
"""Reads what ``writer`` kept, and files that others may have touched: nothing in them is trusted.

A process that is killed leaves a last line cut short, and a file is read while it grows: such lines are noted and
skipped. A record of a schema that this version does not know is refused by name, since to guess at it would be worse
than to say so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from weightlife.errors import ConfigError, clean
from weightlife.report import SCHEMA_VERSION as REPORT_VERSION
from weightlife.report import LoadReport
from weightlife.runs import MAX_LINE_BYTES, SCHEMA_VERSION, SESSIONS, TRACES

__all__ = [
    "MAX_READ_BYTES",
    "MAX_SESSIONS",
    "Run",
    "Span",
    "StoredSession",
    "parse_record",
    "read_run",
    "run_files",
]

MAX_READ_BYTES = 256 * 2**20
"""Of one file; a longer one is read from its end."""
MAX_SESSIONS = 200
"""Sessions kept by default, the newest."""
MAX_FILES = 10_000

_KINDS = re.compile(rf"\.({SESSIONS}|{TRACES})(\.old)?\.jsonl$")
_LONGEST = 2 * MAX_LINE_BYTES
_PROBLEMS = 50
_Key = tuple[str, str, int]


@dataclass
class Span:
    """A span of a session: times in nanoseconds since the epoch. ``calls`` is how many runs it stands for."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_root: bool = False

    @property
    def calls(self) -> int:
        """How many runs of the phase the span stands for."""
        value = self.attributes.get("weightlife.call.count")
        return value if isinstance(value, int) and value > 0 else 1


@dataclass
class StoredSession:
    """One session on one rank. ``raw`` is the report as it was stored, with fields that this version may not know.

    ``ended`` is False where a start was stored and no end: the session is running, or its process died in it.
    """

    report: LoadReport
    raw: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    host: str = ""
    file: str = ""
    start_ns: int = 0
    ended: bool = True
    spans: list[Span] = field(default_factory=list)
    slow_layers: list[tuple[str, float]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def end_ns(self) -> int:
        """When it ended, by its own clock."""
        return self.start_ns + int(self.report.seconds * 1e9)


@dataclass
class Run:
    """What a directory or a file holds, oldest session first; ``problems`` are sentences about what was skipped."""

    path: Path
    sessions: list[StoredSession] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    files: int = 0
    older: int = 0

    def problem(self, text: str) -> None:
        """Note one; the list is bounded, as files may be nothing but noise."""
        if len(self.problems) < _PROBLEMS:
            self.problems.append(clean(text, 500))


def run_files(path: Path, kind: str = SESSIONS) -> list[Path]:
    """The files of one kind in a directory and its sub-directories, or the file itself.

    Raises:
        ConfigError: there is no such path.
    """
    if path.is_file():
        return [path] if kind == SESSIONS else _sibling(path)
    if not path.is_dir():
        raise ConfigError(
            f"{clean(path)} does not exist",
            hint="name the directory that WEIGHTLIFE_RUNS_DIR named in the job (a relative one lies below the working "
            "directory of its processes), or a file in it; it is made with the first load that is kept",
        )
    # rotated files first: they are older than what goes by the plain name
    found = [
        p
        for p in path.rglob(f"*.{kind}*.jsonl")
        if (m := _KINDS.search(p.name)) and m[1] == kind and p.is_file()
    ]
    return sorted(found, key=lambda p: (p.name.replace(".old", ""), ".old" not in p.name))[:MAX_FILES]


def _sibling(path: Path) -> list[Path]:
    other = path.with_name(path.name.replace(f".{SESSIONS}.", f".{TRACES}."))
    return [other] if other != path and other.is_file() else []


def read_run(path: str | Path, last: int = MAX_SESSIONS) -> Run:
    """The newest ``last`` sessions below ``path``.

    Raises:
        ConfigError: no such path, or a record of a schema that this version does not read.
    """
    run = Run(Path(path))
    ended: dict[_Key, StoredSession] = {}
    for file in run_files(run.path):
        run.files += 1
        for number, line in _lines(run, file):
            session = _session(run, file, number, line)
            if session is None:
                continue
            key = (session.report.session_id, session.file.replace(".old", ""), session.report.rank)
            if session.ended or key not in ended:
                ended[key] = session
            if len(ended) > 2 * last + 100:  # a long history need not be in memory all at once
                ended = _newest(run, ended, last)
    run.sessions = sorted(_newest(run, ended, last).values(), key=lambda s: s.start_ns)
    _attach_spans(run)
    return run


def _newest(run: Run, found: dict[_Key, StoredSession], last: int) -> dict[_Key, StoredSession]:
    ordered = sorted(found.items(), key=lambda item: item[1].start_ns)
    extra = max(0, len(ordered) - last)
    run.older += extra
    return dict(ordered[extra:])


def parse_record(line: bytes | str, where: str) -> StoredSession | None:
    """One line of a sessions file; None for kinds of records that this version does not know.

    Raises:
        ConfigError: a schema that this version does not read. ValueError: it is no record (a line cut short).
    """
    try:
        data = json.loads(line, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a value of the wrong kind in a file, not an argument
    _known(data.get("schema_version"), SCHEMA_VERSION, "record", where)
    kind, data = data.get("kind"), _sane(data)
    if kind not in ("start", "session"):
        return None
    raw = data.get("report") if kind == "session" else _from_start(data)
    if not isinstance(raw, dict):
        raise ValueError("a session without a report")  # noqa: TRY004
    _known(raw.get("schema_version"), REPORT_VERSION, "report", where)
    try:
        report = LoadReport.from_dict(raw)
    except ConfigError as error:
        raise ValueError(error.message) from None
    return StoredSession(
        report=report,
        raw=raw,
        pid=_integer(data.get("pid")),
        host=str(data.get("host", "")),
        start_ns=_nanoseconds(report.started_at) or _integer(data.get("wall_ns")),
        ended=kind == "session",
        slow_layers=_slow(data.get("slow_layers")),
        left_out={str(k): _integer(v) for k, v in _mapping(data.get("left_out")).items()},
    )


def _known(version: object, ours: int, what: str, where: str) -> None:
    if isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= ours:
        return
    raise ConfigError(
        f"{where}: the {what} has schema version {clean(version)}, and this weightlife reads up to {ours}",
        hint="read it with the version of weightlife that wrote it, or a newer one",
    )


def _from_start(data: Mapping[str, Any]) -> dict[str, Any]:
    """A report of a session of which only the start is known."""
    known = ("session_id", "model", "operation", "source", "opened_by", "rank", "world_size", "started_at")
    return {"schema_version": REPORT_VERSION, "outcome": "open", **{k: data[k] for k in known if k in data}}


def _session(run: Run, file: Path, number: int, line: bytes) -> StoredSession | None:
    where = f"{clean(file.name)}, line {number}"
    try:
        session = parse_record(line, where)
    except ConfigError:
        raise
    except ValueError as error:
        cut = not line.endswith(b"\n")
        run.problem(
            f"{where}: cut short, and skipped (its process was killed, or is writing now)"
            if cut
            else f"{where}: not a record, and skipped ({clean(error, 200)})"
        )
        return None
    if session is not None:
        session.file = file.name
    return session


def _lines(run: Run, file: Path) -> Iterator[tuple[int, bytes]]:
    """Number and text of each line that is not empty; of a file that is too long, its end."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - MAX_READ_BYTES))
            if size > MAX_READ_BYTES:
                run.problem(f"{clean(file.name)}: only its last {MAX_READ_BYTES // 2**20} MiB were read")
                stream.readline()
            number = 0
            while line := stream.readline(_LONGEST):
                number += 1
                whole = line.endswith(b"\n")
                if not whole and len(line) >= _LONGEST:
                    run.problem(f"{clean(file.name)}, line {number}: longer than any record, and skipped")
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(_LONGEST)
                elif line.strip():
                    yield number, line
    except OSError as error:
        run.problem(f"{clean(file.name)}: not readable ({clean(error.strerror)})")


# -- spans -----------------------------------------------------------------------------------------------------------


def _attach_spans(run: Run) -> None:
    wanted: dict[tuple[str, int], StoredSession] = {
        (s.report.session_id, s.report.rank): s for s in run.sessions
    }
    for file in run_files(run.path, TRACES):
        for _, line in _lines(run, file):
            try:
                spans = list(_spans(json.loads(line, parse_constant=_no_constant)))
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                continue  # spans are a second view: a session without them is drawn from its report
            root = next((span for span in spans if span.is_root), None)
            if root is None:
                continue
            ident = str(root.attributes.get("weightlife.session.id", ""))
            session = wanted.get((ident, _integer(root.attributes.get("weightlife.rank"))))
            if session is not None and session.ended:
                session.spans = sorted(spans, key=lambda s: (not s.is_root, s.start_ns))


def _spans(data: Any) -> Iterator[Span]:
    for resource in data["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                attributes = {a["key"]: _any_value(a["value"]) for a in span.get("attributes", ())}
                status = span.get("status", {})
                failed = status.get("code") == 2
                yield Span(
                    str(attributes.get("weightlife.phase") or span["name"]),
                    max(0, int(span["startTimeUnixNano"])),
                    max(0, int(span["endTimeUnixNano"])),
                    attributes,
                    str(status.get("message") or "failed") if failed else "",
                    is_root="weightlife.phase" not in attributes,
                )


def _any_value(value: Mapping[str, Any]) -> Any:
    if "intValue" in value:
        return int(value["intValue"])
    if "arrayValue" in value:
        return [_any_value(x) for x in value["arrayValue"].get("values", ())]
    return next(iter(value.values()), None)


# -- values that a file may hold -------------------------------------------------------------------------------------


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _sane(value: Any, depth: int = 0) -> Any:
    """Numbers that every later step can compute with: finite, and within 64 bits."""
    if isinstance(value, float):
        return value if math.isfinite(value) else 0.0
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return min(max(value, -(2**63)), 2**63 - 1)
    if depth > 20:
        return None
    if isinstance(value, dict):
        return {key: _sane(item, depth + 1) for key, item in value.items()}
    return [_sane(item, depth + 1) for item in value]


def _integer(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _slow(value: object) -> list[tuple[str, float]]:
    found = []
    for item in value if isinstance(value, list) else ():
        seconds = _mapping(item).get("seconds")
        if isinstance(seconds, int | float) and not isinstance(seconds, bool):
            found.append((str(_mapping(item).get("layer", "")), float(seconds)))
    return found


def _nanoseconds(text: str) -> int:
    try:
        return max(0, int(datetime.fromisoformat(text).timestamp() * 1e9))
    except (ValueError, OverflowError, OSError):
        return 0
