# SPDX-License-Identifier: Apache-2.0
"""Random streams on real engines, judged by the oracle. Child process of test_fuzz.py, and a command of its own.

    python tests/integration/_fuzz_job.py --family all --streams 60        # appends to .artifacts/fuzz/results.jsonl
    python tests/integration/_fuzz_job.py --family awq --streams 43 --again --verbose

One engine a family and round; a round has its own storage, isolation and start. Seeds that a former run did (the
same family, round and number, found right) are not run again. What a stream meets depends on those before it: to
see one again run all up to it (`--streams 43 --again` for number 42).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

PLAIN: Final = (
    {"storage": "auto", "isolation": "staged", "start": "a"},
    {"storage": "pinned", "isolation": "in_place", "start": "a"},
    {"storage": "adopted", "isolation": "staged", "start": "dummy"},
    {"storage": "adopted", "isolation": "in_place", "start": "a"},
)
LEAN: Final = len(PLAIN)  # without undo
COMPILED: Final = (LEAN + 1, LEAN + 2)
RANKED: Final = (LEAN + 3, LEAN + 4)
ROUNDS: Final[tuple[dict[str, Any], ...]] = (
    *PLAIN,
    {"storage": "pinned", "isolation": "in_place", "start": "a", "undo_budget_bytes": 0},
    {"storage": "pinned", "isolation": "staged", "start": "a", "engine": {"enforce_eager": False}},
    {"storage": "pinned", "isolation": "in_place", "start": "a", "engine": {"enforce_eager": False}},
    {"storage": "pinned", "isolation": "staged", "start": "a", "engine": {"tensor_parallel_size": 2}},
    {"storage": "pinned", "isolation": "in_place", "start": "a", "engine": {"tensor_parallel_size": 2}},
)
# Families for the engines that take a minute to start: a dense one with a tie, and unquantised experts.
FEW: Final = ("qwen2tied", "mixtral")


def environment_of(chosen: dict[str, Any]) -> dict[str, str]:
    """Variables of the engine of a round, and of the cold loads that it is compared with."""
    from _run import TWO_RANKS

    return TWO_RANKS if "tensor_parallel_size" in chosen.get("engine", {}) else {}


def execute(
    family: str,
    round_number: int,
    numbers: list[int],
    root: str,
    verbose: bool = False,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run the numbered streams of a family in this process."""
    from _fuzz_bench import Bench, Wrong, _raised
    from fuzz_streams import ENTRIES, draw

    import weightlife
    from weightlife.testing import _cold, checkpoints, oracle

    chosen = ROUNDS[round_number]
    folders = checkpoints.pair(family, Path(root))
    engine = chosen.get("engine", {})
    link = Path(root) / family / "serving" if engine.get("enforce_eager") is False else None
    want = {
        side: oracle.cold(getattr(folders, side), environment=environment_of(chosen), serve_as=link, **engine)
        for side in ("a", "b")
    }
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    row = checkpoints.FAMILIES[family]
    start = "a" if row.head == "other" else chosen["start"]
    weightlife.install(
        storage=chosen["storage"],
        isolation=chosen["isolation"],
        log_level="error",
        undo_budget_bytes=chosen.get("undo_budget_bytes"),
        **(settings or {}),
    )
    from vllm import LLM

    more = {**engine, **({"load_format": "dummy"} if start == "dummy" else {})}
    kind = Bench
    if "tensor_parallel_size" in engine:
        from _fuzz_ranks import RankBench

        kind, more["worker_extension_cls"] = RankBench, "_fuzz_ranks.FuzzExtension"
    place = folders.a if link is None else _cold.point(link, folders.a)
    llm = LLM(**oracle.engine_arguments(place, **more))
    _cold.KEEP.append(llm)
    bench = kind(llm, folders, want, chosen["isolation"])
    bench.lean = chosen.get("undo_budget_bytes") == 0
    results: list[dict[str, Any]] = []
    text = ""
    if start == "dummy":
        from fuzz_streams import Item, Stream

        entry = ("iterator", "session", "layerwise")[round_number % 3]
        first = Stream(entry, tuple(Item(name, "a") for name in bench.tensors["a"]), "a")
        raised = _raised(lambda: bench.send(first))
        problem = oracle.differences(bench.fingerprint(), want["a"])
        if raised is not None or problem:
            text = f"the first load after a dummy start: {raised!r} {problem[:3]}"
    text = text or bench.routing(start == "dummy")
    if text:
        return {"results": [{"number": n, "wrong": text, "stream": ""} for n in numbers], "references": 0}
    bench.learn()
    if start == "dummy":
        bench.now, bench.serving = want["a"], dict.fromkeys(bench.facts, "a")
    else:
        bench.now, bench.serving = bench.fingerprint(), dict.fromkeys(bench.facts, "a")
        bench.compare(bench.now, want["a"], "after the first load")
    for number in numbers:
        sides = {bench.serving[n] for n, f in bench.facts.items() if f.taken}
        stream = draw(
            f"{family}:{round_number}:{number}",
            bench.facts,
            served=sides.pop() if len(sides) == 1 else "",
            ordered="order" in row.tags,
            staged=bench.staged,
            # A dummy loader reads no files; a session of ours needs the model in this process.
            entries=[
                e
                for e in ENTRIES
                if not (e == "path" and start == "dummy") and not (e == "session" and kind is not Bench)
            ],
        )
        began = time.perf_counter()
        entry = {"number": number, "stream": stream.describe(), "wrong": ""}
        if verbose:
            print(number, stream.describe(), [str(i) for i in stream.items if i.change or i.sent], flush=True)
        try:
            entry |= bench.run(stream)
        except Wrong as error:
            entry["wrong"] = str(error)
        except Exception as error:  # noqa: BLE001 - an engine that broke is a verdict, too
            entry["wrong"] = f"the engine raised {type(error).__name__}: {str(error)[:400]}"
            traceback.print_exc()
        if entry["wrong"]:
            entry["items"] = [str(i) for i in stream.items if i.change or i.sent or i.side != stream.target][
                :20
            ]
            try:
                bench.reset()
            except Exception as error:  # noqa: BLE001 - this engine is of no use any more
                entry["wrong"] += f"; and no way back: {type(error).__name__}: {str(error)[:300]}"
                results.append(entry)
                break
        entry["seconds"] = round(time.perf_counter() - began, 3)
        results.append(entry)
        scratch = os.environ.get("WEIGHTLIFE_TEST_SCRATCH")
        if scratch and len(results) % 10 == 0:
            (Path(scratch) / "progress").write_text(json.dumps(results))
    return {"results": results, "references": bench.references, "poisonings": bench.poisonings}


