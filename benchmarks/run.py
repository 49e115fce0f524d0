# SPDX-License-Identifier: Apache-2.0
"""Measure weightlife against stock vLLM, paired in one run.

    python benchmarks/run.py                  everything, about ten minutes on two cores
    python benchmarks/run.py --quick          small models, three alternations, about two minutes
    python benchmarks/run.py --only dense:reload
    python benchmarks/run.py --write          also write benchmarks/RESULTS.md
    python benchmarks/run.py --json           print plain data instead of tables (also kept as last.json in the cache)

Needs Linux for the figures of memory. Checkpoints are made on the first run and kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _render
import _results
import models
from _cases import CASES, Plan, Row, run
from _pair import ChildError

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA_VERSION = 1
HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".artifacts" / "bench-models"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"models: {', '.join(models.MODELS)}; cases: {', '.join(CASES)}",
    )
    parser.add_argument("--quick", action="store_true", help="small models and three alternations")
    parser.add_argument(
        "--only", action="append", metavar="CASE", help="MODEL, CASE or MODEL:CASE; may be repeated"
    )
    parser.add_argument("--rounds", type=int, help="alternations (5; 3 with --quick)")
    parser.add_argument(
        "--threads", type=int, help="OpenMP threads of each engine (the host's choice: one a core)"
    )
    parser.add_argument(
        "--cache", type=Path, help="where checkpoints are kept ($WEIGHTLIFE_BENCH_CACHE, else .artifacts)"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("--json", action="store_true", help="print plain data, samples included")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing, render what --json printed"
    )
    out = parser.parse_args(words)
    if out.rounds is not None and out.rounds < 2:
        parser.error("--rounds: at least 2 (A and B are both needed)")
    return out


def chosen(only: Sequence[str], quick: bool) -> dict[str, frozenset[str]]:
    """Which cases of which models. Raises SystemExit for a word that names neither."""
    default = ("dense-small", "moe-small") if quick else ("dense", "moe")
    out: dict[str, set[str]] = {}
    for word in only or [""]:
        left, _, right = word.partition(":")
        names = (left,) if left in models.MODELS else default
        case = right if left in models.MODELS else left
        if case and case not in CASES:
            raise SystemExit(
                f"{word!r}: a model ({', '.join(models.MODELS)}), a case ({', '.join(CASES)}) or both"
            )
        for name in names:
            out.setdefault(name, set()).update([case] if case else CASES)
    return {name: frozenset(cases) for name, cases in out.items()}


def machine(versions: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What it ran on, without names of machines or folders."""
    from weightlife._version import __version__

    cpu = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "memory_gib": pages / 2**30,
        "weightlife": __version__,
        "rounds": rounds,
        **versions,
    }


def busy() -> tuple[float, float]:
    """CPU seconds used by the whole machine, and by this process and its ended children (Linux; else zeros)."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    ticks = os.sysconf("SC_CLK_TCK")
    own = os.times()
    used = sum(fields) - fields[3] - fields[4]
    return used / ticks, own.user + own.system + own.children_user + own.children_system


def measure(options: argparse.Namespace, rounds: int, cache: Path) -> dict[str, Any]:
    """Run what was asked for. Raises ChildError after printing the end of the log."""
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {message}", file=sys.stderr, flush=True)

    wanted = chosen(options.only or [], options.quick)
    checkpoints = {}
    for name in wanted:
        say(f"{name}: checkpoints ({models.MODELS[name].nbytes / 2**20:.0f} MiB each)")
        checkpoints[name] = models.folders(models.MODELS[name], cache)
    rows: list[Row] = []
    versions: dict[str, Any] = {}
    used, began = busy(), time.monotonic()
    for name, cases in wanted.items():
        log = cache / f"{name}.log"
        log.write_text("")
        try:
            more, versions = run(name, checkpoints[name], Plan(rounds, cases, log, say, options.threads))
        except ChildError:
            print(log.read_text()[-3000:], file=sys.stderr)
            raise
        rows += more
    after = busy()
    others = (after[0] - used[0]) - (after[1] - used[1])
    share = max(0.0, others / ((time.monotonic() - began) * (os.cpu_count() or 1))) if after[0] else None
    say("done")
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": machine(versions, rounds),
        "other_load": share,
        "rows": [row.to_dict() for row in rows],
    }


def main() -> int:
    options = arguments()
    cache = options.cache or Path(os.environ.get("WEIGHTLIFE_BENCH_CACHE") or CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    if options.show:
        result = json.loads(options.show.read_text())
        if result.get("schema_version") != SCHEMA_VERSION:
            raise SystemExit(
                f"this file has schema version {result.get('schema_version')}, not {SCHEMA_VERSION}"
            )
    else:
        try:
            result = measure(options, options.rounds or (3 if options.quick else 5), cache)
        except ChildError as error:
            print(error, file=sys.stderr)
            return 1
        (cache / "last.json").write_text(json.dumps(result))
    rows = [Row.from_dict(row) for row in result["rows"]]
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(_render.as_text(rows, result["machine"], result["other_load"]))
    if options.write:
        _results.write("stock", _render.as_markdown(rows, result["machine"], result["other_load"]))
    # A wrong or failed measurement is a failure of the run, not a footnote.
    return int(any(row.error or not row.exact.get("weightlife", True) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
