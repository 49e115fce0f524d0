# SPDX-License-Identifier: Apache-2.0
"""The commands. Each has ``--json``, and ends with one of three codes (``output.GOOD``, ``BAD``, ``FAILED``)."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from weightlife._version import __version__
from weightlife.cli import manifest, show
from weightlife.cli import verify as verify_command
from weightlife.cli.audit import audit
from weightlife.cli.output import BAD, FAILED, GOOD, doing, emit_json, stderr, stdout, text
from weightlife.errors import WeightlifeError
from weightlife.runs import view
from weightlife.runs.reader import MAX_SESSIONS, read_run

__all__ = ["app", "run"]

app = typer.Typer(
    name="weightlife",
    help="What happens to a model's weights while it serves: look at stored loads, and check an installation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(help="Follow what the processes of a run store.", no_args_is_help=True)
app.add_typer(trace_app, name="trace")
app.add_typer(manifest.app, name="manifest")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON with a schema_version instead of text.")]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The directory that WEIGHTLIFE_RUNS_DIR names, or a file in it.")
]


def run() -> int:
    """The whole command line; returns the exit code."""
    try:
        app(standalone_mode=True)
    except WeightlifeError as error:
        stderr().print(text(f"weightlife: {error.message}", "red", 2000))
        stderr().print(text(f"next: {error.hint}", "", 1000))
        return FAILED
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else GOOD if done.code is None else FAILED
    return GOOD


def _version(wanted: bool) -> None:
    if wanted:
        print(f"weightlife {__version__}")
        raise typer.Exit(GOOD)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# -- report ----------------------------------------------------------------------------------------------------------


@app.command()
def report(
    path: RunPath,
    html: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write one self-contained HTML file."),
    ] = None,
    as_json: JsonFlag = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Compare with another run, as what was before.")
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Sessions to read, the newest.")] = MAX_SESSIONS,
) -> None:
    """Show the loads of a run: where time and bytes went, what failed, and what to do next.

    Exit code: 0 the last load of every model is good; 1 it is not, or there is none; 2 the run can't be read.
    """
    with doing("reading the run"):
        found = read_run(path, last)
        updates = view.updates(found)
        other = None if compare is None else read_run(compare, last)
    others = [] if other is None else view.updates(other)
    if html is not None:
        from weightlife.cli.page import render

        with doing("writing the page"):
            _write(html, render(found, updates, None if other is None else (other, others)))
    if perfetto is not None:
        import json

        from weightlife.cli.perfetto import trace_events

        _write(perfetto, json.dumps(trace_events(updates)))
    compared = None if other is None else view.compare(updates, others)
    if as_json:
        emit_json({**view.to_dict(found, updates), "comparison": compared})
    else:
        show.print_run(found, updates, compared)
        for written in (html, perfetto):
            if written is not None:
                stderr().print(text(f"wrote {written}", limit=1000))
    last_of = {u.first.model: u for u in updates}
    raise typer.Exit(GOOD if last_of and all(u.good for u in last_of.values()) else BAD)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        stderr().print(text(f"weightlife: {path}: {error.strerror}", "red", 1000))
        raise typer.Exit(FAILED) from None


# -- doctor and seams ------------------------------------------------------------------------------------------------


Timeout = Annotated[float, typer.Option(min=1, help="Seconds that importing vLLM may take.")]
_MARKS = {"ok": ("ok", "green"), "info": ("--", ""), "warn": ("!!", "yellow"), "fail": ("XX", "red")}


@app.command()
def doctor(as_json: JsonFlag = False, timeout: Timeout = 180.0) -> None:
    """Check this environment: versions, plugin, seams, settings, exporter, devices, and what would be enforced.

    Exit code: 0 nothing to do; 1 it works, and something needs a look; 2 loads would not be covered.
    """
    from weightlife.cli import doctor as checks

    with doing("importing vLLM in a process of its own"):
        host = checks.probe_host(timeout)
    found = checks.diagnose(os.environ, host)
    code = checks.exit_code(found)
    if as_json:
        emit_json(
            {"schema_version": 1, "exit_code": code, "checks": [asdict(c) for c in found], "host": host}
        )
        raise typer.Exit(code)
    out = stdout()
    for check in found:
        mark, style = _MARKS[check.verdict]
        out.print(
            Text(f"{mark} ", style=style)
            .append(f"{check.name:<14}")
            .append_text(text(check.text, limit=700)),
            soft_wrap=True,
        )
        if check.hint:
            style = "bold" if check.verdict in ("warn", "fail") else "dim"
            out.print(text(f"   {'':<14}next: {check.hint}", style, 500), soft_wrap=True)
    out.print(text({GOOD: "In order.", BAD: "It works; what is marked !! needs a look.",
                    FAILED: "Loads would not be covered: see XX."}[code]))  # fmt: skip
    raise typer.Exit(code)


@app.command()
def seams(as_json: JsonFlag = False, timeout: Timeout = 180.0) -> None:
    """List the places where vLLM is wrapped, and whether this version has them.

    Exit code: 0 all are there; 1 one that is not required is missing; 2 a required one is, or vLLM does not import.
    """
    from weightlife.cli import doctor as checks

    with doing("importing vLLM in a process of its own"):
        host = checks.probe_host(timeout)
    rows = checks.seam_rows(host)
    missing = [row for row in rows if not row.get("found")]
    code = FAILED if not rows or any(row.get("required") for row in missing) else BAD if missing else GOOD
    if as_json:
        emit_json(
            {
                "schema_version": 1,
                "exit_code": code,
                "vllm": host.get("vllm"),
                "error": host.get("error"),
                "seams": rows,
            }
        )
        raise typer.Exit(code)
    if not rows:
        stderr().print(text(f"weightlife: {host.get('error') or 'vLLM is not installed'}", "red", 500))
        raise typer.Exit(code)
    table = Table("seam", "state", "required", "where", "why", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(
            text(row.get("seam")),
            text(row.get("state"), "green" if row.get("found") else "red"),
            text("yes" if row.get("required") else "no"),
            text(row.get("target")),
            text(row.get("why")),
        )
    stdout().print(table)
    raise typer.Exit(code)


# -- trace tail ------------------------------------------------------------------------------------------------------


@trace_app.command()
def tail(
    path: RunPath,
    as_json: JsonFlag = False,
    once: Annotated[bool, typer.Option("--once", help="Print what is there and end.")] = False,
    last: Annotated[int, typer.Option(min=0, help="Sessions to print of those that are there already.")] = 10,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 0.5,
) -> None:
    """Print every load as it begins and ends, from the files of a run. Ctrl-C ends it.

    Exit code: 0 ended by Ctrl-C, or with --once: all ended well; 1 with --once: there is none, or one did not; 2 a file
    can't be read.
    """
    from weightlife.cli.tail import Follower

    follower = Follower(path)
    known = sorted(follower.poll(), key=lambda s: s.start_ns)
    ended = {(s.report.session_id, s.report.rank, s.pid) for s in known if s.ended}
    # a start whose end is there as well says nothing
    known = [s for s in known if s.ended or (s.report.session_id, s.report.rank, s.pid) not in ended]
    shown = known[-last:] if last else []
    for session in shown:
        show.print_session(session, as_json)
    show.print_problems(follower.problems)
    if once:
        good = bool(known) and all(s.report.outcome in ("committed", "observed") for s in shown)
        raise typer.Exit(GOOD if good else BAD)
    if not known:
        stderr().print(text(f"waiting for the first session in {path}", limit=1000))
    try:
        while True:
            time.sleep(interval)
            for session in follower.poll():
                show.print_session(session, as_json)
            show.print_problems(follower.problems)
    except KeyboardInterrupt:
        raise typer.Exit(GOOD) from None


# -- demo ------------------------------------------------------------------------------------------------------------


@app.command()
def demo(
    html: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the report of the demo's loads."),
    ] = None,
    as_json: JsonFlag = False,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="The demo on a real vLLM engine; needs vLLM and a checkout of the repository."
        ),
    ] = False,
) -> None:
    """Swap a small module's weights, break two updates on purpose, and look what serves: two seconds, no vLLM.

    Exit code: 0 everything held; 1 it did not; 2 the demo can't run here.
    """
    import tempfile

    from weightlife.cli import demo as stage

    if engine:
        found = stage.find_engine_demo()
        if found is None:
            stderr().print(
                text("weightlife: the demo on an engine is not part of the installed package", "red")
            )
            stderr().print(
                text("next: run examples/demo.py from a checkout, or this command without --engine")
            )
            raise typer.Exit(FAILED)
        raise typer.Exit(GOOD if stage.run_engine_demo(found, as_json=as_json) == 0 else BAD)
    with tempfile.TemporaryDirectory(prefix="weightlife-demo-") as folder:
        with doing("loading, swapping, breaking"):
            steps = stage.play(Path(folder))
        import weightlife

        weightlife.uninstall()  # closes the files
        kept = read_run(folder)
        if html is not None:
            from weightlife.cli.page import render

            _write(html, render(kept, view.updates(kept)))
    held = all(step.expected for step in steps)
    if as_json:
        emit_json({"schema_version": 1, "held": held, "steps": [asdict(step) for step in steps],
                   "sessions": [s.raw for s in kept.sessions]})  # fmt: skip
        raise typer.Exit(GOOD if held else BAD)
    table = Table("step", "what happened", "equal to a cold load?", box=None, padding=(0, 2, 0, 0))
    for step in steps:
        verdict = f"yes, of {step.serving}" if step.equal else f"NO, should be {step.serving}"
        table.add_row(
            text(step.title),
            text(step.raised or "done", limit=110),
            text(verdict, "green" if step.expected else "red"),
        )
    out = stdout()
    out.print(table)
    out.print(text("Everything held." if held else "NOT EVERYTHING HELD."))
    if html is not None:
        stderr().print(text(f"wrote {html}", limit=1000))
    raise typer.Exit(GOOD if held else BAD)


# -- audit and verify -----------------------------------------------------------------------------------------------

app.command()(audit)
verify_command.register(app)
