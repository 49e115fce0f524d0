# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, where, in which colour, and with which exit code."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import runmaker
from weightlife import cli
from weightlife.cli import app as commands
from weightlife.cli import demo, doctor, tail
from weightlife.cli.doctor import Check, diagnose, exit_code
from weightlife.report import LoadReport

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = "\x1b"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="call")
def _call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """`call("report", path)`: exit code, stdout, stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weightlife", *map(str, args)])
        capsys.readouterr()
        code = cli.main()
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(name="usual", scope="module")
def _usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runmaker.usual(tmp_path_factory.mktemp("run") / "usual")


@pytest.fixture(name="good", scope="module")
def _good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    maker = runmaker.Maker(tmp_path_factory.mktemp("run") / "good")
    maker.load(ranks=2, phases={**runmaker.PHASES, "receive": 4.5})
    return maker.done()


def leaves(app: Any) -> list[tuple[str, Any]]:
    """Every command with its full name."""
    import typer.main

    out: list[tuple[str, Any]] = []

    def walk(command: Any, name: str) -> None:
        for key, child in getattr(command, "commands", {}).items():
            full = f"{name} {key}"
            if hasattr(child, "commands"):
                walk(child, full)
            else:
                out.append((full, child))

    walk(typer.main.get_command(app), "weightlife")
    return out


class TestReport:
    def test_shows_loads_the_failed_one_in_full_and_the_next_step(self, call: Call, usual: Path) -> None:
        code, out, err = call("report", usual)
        assert code == 1
        assert err == ""
        assert len(re.findall(r"^\d \w+ +(?:committed|aborted)", out, re.MULTILINE)) == 3
        assert "load 3: aborted, the old weights serve, unchanged" in out
        assert "90 % of 6.7s went into receive" in out
        assert "model.layers.3.self_attn.v_proj.weight" in out
        assert "next: send the missing tensors" in out

    def test_ends_with_0_if_the_last_load_is_good(self, call: Call, good: Path) -> None:
        code, out, _ = call("report", good)
        assert code == 0
        assert "2 " in out

    def test_ends_with_1_if_nothing_is_stored(self, call: Call, tmp_path: Path) -> None:
        code, out, _ = call("report", tmp_path)
        assert (code, "No session is stored" in out) == (1, True)

    @pytest.mark.parametrize(
        "args", [["report"], ["report", "nowhere"], ["nonsense"], ["report", ".", "--last", "0"]]
    )
    def test_ends_with_2_if_it_cannot(self, call: Call, args: list[str]) -> None:
        code, out, err = call(*args)
        assert code == 2
        assert out == ""
        assert err

    def test_an_unknown_schema_is_an_error_with_the_next_step(self, call: Call, tmp_path: Path) -> None:
        (tmp_path / "a.rank0.sessions.jsonl").write_text('{"schema_version": 7, "kind": "session"}\n')
        code, _, err = call("report", tmp_path)
        assert code == 2
        assert "line 1: the record has schema version 7" in err
        assert "next: read it with the version of weightlife that wrote it" in err

    def test_json_has_everything_and_reports_that_can_be_read_again(
        self, call: Call, usual: Path, good: Path
    ) -> None:
        code, out, _ = call("report", usual, "--json", "--compare", good)
        found = json.loads(out)
        assert (code, found["schema_version"]) == (1, 1)
        assert [(load["operation"], load["outcome"], len(load["ranks"])) for load in found["loads"]] == [
            ("first_load", "committed", 1), ("reload", "committed", 2), ("reload", "aborted", 1),
        ]  # fmt: skip
        rank = found["loads"][1]["ranks"][1]
        assert LoadReport.from_dict(rank["report"]).rank == 1
        assert [s["name"] for s in rank["segments"]] == list(runmaker.PHASES)
        assert rank["slow_layers"]
        (problem,) = found["loads"][2]["problems"]
        assert problem["code"] == "WL201"
        assert problem["hint"].startswith("send the missing tensors")
        rows = {
            r["name"]: r
            for part in found["comparison"]
            if part["operation"] == "reload"
            for r in part["rows"]
        }
        assert rows["receive"]["ratio"] == pytest.approx(2.0)
        assert rows["copy_back"]["ratio"] == pytest.approx(1.0)

    def test_says_what_the_time_went_into_and_what_was_noted(self, call: Call, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path / "run")
        spent = {"loaders": 0.5, "between_calls": 8.0, "ranks": 0.0}
        maker.load(
            attributed=spent, processing={"A": 3.0}, notes=["a batch ran on the old weights", "\x1b[31m"]
        )
        _, out, _ = call("report", maker.done())
        assert "  of which  between_calls 8.0s, hooks of A 3.0s, loaders 500ms\n" in out
        assert "  note: a batch ran on the old weights\n" in out
        assert ESCAPE not in out

    def test_points_at_the_load_that_left_tensors_out(self, call: Call, tmp_path: Path) -> None:
        """Good by every other sign, and the only one that was not whole."""
        maker = runmaker.Maker(tmp_path / "run")
        maker.load(ranks=2)
        maker.load(ranks=2, tensors_not_sent=3, notes=["3 of 291 tensors of a complete load were not sent"])
        maker.load(ranks=2)
        code, out, _ = call("report", maker.done())
        assert code == 0
        assert re.findall(r"^\d reload +(committed[a-z ,]*?)  ", out, re.MULTILINE) == [
            "committed", "committed, in part", "committed",
        ]  # fmt: skip
        assert (
            "load 2: committed, the new weights serve, beside old values of what was not sent (tensors: 3)\n"
            in out
        )
        assert "note: 3 of 291 tensors" in out
        _, out, _ = call("report", tmp_path / "run", "--json")
        assert [load["tensors_not_sent"] for load in json.loads(out)["loads"]] == [0, 3, 0]

    def test_comparison_in_words(self, call: Call, usual: Path, good: Path) -> None:
        _, out, _ = call("report", usual, "--compare", good)
        assert re.search(r"receive +5\.0s -> +9\.9s +▲ 2\.00 times, slower", out)
        assert re.search(r"copy_back .* about equal", out)

    def test_output_says_what_it_wrote_on_stderr(self, call: Call, usual: Path, tmp_path: Path) -> None:
        code, _, err = call("report", usual, "-o", tmp_path / "r.html", "--perfetto", tmp_path / "t.json")
        assert code == 1
        assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!doctype html>")
        assert err.count("wrote ") == 2

    def test_a_file_that_cannot_be_written_is_exit_code_2(
        self, call: Call, usual: Path, tmp_path: Path
    ) -> None:
        code, _, err = call("report", usual, "-o", tmp_path / "no" / "r.html")
        assert code == 2
        assert "No such file or directory" in err

    def test_a_session_without_an_end_is_a_problem(self, call: Call, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(ended=False)
        code, out, _ = call("report", maker.done())
        assert code == 1
        assert "no end was stored: it is running, or its process died in it" in out

    def test_hostile_names_reach_a_terminal_as_text(self, call: Call, tmp_path: Path) -> None:
        _, out, _ = call("report", runmaker.hostile(tmp_path))
        assert ESCAPE not in out
        assert "\x07" not in out
        assert "\u202e" not in out
        assert "\\x1b[31mred" in out


class TestPerfetto:
    def test_is_the_trace_event_format(self, call: Call, usual: Path, tmp_path: Path) -> None:
        call("report", usual, "--perfetto", tmp_path / "t.json")
        found = json.loads((tmp_path / "t.json").read_text())
        events = found["traceEvents"]
        assert {event["ph"] for event in events} == {"M", "X", "i"}
        for event in events:
            assert isinstance(event["pid"], int)
            assert isinstance(event["tid"], int)
            assert isinstance(event["name"], str)
            if event["ph"] != "M":
                assert event["ts"] >= runmaker.START / 1e3
        sessions = [e for e in events if e.get("cat") == "session"]
        assert [round(e["dur"] / 1e6, 1) for e in sessions] == [18.0, 14.2, 15.7, 6.7]
        assert len({e["pid"] for e in sessions}) == 2  # ranks
        inside = [e for e in events if e.get("cat") == "phase" and e["pid"] == sessions[1]["pid"]]
        second = [e for e in inside if sessions[1]["ts"] <= e["ts"] < sessions[1]["ts"] + sessions[1]["dur"]]
        assert [e["name"] for e in second] == list(runmaker.PHASES)
        # phases lie one after the other, as they ran
        for one, other in itertools.pairwise(second):
            assert other["ts"] == pytest.approx(one["ts"] + one["dur"], abs=2)


def host(**more: Any) -> dict[str, Any]:
    """What the probe finds where all is well."""
    seams = [{"seam": "a", "found": True, "required": True, "state": "wrapped"},
             {"seam": "b", "found": True, "required": False, "state": "wrapped"}]  # fmt: skip
    given = {"vllm": {"version": "0.32.0", "distribution": "vllm"}, "error": None, "seams": seams, "devices": [],
             "plugin": {"registered": True, "installs": True, "error": None}, "torch": "2.13.0", "triton": "3.9.0"}  # fmt: skip
    return {**given, **more}


def only(checks: list[Check], verdict: str) -> list[Check]:
    return [check for check in checks if check.verdict == verdict]


class TestDoctor:
    def test_nothing_to_do(self) -> None:
        checks = diagnose({"WEIGHTLIFE": "1"}, host())
        assert exit_code(checks) == 0
        assert {check.name for check in checks} >= {
            "versions", "torch", "vllm", "plugin", "switch", "seams", "settings", "enforced", "runs", "devices", "triton",
            "opentelemetry", "exporter",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("environ", "more", "code", "name", "words"),
        [
            ({}, {}, 0, "switch", "calls weightlife.install"),
            ({"WEIGHTLIFE": "0"}, {}, 1, "switch", "weightlife is off"),
            ({"WEIGHTLIFE": "perhaps"}, {}, 2, "switch", "neither on nor off"),
            ({}, {"vllm": None, "plugin": None, "seams": []}, 1, "vllm", "not installed"),
            ({}, {"error": "it crashed", "plugin": None, "seams": []}, 2, "vllm", "it crashed"),
            ({}, {"vllm": {"version": "0.99.1", "distribution": "x"}}, 1, "vllm", "tested are 0.32.0"),
            ({}, {"plugin": {"registered": False, "installs": False}}, 2, "plugin", "entry point"),
            ({}, {"plugin": {"registered": True, "installs": False, "error": "E"}}, 2, "plugin", "does not load .* (E)"),
            ({}, {"seams": [{"seam": "x", "found": False, "required": True}]}, 2, "seams", "required and missing: x"),
            ({}, {"seams": [{"seam": "x", "found": False}]}, 1, "seams", "missing: x"),
            ({"WEIGHTLIFE_MODE": "observe"}, {}, 1, "enforced", "nothing would be enforced"),
            ({"WEIGHTLIFE_CASTS": "maybe"}, {}, 2, "settings", "not legal"),
            ({"WEIGHTLIFE_CAST": "strict"}, {}, 1, "settings", "is no setting"),
            ({"WEIGHTLIFE_RUNS_DIR": "/proc/nothing"}, {}, 1, "runs", "can't be kept"),
            ({}, {"devices": ["H", "H"]}, 0, "devices", "2 CUDA devices: H"),
            ({"OTEL_SDK_DISABLED": "true"}, {}, 0, "exporter", "nothing is exported"),
            ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[::1"}, {}, 1, "exporter", "no URL"),
        ],
    )  # fmt: skip
    def test_what_is_amiss_is_said(
        self, environ: dict[str, str], more: dict[str, Any], code: int, name: str, words: str
    ) -> None:
        checks = diagnose(environ, host(**more))
        assert exit_code(checks) == code
        found = [check for check in checks if check.name == name]
        assert any(re.search(words.replace("(", "\\(").replace(")", "\\)"), check.text) for check in found), (
            found
        )
        for check in only(checks, "fail") + only(checks, "warn"):
            assert check.hint, check

    def test_a_misspelt_variable_gets_its_nearest(self) -> None:
        (check,) = only(diagnose({"WEIGHTLIFE_CAST": "strict"}, host()), "warn")
        assert check.hint == "did you mean WEIGHTLIFE_CASTS?"

    def test_an_endpoint_is_tried_and_its_password_not_shown(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://user:secret@127.0.0.1:{port}/?token=secret"}
            up = diagnose(environ, host())
        down = diagnose(environ, host())
        assert [c.text for c in up if c.name == "exporter"] == [
            f"something accepts connections at 127.0.0.1:{port} (for grpc)"
        ]
        (check,) = only(down, "warn")
        assert f"127.0.0.1:{port} is not reachable" in check.text
        assert not [c for c in (*up, *down) if "secret" in c.text + c.hint]

    def test_names_from_outside_are_cleaned(self) -> None:
        bad = "\x1b[31m"
        checks = diagnose({f"WEIGHTLIFE_{bad}": "1"}, host(error=bad, devices=[bad], triton=bad, torch=bad))
        assert not [c for c in checks if ESCAPE in c.text + c.hint]

    def test_a_probe_that_crashes_or_hangs_is_an_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = subprocess.run

        def crash(command: list[str], **more: Any) -> Any:
            return real([sys.executable, "-c", "import os; os.write(2, b'oh no'); os.abort()"], **more)

        monkeypatch.setattr(subprocess, "run", crash)
        assert "ended with -6: oh no" in doctor.probe_host(20)["error"]
        monkeypatch.setattr(
            subprocess, "run", lambda c, **m: real([sys.executable, "-c", "import time; time.sleep(9)"], **m)
        )
        assert "did not import within" in doctor.probe_host(0.2)["error"]

    @pytest.mark.parametrize("command", ["doctor", "seams"])
    @pytest.mark.parametrize(
        ("more", "code"),
        [({}, 0), ({"seams": [{"seam": "x", "state": "gone"}]}, 1), ({"error": "E", "seams": []}, 2)],
    )
    def test_commands_end_with_their_code_in_text_and_json(
        self, command: str, more: dict[str, Any], code: int, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "probe_host", lambda timeout: host(**more))
        for name in [name for name in os.environ if name.startswith(("WEIGHTLIFE", "OTEL"))]:
            monkeypatch.delenv(name)
        got, out, err = call(command)
        assert got == code
        assert out + err
        got, out, _ = call(command, "--json")
        assert (got, json.loads(out)["exit_code"], json.loads(out)["schema_version"]) == (code, code, 1)


class TestTail:
    def test_once_prints_what_is_there(self, call: Call, usual: Path) -> None:
        code, out, _ = call("trace", "tail", usual, "--once")
        assert code == 1  # the last of them failed
        assert len(out.splitlines()) == 4
        assert "ABORTED" in out.splitlines()[-1]
        code, out, _ = call("trace", "tail", usual, "--once", "--last", "1", "--json")
        assert [json.loads(line)["report"]["outcome"] for line in out.splitlines()] == ["aborted"]

    def test_once_of_good_loads_is_0_and_of_nothing_1(self, call: Call, good: Path, tmp_path: Path) -> None:
        assert call("trace", "tail", good, "--once")[0] == 0
        assert call("trace", "tail", tmp_path / "nothing", "--once")[0] == 1

    def test_follows_a_run_that_begins_later_line_by_line(self, tmp_path: Path) -> None:
        folder = tmp_path / "runs"
        follower = tail.Follower(folder)
        assert list(follower.poll()) == []
        maker = runmaker.Maker(folder)
        maker.load()
        first = list(follower.poll())
        assert [s.ended for s in first] == [False, True]
        assert list(follower.poll()) == []
        maker.load(ranks=2)
        assert [s.report.rank for s in follower.poll() if s.ended] == [0, 1]
        maker.done()

    def test_half_a_line_waits_for_its_other_half(self, tmp_path: Path) -> None:
        path = runmaker.usual(tmp_path)
        (file,) = path.glob("*.rank1.sessions.jsonl")
        text = file.read_bytes()
        file.write_bytes(text[:-50])
        follower = tail.Follower(path)
        before = [s for s in follower.poll() if s.report.rank == 1 and s.ended]
        with file.open("ab") as stream:
            stream.write(text[-50:])
        after = [s for s in follower.poll() if s.ended]
        assert (len(before), len(after), follower.problems) == (0, 1, [])

    def test_a_file_that_is_turned_over_keeps_its_place(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.writer.max_file_bytes = 6000
        follower, seen = tail.Follower(tmp_path), []
        for _ in range(12):
            maker.load(layers=runmaker.some_layers(6))
            seen += [s.report.generation for s in follower.poll() if s.ended]
        maker.done()
        assert seen == list(range(1, 13))
        assert list(tmp_path.glob("*.old.jsonl"))

    def test_runs_until_it_is_interrupted(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        command = [sys.executable, "-m", "weightlife", "trace", "tail", str(tmp_path), "--interval", "0.05"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            # a shell that starts the tests in the background makes them, and what they start, deaf to it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert "waiting for the first session" in process.stderr.readline()
            maker.load()
            lines = [process.stdout.readline() for _ in range(2)]
            assert "began" in lines[0]
            assert "committed" in lines[1]
            process.send_signal(2)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.communicate()
            maker.done()


class TestDemo:
    def test_everything_is_computed_and_holds(self, call: Call, tmp_path: Path) -> None:
        code, out, _ = call("demo", "-o", tmp_path / "demo.html", "--json")
        found = json.loads(out)
        assert (code, found["held"], found["schema_version"]) == (0, True, 1)
        assert [step["serving"] for step in found["steps"]] == ["A", "B", "B", "B", "A"]
        assert [s["outcome"] for s in found["sessions"]] == [
            "committed",
            "committed",
            "aborted",
            "aborted",
            "committed",
        ]
        assert "WL201" in (tmp_path / "demo.html").read_text()

    def test_a_step_that_does_not_hold_is_seen(self, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo.Int8Linear, "forward", lambda self, x: x + float("nan"))
        code, out, _ = call("demo")
        assert code == 1
        assert "NOT EVERYTHING HELD" in out

    def test_what_is_set_for_the_users_models_does_not_matter(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WEIGHTLIFE_MODE", "observe")
        assert call("demo")[0] == 0

    def test_the_engines_demo_is_named_where_there_is_none(
        self, call: Call, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert demo.find_engine_demo() == ROOT / "examples" / "demo.py"
        monkeypatch.setattr(demo, "find_engine_demo", lambda: None)
        code, _, err = call("demo", "--engine")
        assert code == 2
        assert "from a checkout" in err


class TestManners:
    def on_a_terminal(self, args: list[str], **environ: str) -> str:
        """What the command writes where stdout and stderr are a terminal."""
        parent, child = pty.openpty()
        env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")}
        env |= {"TERM": "xterm-256color", "COLUMNS": "120", **environ}
        process = subprocess.Popen(
            [sys.executable, "-m", "weightlife", *args],
            stdout=child,
            stderr=child,
            stdin=child,
            env=env,
            cwd=ROOT,
        )
        os.close(child)
        found: list[bytes] = []

        def read() -> None:
            try:
                while data := os.read(parent, 65536):
                    found.append(data)
            except OSError:
                return  # Linux says EIO when the other end is closed

        reader = threading.Thread(target=read)
        reader.start()
        process.wait(60)
        reader.join(10)
        os.close(parent)
        return b"".join(found).decode()

    def test_colour_on_a_terminal_none_with_no_color_and_none_in_pipes(self, usual: Path) -> None:
        colour = re.compile(r"\x1b\[[\d;]*3[0-7][\d;]*m")
        assert colour.search(self.on_a_terminal(["report", str(usual)]))
        assert not colour.search(self.on_a_terminal(["report", str(usual)], NO_COLOR="1"))
        command = [sys.executable, "-m", "weightlife", "report", str(usual)]
        env = {
            **os.environ,
            "COLUMNS": "80",
            "LINES": "24",
        }  # as children of a program with readline get them
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env=env
        )
        assert ESCAPE not in done.stdout + done.stderr
        assert max(map(len, done.stdout.splitlines())) > 80  # and lines are not cut to a screen

    @staticmethod
    def in_a_pipe(args: list[str]) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR")}
        return subprocess.run(
            [sys.executable, "-m", "weightlife", *args],
            capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env={**env, "TERM": "xterm-256color"},
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("args", "code"),
        [
            (["report", "{usual}"], 1),
            (["report", "{good}"], 0),
            (["report", "{nowhere}"], 2),
            (["trace", "tail", "{usual}", "--once"], 1),
            (["trace", "tail", "{good}", "--once"], 0),
            (["doctor", "--timeout", "0.2"], 2),  # vLLM does not import in that time
            (["seams", "--timeout", "0.2"], 2),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
    )
    def test_every_command_says_the_same_in_text_in_json_and_without_colour(
        self, args: list[str], code: int, usual: Path, good: Path, tmp_path: Path
    ) -> None:
        colour = re.compile(r"\x1b\[[\d;]*(?:3[0-7]|38;[\d;]+|9[0-7])m")
        args = [a.format(usual=usual, good=good, nowhere=tmp_path / "nowhere") for a in args]
        piped = self.in_a_pipe(args)
        assert piped.returncode == code, piped.stderr
        assert ESCAPE not in piped.stdout + piped.stderr
        machine = self.in_a_pipe([*args, "--json"])
        assert machine.returncode == code, machine.stderr
        assert ESCAPE not in machine.stdout + machine.stderr
        documents = (
            machine.stdout.splitlines() if args[0] == "trace" else [machine.stdout] if machine.stdout else []
        )
        assert all(json.loads(document)["schema_version"] for document in documents)
        assert documents or machine.stderr  # what can't be read is said there
        shown = self.on_a_terminal(args, NO_COLOR="1")
        assert shown
        assert not colour.search(shown)

    @pytest.mark.parametrize("name", [name for name, _ in leaves(commands.app)])
    def test_wrong_usage_is_exit_code_2_with_nothing_on_stdout(self, name: str) -> None:
        done = self.in_a_pipe([*name.split()[1:], "--no-such-option"])
        assert done.returncode == 2
        assert done.stdout == ""
        assert "no-such-option" in done.stderr
        assert ESCAPE not in done.stderr

    def test_json_on_a_terminal_is_json(self, usual: Path) -> None:
        text = self.on_a_terminal(["report", str(usual), "--json"])
        assert json.loads(text[text.index("{") : text.rindex("}") + 1])["loads"]

    def test_every_command_has_json(self) -> None:
        for name, command in leaves(commands.app):
            assert "--json" in [opt for param in command.params for opt in param.opts], name

    def test_importing_the_package_imports_no_command_line(self) -> None:
        code = "import sys, weightlife, weightlife.cli; print([m for m in ('typer','rich','jinja2') if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT
        )
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize("name", ["typer", "rich", "jinja2"])
    def test_without_the_extra_it_says_how_to_get_it(self, name: str, usual: Path) -> None:
        # the page's library is wanted with the page only
        args = ["report", str(usual), "-o", "never.html"] if name == "jinja2" else ["--help"]
        code = f"import sys\nsys.modules[{name!r}] = None\nfrom weightlife.cli import main\nsys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 2
        assert f"needs {name}: pip install 'weightlife[cli]'" in done.stderr

    def test_the_script_and_the_module_are_the_same(self) -> None:
        import tomllib

        scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        assert scripts == {"weightlife": "weightlife.cli:main"}
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "weightlife", "--version"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        assert done.stdout == "weightlife 0.1.0\n"
        assert time.monotonic() - started < 10


class TestDocumentation:
    """docs/command-line.md against the app itself."""

    path = ROOT / "docs" / "command-line.md"

    def section(self, name: str) -> str:
        found = re.search(
            rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", self.path.read_text(), re.MULTILINE | re.DOTALL
        )
        assert found is not None, name
        return found[1]

    def test_every_command_has_a_section_and_no_other(self) -> None:
        titles = re.findall(r"^## (weightlife .+)$", self.path.read_text(), re.MULTILINE)
        assert titles == [name for name, _ in leaves(commands.app)]

    @pytest.mark.parametrize(("name", "command"), leaves(commands.app), ids=lambda value: str(value)[:30])
    def test_options_defaults_and_exit_codes_are_the_apps(self, name: str, command: Any) -> None:
        text = self.section(name)
        rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
        want = [(option(param), param.help) for param in command.params if param.name != "help"]
        assert rows == want
        summary, codes = (" ".join(part.split()) for part in command.help.split("\n\n"))
        assert summary in " ".join(text.split())
        assert codes in " ".join(text.split())
        assert all(re.search(rf"\b{code} ", codes) for code in (0, 1, 2))


def option(param: Any) -> str:
    """How an option or argument is written in the page."""
    names = ", ".join(param.opts) if param.opts[0].startswith("-") else str(param.metavar)
    value = param.metavar if param.opts[0].startswith("-") and not param.is_flag else ""
    default = (
        param.default
        if isinstance(param.default, int | float) and not isinstance(param.default, bool)
        else None
    )
    return " ".join(filter(None, (names, value or (f"{default:g}" if default is not None else ""))))
