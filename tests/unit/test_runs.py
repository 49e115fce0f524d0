# SPDX-License-Identifier: Apache-2.0
"""Stored runs: what is written, under which failures, and what a reader makes of files that it can't trust."""

from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import TracerProvider

import weightlife
from weightlife import errors
from weightlife._engine import events
from weightlife._engine.events import Bus
from weightlife.otel import names
from weightlife.report import LayerRecord, LoadReport, PhaseRecord, Violation
from weightlife.runs import reader, writer
from weightlife.runs.reader import read_run
from weightlife.runs.trace import MAX_RUNS
from weightlife.runs.writer import RunWriter

HOSTILE = [
    "<script>alert(1)</script>",
    "\u202egnp.exe",
    "\x1b[31mred",
    "a" * 5000,
    "\ud800",
    "line\nbreak",
    "\u05d0\u05d1",
]


def made(**more: Any) -> LoadReport:
    given: dict[str, Any] = {
        "session_id": "s1", "model": "Toy", "opened_by": "reload_weights", "outcome": "committed", "seconds": 0.5,
        "started_at": "2026-11-29T03:00:00+00:00", "phases": [PhaseRecord("receive", 0.4, 3)],
    }  # fmt: skip
    return LoadReport(**{**given, **more})


class Kept:
    """A bus, a writer on it, and its directory."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.folder = folder
        self.bus = Bus()
        self.writer = RunWriter(folder, **more)
        self.stop = self.writer.subscribe(self.bus)

    def session(self, report: LoadReport | None = None, **more: Any) -> None:
        report = report or made(**more)
        ident = report.session_id
        self.bus.emit(events.SESSION_START, ident, report=report)
        self.bus.emit(events.PHASE_START, ident, phase="receive")
        self.bus.emit(events.LAYER_PROCESSED, ident, layer="model.a", hook="H", seconds=0.25)
        self.bus.emit(events.PHASE_END, ident, phase="receive", tensors=3, bytes=2**40)
        self.bus.emit(
            events.SESSION_END, ident, report=report, outcome=report.outcome, error=report.error or ""
        )

    def lines(self, kind: str = "sessions") -> list[dict[str, Any]]:
        assert self.writer.flush()
        found = sorted(self.folder.glob(f"*.{kind}*.jsonl"))
        return [json.loads(line) for path in found for line in path.read_text().splitlines()]


@pytest.fixture(name="keep")
def _keep(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made_here: list[Kept] = []

    def start(folder: Path | None = None, **more: Any) -> Kept:
        made_here.append(Kept(folder or tmp_path / "runs", **more))
        return made_here[-1]

    yield start
    for kept in made_here:
        kept.stop()
        assert kept.bus.listener_errors == 0


class TestWritten:
    def test_a_session_is_a_start_and_a_report_with_schema_versions(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        kept.session(rank=3, world_size=4)
        start, end = kept.lines()
        assert (start["kind"], end["kind"]) == ("start", "session")
        assert start["schema_version"] == end["schema_version"] == end["report"]["schema_version"] == 1
        assert end["pid"] == os.getpid()
        assert end["slow_layers"] == [{"layer": "model.a", "seconds": 0.25}]
        names = [path.name for path in kept.folder.iterdir()]
        assert all(".rank3." in name for name in names)
        assert len(names) == 2

    def test_a_rank_has_its_own_files(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        for rank in (0, 1):
            kept.session(session_id=f"s{rank}", rank=rank, world_size=2)
        kept.lines()
        assert len(list(kept.folder.glob("*.rank0.*"))) == len(list(kept.folder.glob("*.rank1.*"))) == 2

    def test_the_record_is_there_when_the_session_ends(self, keep: Callable[..., Kept]) -> None:
        """A worker may be killed right then: nothing is flushed here."""
        kept = keep()
        kept.session()
        (path,) = kept.folder.glob("*.sessions.jsonl")
        assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["start", "session"]
        assert len(list(kept.folder.glob("*.traces.jsonl"))) == 1

    @pytest.mark.parametrize("name", HOSTILE)
    def test_any_name_is_one_line_of_ascii_and_comes_back(self, name: str, keep: Callable[..., Kept]) -> None:
        kept = keep()
        kept.session(
            layers=[LayerRecord(name, "direct", name)], violations=[Violation("WL201", name, name, [name])]
        )
        assert len(kept.lines()) == 2
        (session,) = read_run(kept.folder).sessions
        assert session.report.layers[0].name == name
        assert session.report.violations[0].tensors == [name]
        assert session.spans

    def test_a_file_is_turned_over_and_one_old_one_is_kept(self, keep: Callable[..., Kept]) -> None:
        kept = keep(max_file_bytes=4000)
        for number in range(40):
            kept.session(session_id=f"s{number}")
        kept.writer.flush()
        sizes = {path.name: path.stat().st_size for path in kept.folder.iterdir()}
        assert len(sizes) == 4
        assert max(sizes.values()) <= 4000
        run = read_run(kept.folder)
        assert run.sessions[-1].report.session_id == "s39"
        assert not run.problems

    def test_a_report_too_long_for_a_line_loses_layers_and_says_how_many(
        self, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "MAX_LINE_BYTES", 2**20)
        kept = keep()
        layers = [LayerRecord(f"model.layers.{i}." + "x" * 90, "direct", "y" * 60) for i in range(8000)]
        kept.session(layers=layers, notes=["z" * 100] * 50)
        kept.writer.flush(20)
        (session,) = read_run(kept.folder).sessions
        assert session.left_out["layers"] + len(session.report.layers) == 8000
        assert len(session.report.layers) > 3000
        assert len(session.report.notes) == 50
        assert all(len(line) < 2**20 for p in kept.folder.glob("*.sessions*") for line in p.open("rb"))

    def test_many_threads_write_whole_lines(self, keep: Callable[..., Kept]) -> None:
        kept = keep()

        def one(number: int) -> None:
            for i in range(8):
                kept.session(session_id=f"s{number}.{i}")
                kept.writer.flush()

        threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run = read_run(kept.folder)
        assert len(run.sessions) == 32
        assert kept.writer.dropped == 0
        assert not run.problems

    def test_a_forked_child_writes_files_of_its_own(self, tmp_path: Path) -> None:
        code = (
            "import os, sys\nfrom weightlife._engine.events import bus\nfrom weightlife.report import LoadReport\n"
            "from weightlife.runs import writer\nwriter.keep(sys.argv[1])\n"
            "def one(i):\n"
            "    r = LoadReport(session_id=i, started_at='2026-11-29T03:00:00+00:00', outcome='committed')\n"
            "    bus.emit('session.start', i, report=r); bus.emit('session.end', i, report=r, outcome='committed')\n"
            "one('parent')\npid = os.fork()\n"
            "if not pid:\n    one('child'); os._exit(0)\n"
            "os.waitpid(pid, 0); one('again')\n"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
        run = read_run(tmp_path)
        by_file: dict[str, list[str]] = {}
        for session in run.sessions:
            by_file.setdefault(session.file, []).append(session.report.session_id)
        assert sorted(by_file.values()) == [["child"], ["parent", "again"]]


class TestFailures:
    def test_a_directory_that_cannot_be_made_is_one_warning_and_no_failure(
        self, tmp_path: Path, keep: Callable[..., Kept], caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        kept = keep(tmp_path / "file" / "runs")
        with caplog.at_level(logging.WARNING, "weightlife"):
            kept.session()
            kept.session(session_id="s2")
            kept.writer.flush()
        assert sum("are not kept" in record.getMessage() for record in caplog.records) == 1
        assert kept.writer.status()["dropped"] == 6
        assert "NotADirectoryError" in kept.writer.status()["error"]

    def test_a_directory_that_hangs_costs_its_patience_once(
        self, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = keep()
        let_go = threading.Event()
        real = kept.writer._open
        monkeypatch.setattr(kept.writer, "_open", lambda path: (let_go.wait(30), real(path))[1])
        times = []
        for number in range(3):
            started = time.perf_counter()
            kept.session(session_id=f"s{number}")
            times.append(time.perf_counter() - started)
        let_go.set()
        assert times[0] >= writer.PATIENCE
        assert min(times[1:]) < writer.PATIENCE
        assert max(times) < 1

    def test_a_long_record_is_waited_for_again_when_it_is_written(
        self, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = keep()
        real = kept.writer._append

        def slowly(*args: Any) -> None:
            time.sleep(0.06)
            real(*args)

        monkeypatch.setattr(kept.writer, "_append", slowly)
        kept.session()
        assert kept.writer._slow
        kept.writer.flush()
        monkeypatch.setattr(kept.writer, "_append", real)
        kept.session(session_id="s2")
        assert not kept.writer._slow

    def test_what_does_not_fit_the_queue_is_dropped_and_counted(
        self, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = keep()
        let_go = threading.Event()
        real = kept.writer._open
        monkeypatch.setattr(kept.writer, "_open", lambda path: (let_go.wait(30), real(path))[1])
        for number in range(writer.QUEUE):
            kept.session(session_id=f"s{number}")
        let_go.set()
        assert kept.writer.flush(20)
        assert kept.writer.dropped == 3 * writer.QUEUE - kept.writer.written > 0
        assert "too slow" in kept.writer.error

    def test_a_full_disk_leaves_a_torn_line_that_readers_skip(
        self, keep: Callable[..., Kept], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = keep()
        kept.session()
        real, cut = os.write, [True]

        def write(descriptor: int, data: bytes) -> int:
            return real(descriptor, data[:40] if cut[0] else data)

        monkeypatch.setattr(os, "write", write)
        kept.session(session_id="s2")
        kept.writer.flush()
        cut[0] = False
        kept.session(session_id="s3")
        kept.writer.flush()
        run = read_run(kept.folder)
        assert [s.report.session_id for s in run.sessions] == ["s1", "s3"]
        assert run.problems
        assert all("skipped" in problem for problem in run.problems)

    def test_nobody_can_lay_a_link_where_a_file_will_be(self, tmp_path: Path) -> None:
        one = RunWriter(tmp_path)
        target = tmp_path / "target"
        (tmp_path / "x.jsonl").symlink_to(target)
        with pytest.raises(OSError, match="exists"):
            one._open(tmp_path / "x.jsonl")
        assert not target.exists()


class TestOtlp:
    """The spans, read with the official message types."""

    @staticmethod
    def decoded(message: dict[str, Any]) -> TracesData:
        """Through the official types. They expect base64 where OTLP/JSON writes ids in hexadecimal."""
        text = json.loads(json.dumps(message))

        def ids(value: Any) -> None:
            for key, item in value.items() if isinstance(value, dict) else ():
                if key in ("traceId", "spanId", "parentSpanId"):
                    assert len(item) == (32 if key == "traceId" else 16)
                    value[key] = base64.b64encode(bytes.fromhex(item)).decode()
            for item in (
                value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            ):
                ids(item)

        ids(text)
        found: TracesData = json_format.ParseDict(
            text, TracesData()
        )  # an unknown field or a wrong type raises
        return found

    def spans(self, kept: Kept) -> list[Any]:
        out: list[Any] = []
        for line in kept.lines("traces"):
            (resource,) = self.decoded(line).resource_spans
            (scope,) = resource.scope_spans
            assert scope.scope.name == "weightlife"
            assert {a.key for a in resource.resource.attributes} == {
                "service.name",
                "host.name",
                "process.pid",
            }
            out += scope.spans
        return out

    @staticmethod
    def values(holder: Any) -> dict[str, Any]:
        return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}

    def failing(self, kept: Kept) -> None:
        bus, report = kept.bus, made(outcome="aborted", error="[WL201] gone", rank=2, bytes_received=2**40)
        bus.emit(events.SESSION_START, "s1", report=report)
        for _ in range(2):
            bus.emit(events.PHASE_START, "s1", phase="receive")
            bus.emit(events.PHASE_END, "s1", phase="receive")
        bus.emit(events.VIOLATION, "s1", code="WL201", layer=HOSTILE[0], message="gone")
        bus.emit(events.NOTE, "s1", message="look")
        bus.emit(events.PHASE_START, "s1", phase="validate")
        bus.emit(events.SESSION_END, "s1", report=report, outcome="aborted", error=report.error)

    def test_a_failing_session_is_a_tree_of_spans_with_its_facts(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        self.failing(kept)
        root, *children = self.spans(kept)
        assert [child.name for child in children] == ["receive", "receive", "validate"]
        assert {child.parent_span_id for child in children} == {root.span_id}
        assert {child.trace_id for child in children} == {root.trace_id}
        assert len({span.span_id for span in (root, *children)}) == 4
        assert root.name == "load_weights Toy"
        assert root.kind == children[0].kind == 1
        assert [span.status.code for span in (root, *children)] == [2, 0, 0, 2]
        assert [event.name for event in root.events] == [names.EVENT_VIOLATION, names.EVENT_NOTE]
        assert self.values(root.events[0])[names.VIOLATION_LAYER] == HOSTILE[0]
        assert self.values(root)[names.TENSOR_SIZE] == 2**40
        assert self.values(root)[names.RANK] == 2
        for span in children:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano

    def test_names_and_types_are_those_of_the_registry(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        self.failing(kept)
        kinds = {"int": int, "string": str, "double": float}
        seen = 0
        for span in self.spans(kept):
            for holder in (span, *span.events):
                for key, value in self.values(holder).items():
                    assert isinstance(value, kinds[names.TYPES[key]]), key
                    seen += 1
        assert seen > 20

    def test_a_callers_span_is_the_parent(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        with TracerProvider().get_tracer("trainer").start_as_current_span("step") as step:
            kept.session()
        root = self.spans(kept)[0]
        assert root.parent_span_id == step.get_span_context().span_id.to_bytes(8, "big")
        assert root.trace_id == step.get_span_context().trace_id.to_bytes(16, "big")

    def test_ids_of_an_exported_span_are_taken_over(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        report = made()
        report.trace_id, report.span_id = "0123456789abcdef" * 2, "fedcba9876543210"  # type: ignore[attr-defined]
        kept.session(report)
        report = made(session_id="s2")
        report.trace_id, report.span_id = "0" * 32, "<script>"  # type: ignore[attr-defined]
        kept.session(report)
        first, second = (span for span in self.spans(kept) if not span.parent_span_id)
        assert first.trace_id.hex() == "0123456789abcdef" * 2
        assert first.span_id.hex() == "fedcba9876543210"
        assert int.from_bytes(second.trace_id, "big")
        assert len(second.span_id) == 8

    def test_many_runs_of_a_phase_are_folded_and_counted(self, keep: Callable[..., Kept]) -> None:
        kept = keep()
        kept.bus.emit(events.SESSION_START, "s1", report=made())
        for _ in range(MAX_RUNS + 40):
            kept.bus.emit(events.PHASE_START, "s1", phase="receive")
            kept.bus.emit(events.PHASE_END, "s1", phase="receive")
        kept.bus.emit(events.SESSION_END, "s1", report=made(), outcome="committed")
        _, *children = self.spans(kept)
        counts = [self.values(child)[names.CALL_COUNT] for child in children]
        assert len(counts) == MAX_RUNS
        assert sum(counts) == MAX_RUNS + 40

    @pytest.mark.parametrize("name", HOSTILE)
    def test_any_name_is_valid_in_protobuf(self, name: str, keep: Callable[..., Kept]) -> None:
        kept = keep()
        kept.session(model=name, source=name, error=name)
        assert self.spans(kept)[0].name.startswith("load_weights ")

    def test_without_an_sdk_and_with_it_switched_off(self, tmp_path: Path) -> None:
        code = (
            "import sys\nsys.modules['opentelemetry.sdk'] = None\n"
            "from weightlife._engine.events import bus\nfrom weightlife.report import LoadReport\n"
            "from weightlife.runs import writer\nwriter.keep(sys.argv[1])\n"
            "r = LoadReport(session_id='x', started_at='2026-11-29T03:00:00+00:00', outcome='committed')\n"
            "bus.emit('session.start', 'x', report=r); bus.emit('session.end', 'x', report=r, outcome='committed')\n"
        )
        env = {**os.environ, "OTEL_SDK_DISABLED": "true"}
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60, env=env)
        assert len(read_run(tmp_path).sessions[0].spans) == 1


class TestRead:
    def file(
        self, folder: Path, *lines: object, end: str = "\n", name: str = "a.rank0.sessions.jsonl"
    ) -> Path:
        folder.mkdir(exist_ok=True)
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (folder / name).write_text(text + end)
        return folder

    def record(self, report: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        return {
            "schema_version": 1,
            "kind": "session",
            "report": {**made().to_dict(), **(report or {})},
            **more,
        }

    def test_a_last_line_cut_short_is_noted_and_the_rest_read(self, tmp_path: Path) -> None:
        run = read_run(self.file(tmp_path, self.record(), json.dumps(self.record())[:80], end=""))
        assert len(run.sessions) == 1
        assert "a.rank0.sessions.jsonl, line 2: cut short" in run.problems[0]

    @pytest.mark.parametrize(
        "line",
        ["garbage", "[1]", "3", '{"schema_version": 1, "kind": "session"}', "[" * 100_000, '{"a": NaN}', "9" * 5000,
         '{"schema_version": 1, "kind": "session", "report": {"schema_version": 1, "layers": 7}}',
         '{"schema_version": 1, "kind": "session", "report": {"schema_version": 1, "outcome": "fine"}}'],
    )  # fmt: skip
    def test_a_damaged_line_is_noted_and_the_rest_read(self, line: str, tmp_path: Path) -> None:
        run = read_run(self.file(tmp_path, line, self.record()))
        assert len(run.sessions) == 1
        assert len(run.problems) == 1
        assert "line 1: not a record" in run.problems[0]

    @pytest.mark.parametrize("version", [2, 99, 0, "1", None, True, 1.0])
    def test_an_unknown_schema_is_refused_by_name(self, version: object, tmp_path: Path) -> None:
        for line in ({**self.record(), "schema_version": version}, self.record({"schema_version": version})):
            folder = self.file(tmp_path, self.record(), line)
            with pytest.raises(
                errors.ConfigError, match=r"a.rank0.sessions.jsonl, line 2: the \w+ has schema version"
            ):
                read_run(folder)

    def test_fields_and_kinds_that_came_later_are_ignored_and_kept_raw(self, tmp_path: Path) -> None:
        folder = self.file(
            tmp_path, {"schema_version": 1, "kind": "later"}, self.record({"later": 3}, more=[1])
        )
        (session,) = read_run(folder).sessions
        assert session.raw["later"] == 3

    def test_fields_that_are_absent_have_their_defaults(self, tmp_path: Path) -> None:
        folder = self.file(
            tmp_path, {"schema_version": 1, "kind": "session", "report": {"schema_version": 1}}
        )
        (session,) = read_run(folder).sessions
        assert session.report == LoadReport()

    def test_numbers_are_such_as_can_be_computed_with(self, tmp_path: Path) -> None:
        text = json.dumps(self.record({"bytes_received": 10**300})).replace(
            '"seconds": 0.5', '"seconds": 1e999'
        )
        (session,) = read_run(self.file(tmp_path, text)).sessions
        assert session.report.seconds == 0.0
        assert "TiB" in str(session.report)

    def test_a_session_without_an_end_is_open(self, tmp_path: Path) -> None:
        start = {
            "schema_version": 1,
            "kind": "start",
            "session_id": "s9",
            "model": "M",
            "rank": 1,
            "wall_ns": 5,
        }
        (session,) = read_run(self.file(tmp_path, start)).sessions
        assert not session.ended
        assert (session.report.session_id, session.report.outcome, session.start_ns) == ("s9", "open", 5)

    def test_the_newest_are_kept_and_the_others_counted(self, tmp_path: Path) -> None:
        lines = [
            self.record(
                {"session_id": f"s{i}", "started_at": f"2026-11-29T03:{i // 60:02d}:{i % 60:02d}+00:00"}
            )
            for i in range(300)
        ]
        run = read_run(self.file(tmp_path, *reversed(lines)), last=10)
        assert [s.report.session_id for s in run.sessions] == [f"s{i}" for i in range(290, 300)]
        assert run.older == 290

    def test_of_a_file_that_is_too_long_the_end_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = self.file(tmp_path, *(self.record({"session_id": f"s{i}"}) for i in range(20)))
        monkeypatch.setattr(reader, "MAX_READ_BYTES", 3000)
        run = read_run(folder)
        assert 0 < len(run.sessions) < 10
        assert run.sessions[-1].report.session_id == "s19"
        assert "only its last" in run.problems[0]

    def test_a_line_longer_than_any_record_is_skipped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader, "_LONGEST", 2000)
        run = read_run(self.file(tmp_path, "x" * 9000, self.record()))
        assert len(run.sessions) == 1
        assert "longer than any record" in run.problems[0]

    def test_sub_directories_and_single_files_are_runs_too(self, tmp_path: Path) -> None:
        self.file(tmp_path / "one", self.record())
        self.file(tmp_path / "two", self.record({"session_id": "s2"}))
        assert len(read_run(tmp_path).sessions) == 2
        assert len(read_run(tmp_path / "one" / "a.rank0.sessions.jsonl").sessions) == 1

    def test_what_is_not_there_is_a_config_error(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match="does not exist"):
            read_run(tmp_path / "nothing")

    def test_an_unreadable_file_is_noted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = self.file(tmp_path, self.record())
        real = Path.open

        def refuse(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self.name.startswith("a."):
                raise PermissionError(13, "Permission denied")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "open", refuse)
        assert "not readable (Permission denied)" in read_run(folder).problems[0]

    @pytest.mark.parametrize(
        "line", ["{}", "[]", '{"resourceSpans": 3}', '{"resourceSpans": [{"scopeSpans": [{}]}]}', "x"]
    )
    def test_damaged_spans_leave_the_session_without(self, line: str, tmp_path: Path) -> None:
        self.file(tmp_path, line, name="a.rank0.traces.jsonl")
        (session,) = read_run(self.file(tmp_path, self.record())).sessions
        assert session.spans == []


class TestInstalled:
    """Through the public settings, with the engine itself behind the events."""

    def test_install_keeps_absolute_and_uninstall_ends_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        weightlife.install(runs_dir="runs")
        assert os.environ["WEIGHTLIFE_RUNS_DIR"] == str(tmp_path / "runs")
        assert weightlife.status()["runs"]["folder"] == str(tmp_path / "runs")
        weightlife.install(runs_dir=None)
        assert weightlife.status()["runs"] is None
        weightlife.install(runs_dir="other")
        weightlife.uninstall()
        assert weightlife.status()["runs"] is None
        assert not (tmp_path / "other").exists()  # nothing is made before there is something to keep

    def test_off_by_default_and_not_even_imported(self) -> None:
        code = "import sys, weightlife; weightlife.install(); print([m for m in sys.modules if 'weightlife.runs' in m])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == "[]"

    def test_a_watched_module_leaves_its_good_and_its_failing_update(self, tmp_path: Path) -> None:
        def load(model: torch.nn.Module, weights: Any) -> None:
            parameters = dict(model.named_parameters())
            for name, tensor in weights:
                parameters[name].data.copy_(tensor)

        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        whole = [(name, torch.ones_like(p)) for name, p in model.named_parameters()]
        wrapped = weightlife.wrap_loader(runs_dir=str(tmp_path))(load)
        wrapped(model, whole)
        model(torch.zeros(1, 3))
        wrapped(model, whole)
        with pytest.raises(errors.MissingTensorError):
            wrapped(model, whole[:-1])
        run = read_run(tmp_path)
        assert [s.report.outcome for s in run.sessions] == ["committed", "committed", "aborted"]
        assert run.sessions[-1].report.violations[0].code == "WL201"
        assert [s.is_root for s in run.sessions[1].spans].count(True) == 1
        assert {s.name for s in run.sessions[1].spans if not s.is_root} >= {"prepare", "receive", "copy_back"}
