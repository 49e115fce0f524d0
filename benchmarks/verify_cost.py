# SPDX-License-Identifier: Apache-2.0
"""What `weightlife.verify` costs, against a stock reload of the same checkpoint in another process, in turn.

    python benchmarks/verify_cost.py [--models dense moe] [--rounds 5] [--write] [--json]

Time is held against stock's `reload_weights` by path; memory against the largest group of layers that has to be
rebuilt together. What it says is checked, too: equal for the checkpoint that serves, different for the other one, and
the same answers after it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import _results
import models
from _pair import Child

SCHEMA_VERSION = 1
CACHE = Path(__file__).resolve().parent.parent / ".artifacts" / "bench-models"
GOAL = 1.3
SAMPLE = 0.05


def measure(name: str, cache: Path, rounds: int, threads: int | None) -> dict[str, Any]:
    """Alternations of a stock reload, a whole verification and one of a sample.

    Raises:
        ChildError: a child failed. RuntimeError: a verification was wrong, or changed what serves.
    """
    folders = {side: str(path) for side, path in models.folders(models.MODELS[name], cache).items()}
    stock: list[float] = []
    whole: list[dict[str, Any]] = []
    sampled: list[float] = []
    with contextlib.ExitStack() as stack:
        pair = {}
        for side in ("stock", "weightlife"):
            pair[side] = stack.enter_context(Child(side, cache / f"{name}.verify.log", threads))
            started = pair[side].ask("start", model=folders["a"])
            answer = started["answer"]
        for number in range(rounds + 2):
            last = number > rounds
            which = "ba"[number % 2]
            one = pair["stock"].measure("reload", release=last, path=folders[which], source="path", mode=[])
            two = pair["weightlife"].measure("verify", release=last, path=folders["a"])
            part = pair["weightlife"].ask("verify", path=folders["a"], layers=SAMPLE, seed=number)
            for said in (two, part):
                if not said["ok"] or said["answer"] != answer:
                    raise RuntimeError(f"{name}: verify of what serves says {said}")
            if last:
                memory = {"stock": one["peak_bytes"], "verify": two["peak_bytes"]}
            elif number:  # the first round warms both up
                stock.append(one["seconds"])
                whole.append(two)
                sampled.append(part["seconds"])
        hooks = pair["stock"].ask("hooks")
        other = pair["weightlife"].ask("verify", path=folders["b"])
        if other["ok"] or other["answer"] != answer:
            raise RuntimeError(f"{name}: verify against another checkpoint found nothing")
    seconds = [item["seconds"] for item in whole]
    ratios = [mine / theirs for mine, theirs in zip(seconds, stock, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "model": name, "title": models.MODELS[name].title, "stock": statistics.median(stock),
        "verify": statistics.median(seconds), "ratio": middle, "low": low, "high": high,
        "sampled": statistics.median(sampled), "memory": memory, "hooks": hooks, "largest": whole[0]["largest_bytes"],
        "bytes": whole[0]["bytes"], "probed": whole[0]["probed"], "differences": other["differences"],
        "phases": {key: statistics.median(item["phases"][key] for item in whole) for key in whole[0]["phases"]},
    }  # fmt: skip


_INTRODUCTION = """\
## What verify costs

Written by `benchmarks/verify_cost.py --write`; do not edit. `weightlife.verify(llm, path)` of the checkpoint that
serves, against stock's `reload_weights` by path in another process, in turn; medians of {rounds} rounds. The ratio is the
median of those of pairs, with its quartiles. *Peak*: highest private memory over the level before, what the allocator
kept given back first. *Largest group*: what has to be rebuilt together, as the constructor made it. *Sample*: with
`layers={sample}`. Each verification said that what serves is equal, the last one, against the other checkpoint, found
the differences, and the engine's answers stayed what they were.

Goals: at most {goal}x a stock reload; at most the largest group of extra memory, and what that leaves to the host: *its
own hook* is what stock needs for that layer in a cold load, loaded and packed.
**Missed where the table says so.** Memory: tensors that fill a parameter, alone or with others (the experts of a layer), are
no copies, but pages of their files, so a group costs what its hook makes of it, which is the group once more and can't be
less. What is over it: in a head of 152,000 rows what its kernel needs to answer (4 to 5 MiB, for 2 rows as for 16); in a layer of experts the pages in
which two of them meet (0.8 MiB), and what a verification knows of the model (2 MiB). Time: on top of a load, what serves is read once,
and packed memory of both sides by its kernels. Stock's reload of the mixture never packs the experts again.
"""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    titles = ["model", "stock reload", "verify", "ratio (quartiles)", "goal", "peak: stock", "peak: verify"]
    titles += ["largest group", "goal", "its own hook", "sample"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        met = "met" if row["ratio"] <= GOAL else "missed"
        peak = row["memory"]["verify"]
        room = "" if peak is None else f" ({peak / row['largest']:.2f}x)"
        fits = "unknown" if peak is None else "met" if peak <= row["largest"] else "missed"
        lines.append(
            f"| {row['title']} | {row['stock'] * 1e3:.0f} ms | {row['verify'] * 1e3:.0f} ms "
            f"| {row['ratio']:.2f}x ({row['low']:.2f} to {row['high']:.2f}) | <= {GOAL}x: {met} "
            f"| {_mib(row['memory']['stock'])} | {_mib(peak)}{room} | {_mib(row['largest'])} "
            f"| <= 1x: {fits} | {_mib(row['hooks']['peak_bytes'])} "
            f"| {row['sampled'] * 1e3:.0f} ms |"
        )
    lines += [""]
    for row in rows:
        spent = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in row["phases"].items())
        lines.append(
            f"- {row['title']}: {_mib(row['bytes'])} compared bit by bit, {row['probed']} layers probed, "
            f"{row['differences']} differences found against the other checkpoint; {spent}"
        )
    return "\n".join(lines)


def _mib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**20:.0f} MiB"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["dense", "moe"], choices=sorted(models.MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write its section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    cache = Path(os.environ.get("WEIGHTLIFE_BENCH_CACHE") or CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    rows = [measure(name, cache, options.rounds, options.threads) for name in options.models]
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "rows": rows}))
        return
    text = table(rows)
    print(text)
    if options.write:
        about = _INTRODUCTION.format(rounds=options.rounds, sample=SAMPLE, goal=GOAL)
        day = datetime.now(timezone.utc).date().isoformat()
        _results.write("verify", f"{about}\n{day}: {_results.machine()}.\n\n{text}")


if __name__ == "__main__":
    sys.exit(main())
