# SPDX-License-Identifier: Apache-2.0
"""``weightlife audit``: what the installed vLLM does after a load, class by class, and whether it may be done again.

The work is done by ``weightlife.hosts.vllm.audit`` in a process of its own. Where that dies in native code, it is
started again without the layer that it died in, which is then a finding like any other.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from weightlife.cli.output import BAD, FAILED, GOOD, doing, emit_json, stderr, stdout, text
from weightlife.config import PREFIX

__all__ = ["audit", "collect", "exit_code", "rows"]

SCHEMA_VERSION = 1
VERDICTS = ("unsafe", "rebuild", "direct", "not run")
MAX_CRASHES = 16
_STYLES = {"unsafe": "red", "rebuild": "green", "direct": "green", "not run": ""}


def _lines(orders: Mapping[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """What one child says, line by line; the last is `ended`, with its exit code (None: it took too long)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    environment.update(WEIGHTLIFE="0", VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    said: queue.Queue[str | None] = queue.Queue()
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "weightlife.hosts.vllm.audit", json.dumps(orders)],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                said.put(line)
            said.put(None)

        threading.Thread(target=read, daemon=True).start()
        code: int | None = None
        try:
            while True:
                line = said.get(timeout=timeout)
                if line is None:
                    code = child.wait()
                    break
                yield json.loads(line)
        except queue.Empty:
            pass
        finally:
            child.kill()
            child.wait()
        errors.seek(0)
        tail = errors.read()[-2000:].decode("utf-8", "replace").strip().splitlines()[-1:]
        yield {"ended": code, "last": "".join(tail)}


def collect(only: str = "", checkpoints: tuple[str, ...] = (), timeout: float = 120.0) -> dict[str, Any]:
    """Every recipe that was run, with crashes as findings. Plain data.

    Args:
        only: recipes whose name has this in it.
        checkpoints: folders whose whole model is run, too.
        timeout: seconds that one recipe may take.
    """
    out: dict[str, Any] = {"vllm": None, "error": None, "recipes": []}
    skip: list[str] = []
    finished = False
    while not finished and len(skip) <= MAX_CRASHES:
        current = ""
        known = {recipe["recipe"] for recipe in out["recipes"]}
        orders = {"skip": sorted(known), "only": only, "checkpoints": list(checkpoints)}
        for line in _lines(orders, timeout):
            if "vllm" in line:
                out["vllm"] = line["vllm"]
            elif "begin" in line:
                current = line["begin"]
            elif "recipe" in line:
                out["recipes"].append(line)
                current = ""
            elif "error" in line:
                out["error"], finished = line["error"], True
            elif "done" in line:
                finished = True
            elif "ended" in line and not finished:
                why = "it took too long" if line["ended"] is None else f"exit code {line['ended']}"
                if not current:
                    out["error"], finished = (
                        f"the process ended before its work: {why} ({line['last']})",
                        True,
                    )
                    break
                skip.append(current)
                out["recipes"].append(
                    {"recipe": current, "built": True, "forced": "", "classes": [], "verdict": "unsafe",
                     "why": f"the process died in it: {why}", "crashed": True}
                )  # fmt: skip
    return out


def rows(found: Sequence[Mapping[str, Any]], ran: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a class: the worst verdict of what it took part in, or why it was not run and what its text says."""
    by_class: dict[str, list[Mapping[str, Any]]] = {}
    for recipe in ran["recipes"]:
        for name in dict.fromkeys([*recipe.get("classes", ()), *filter(None, [recipe.get("class")])]):
            by_class.setdefault(name, []).append(recipe)
    out = []
    for item in found:
        took_part = by_class.get(item["name"], [])
        proven = [r for r in took_part if r.get("verdict")]
        row = {**item, "verdict": "not run", "how": "read", "recipe": "", "forced": "", "why": ""}
        if proven:
            worst = min(proven, key=lambda r: (VERDICTS.index(r["verdict"]), bool(r["forced"])))
            row.update({key: worst[key] for key in ("verdict", "recipe", "forced", "why")}, how="ran")
        elif took_part:
            row.update({key: took_part[0][key] for key in ("recipe", "forced", "why")})
        elif item["reads"] == "abstract":
            row["why"] = "abstract: there is nothing to run"
        else:
            row["why"] = f"nothing that can be built here reaches it; its text {_WORDS[item['reads']]}"
        out.append(row)
    return sorted(out, key=lambda row: (VERDICTS.index(row["verdict"]), row["name"]))


_WORDS = {"nothing": "does nothing", "delegates": "hands over to another hook", "writes": "changes the layer"}


def exit_code(ran: Mapping[str, Any], table: list[dict[str, Any]]) -> int:
    """0: nothing that ran is unsafe; 1: something is; 2: nothing could be run."""
    if ran["error"] or not ran["recipes"]:
        return FAILED
    bad = any(row["verdict"] == "unsafe" and not row["forced"] for row in table)
    return BAD if bad or any(r.get("crashed") and not r["forced"] for r in ran["recipes"]) else GOOD


def audit(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with a schema_version instead of text.")
    ] = False,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Run the whole model of a checkpoint, too. Repeat for several."),
    ] = None,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Build only layers whose name has this in it.")
    ] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one layer may take.")] = 120.0,
) -> None:
    """Run vLLM's post-load hooks twice on the same weights, and say which are direct, rebuild or unsafe.

    Exit code: 0 nothing that this machine would run is unsafe; 1 something is; 2 vLLM can't be run here.
    """
    from weightlife.hosts.vllm.hooks import implementations

    found = [vars(item) for item in implementations()]
    if not found:
        stderr().print(text("weightlife: vLLM is not installed", "red"))
        raise typer.Exit(FAILED)
    with doing("building layers, and loading each of them twice"):
        ran = collect(only, tuple(str(path) for path in checkpoint or ()), timeout)
    table = rows(found, ran)
    code = exit_code(ran, table)
    if as_json:
        emit_json({"schema_version": SCHEMA_VERSION, "exit_code": code, "vllm": ran["vllm"], "error": ran["error"],
                   "classes": table, "recipes": ran["recipes"]})  # fmt: skip
        raise typer.Exit(code)
    if ran["error"]:
        stderr().print(text(f"weightlife: {ran['error']}", "red", 500))
        raise typer.Exit(code)
    _print(ran, table)
    raise typer.Exit(code)


def _print(ran: Mapping[str, Any], table: list[dict[str, Any]]) -> None:
    out = stdout()
    shown = Table("class", "verdict", "in", "why", box=None, padding=(0, 2, 0, 0))
    for row in table:
        if row["verdict"] != "not run":
            recipe = f"{row['recipe']} (forced)" if row["forced"] else row["recipe"]
            shown.add_row(
                text(row["name"].partition(":")[2]), text(row["verdict"], _STYLES[row["verdict"]]), text(recipe),
                text(row["why"], limit=120),
            )  # fmt: skip
    out.print(shown)
    for recipe in ran["recipes"]:
        if recipe.get("crashed"):
            out.print(text(f"crashed: {recipe['recipe']}: {recipe['why']}", "red", 300))
    counts = Counter(row["verdict"] for row in table)
    words = ", ".join(f"{counts[name]} {name}" for name in VERDICTS)
    out.print(text(f"vLLM {ran['vllm']}: {len(table)} classes with a hook of their own: {words}.", limit=300))
    note = (
        "A verdict is of the layer that a class took part in. 'forced': vLLM would not choose it on this machine. "
        "Of what was not run, --json says what the source does; that is no proof."
    )
    out.print(text(note, limit=300))