def run(
    family: str, round_number: int, numbers: Sequence[int], root: Path, cache: Path, *, timeout: float = 600.0,
    verbose: bool = False, settings: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Verdicts of the numbered streams, each on an engine that a former one left right."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    from _run import _alone

    from weightlife.testing import checkpoints, oracle

    os.environ["WEIGHTLIFE_TESTING_CACHE"] = str(cache)
    chosen = ROUNDS[round_number]
    engine, environment = chosen.get("engine", {}), environment_of(chosen)
    link = root / family / "serving" if engine.get("enforce_eager") is False else None
    with _alone(None if link is None else str(link)):
        for folder in checkpoints.pair(family, root):
            oracle.cold(folder, environment=environment, serve_as=link, **engine)
        return _streams(family, round_number, numbers, root, cache, timeout, verbose, settings)


def _streams(
    family: str, round_number: int, numbers: Sequence[int], root: Path, cache: Path, timeout: float, verbose: bool,
    settings: dict[str, str] | None,
) -> list[dict[str, Any]]:  # fmt: skip
    from weightlife.testing import _cold

    chosen = ROUNDS[round_number]
    engine, environment = chosen.get("engine", {}), environment_of(chosen)
    left, out = list(numbers), []
    while left:
        order = {
            "call": "_fuzz_job:execute",
            "path": [str(HERE)],
            "arguments": {
                "family": family, "round_number": round_number, "numbers": left, "root": str(root), "verbose": verbose, "settings": settings,
            },
            "environment": {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WEIGHTLIFE_TESTING_CACHE": str(cache), **environment,
            },
        }  # fmt: skip
        try:
            fresh = _cold.needs_fresh(engine, environment)
            done = _cold.run(order, fresh=fresh, timeout=timeout)["results"]
        except _cold.JobError as error:
            done = error.progress or []
            number = next(n for n in left if n not in {d["number"] for d in done})
            text = f"the process ended with {error.how}: {error.output[-2000:]}"
            done.append({"number": number, "stream": "", "wrong": text})
        out += done
        seen = {d["number"] for d in done}
        left = [n for n in left if n not in seen]
    return out


def _done(path: Path) -> set[tuple[str, int, int]]:
    if not path.exists():
        return set()
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {(r["family"], r["round"], r["number"]) for r in rows if not r["wrong"]}


def main() -> int:
    """The command line; 1 when a stream was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="all", help="names with commas, or all")
    parser.add_argument("--streams", type=int, default=60, help="a family")
    parser.add_argument(
        "--round",
        type=int,
        default=-1,
        help=f"settings: 0 to {len(ROUNDS) - 1}; default: the first {len(PLAIN)} by turns",
    )
    parser.add_argument("--seeds", default="", help="numbers with commas instead of --streams")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further family after this")
    parser.add_argument("--again", action="store_true", help="run also what a former run did")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(REPOSITORY))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(
        ":"
    )
    from weightlife.testing import checkpoints

    results = REPOSITORY / ".artifacts" / "fuzz" / "results.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    families = list(checkpoints.FAMILIES) if options.family == "all" else options.family.split(",")
    done = set() if options.again else _done(results)
    began, wrong, counts = time.monotonic(), 0, Counter[str]()
    for place, family in enumerate(families):
        if time.monotonic() - began > 60 * options.minutes:
            print(f"{len(families) - place} families are left", flush=True)
            break
        number = (
            options.round if options.round >= 0 else list(checkpoints.FAMILIES).index(family) % len(PLAIN)
        )
        seeds = [int(n) for n in options.seeds.split(",")] if options.seeds else range(options.streams)
        wanted = [n for n in seeds if (family, number, n) not in done]
        if not wanted:
            continue
        started = time.monotonic()
        found = run(
            family, number, wanted, REPOSITORY / ".artifacts" / "checkpoints",
            REPOSITORY / ".artifacts" / "oracle", verbose=options.verbose,
        )  # fmt: skip
        with results.open("a") as file:
            for row in found:
                file.write(json.dumps({"family": family, "round": number, **row}) + "\n")
        bad = [row for row in found if row["wrong"]]
        wrong += len(bad)
        counts.update(row.get("outcome", "wrong") for row in found)
        print(
            f"{family}: {len(found)} streams, {len(bad)} wrong, {time.monotonic() - started:.0f} s",
            flush=True,
        )
        for row in bad[:6]:
            print(
                f"  {row['number']} {row['stream']} {row.get('items', [])}\n     {row['wrong'][:700]}",
                flush=True,
            )
    print(dict(counts), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
