# SPDX-License-Identifier: Apache-2.0
"""Start one engine, reload it by several ways in turn, and say after each whether it is exact.

    python tests/integration/_run.py --family mixtral --ways path,iterator --weightlife off
    python tests/integration/_run.py --family qwen2 --ways all --storage adopted --compiled

The tests call `execute` here, through `weightlife.testing._cold`, in a child process per engine: a crash
fails one test, and nothing leaks into the next.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


# vLLM binds the threads of two ranks to two NUMA nodes, which a small machine does not have.
SEPARATE: dict[str, str] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_RANKS: dict[str, str] = {**SEPARATE, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def job(
    family: str,
    ways: Sequence[str],
    root: Path,
    *,
    weightlife: dict[str, Any] | None = None,
    start: str = "a",
    engine: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    want: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The order for `_cold.run`.

    Args:
        weightlife: arguments of `weightlife.install`, or None for stock vLLM.
        start: "a" to load checkpoint A first, "dummy" for `load_format="dummy"`.
        engine: arguments of `LLM` that matter for the answer (they go to the cold load too).
        environment: variables of the child and of the cold load.
        want: fingerprints of cold loads by "a" and "b", where they are not those that `oracle.cold` keeps.
    """
    return {
        "call": "_run:execute",
        "path": [str(HERE)],
        "arguments": {
            "family": family,
            "ways": list(ways),
            "root": str(root),
            "weightlife": weightlife,
            "start": start,
            "engine": engine or {},
            "environment": environment or {},
            "serve_as": _serve_as(root / family) if (engine or {}).get("enforce_eager") is False else None,
            "want": want,
        },
        "environment": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "WEIGHTLIFE_TESTING_CACHE": os.environ.get("WEIGHTLIFE_TESTING_CACHE", ""),
            **(environment or {}),
            **({"WEIGHTLIFE": "0"} if weightlife is None else {}),
        },
    }


def _serve_as(family: Path) -> str:
    """One path for both checkpoints, so that they share compiled code (see `oracle.cold`)."""
    return str(family / "serving")


def execute(
    family: str,
    ways: list[str],
    root: str,
    weightlife: dict[str, Any] | None,
    start: str,
    engine: dict[str, Any],
    environment: dict[str, str],
    serve_as: str | None = None,
    want: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run the order in this process; a list of verdicts, one a step, and facts about the engine."""
    began = time.monotonic()
    from weightlife.testing import _cold, checkpoints, oracle

    folders = checkpoints.pair(family, Path(root))
    link = None if serve_as is None else Path(serve_as)
    cold = {
        folder: oracle.cold(folder, environment=environment, serve_as=link, **engine)
        if want is None
        else want[folder.name]
        for folder in folders
    }
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    steps: list[dict[str, Any]] = []

    started = time.monotonic()
    if weightlife is not None:
        import weightlife as product
        from weightlife._engine import stage

        product.install(**weightlife)
        stage.COLD_BYTES = 0  # tiny layers get their memory in the way of large ones
    llm = _engine(folders.a if link is None else _cold.point(link, folders.a), start, engine)
    _cold.KEEP.append(llm)
    _note(steps, {"step": "start", "seconds": time.monotonic() - started, "differences": []})
    served = folders.a
    if start == "a":
        _step(steps, "first_load", llm, cold[served], lambda: None)
    for way in ways:
        from ways import WAYS

        target = folders.b if served == folders.a else folders.a
        before = served
        change = functools.partial(WAYS[way].run, llm, target, before)
        _step(steps, way, llm, cold[target], change)
        served = target
    return {"steps": steps, "seconds": round(time.monotonic() - began, 2), "facts": _facts()}


def _engine(folder: Path, start: str, engine: dict[str, Any]) -> Any:
    from vllm import LLM

    from weightlife.testing import oracle

    more = dict(engine)
    if start == "dummy":
        more["load_format"] = "dummy"
    return LLM(**oracle.engine_arguments(folder, **more))


def answer(
    folder: str, engine: dict[str, Any], serve_as: str | None = None, times: int = 1
) -> dict[str, Any]:
    """A cold load of `folder` by stock in this process: its fingerprint, and facts about the engine.

    `times`: how often it is asked; `differences` says how later answers differ from the first.
    """
    from weightlife.testing import _cold, oracle

    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    place = Path(folder) if serve_as is None else _cold.point(Path(serve_as), Path(folder))
    llm = _engine(place, "a", engine)
    _cold.KEEP.append(llm)
    first = oracle.fingerprint(llm)
    again = [line for _ in range(times - 1) for line in oracle.differences(oracle.fingerprint(llm), first)]
    return {"fingerprint": first, "facts": _facts(), "differences": again}


def leaving_nothing(call: str, **arguments: Any) -> dict[str, Any]:
    """Do a job of this module in a fork, whose engine's processes are forks too, and end them with it.

    vLLM spawns them on a CPU: six seconds of imports each, which the fork has behind it. A fork ends without the
    farewell that would end them.
    """
    import torch._dynamo.config
    from vllm import envs

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    # Set by the server of eager jobs.
    torch._dynamo.config.disable = arguments["engine"].get("enforce_eager", True)
    try:
        done: dict[str, Any] = globals()[call](**arguments)
        return done
    finally:
        for child in multiprocessing.active_children():
            child.kill()
            child.join()


def _step(steps: list[dict[str, Any]], name: str, llm: Any, want: dict[str, Any], change: Any) -> None:
    from weightlife.testing import oracle

    started = time.monotonic()
    # A library of the host's prints a trace on SIGSEGV, and waits for ever for the heap's lock where that was held. A
    # process that crashes is to end.
    for crash in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE):
        signal.signal(crash, signal.SIG_DFL)
    _progress([*steps, {"step": name, "differences": ["the process ended here"], "seconds": 0.0}])
    found: list[str] = []
    try:
        change()
    except Exception as error:  # noqa: BLE001  the verdict is the point: the next way may still work
        found.append(f"raised {type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
    changed = time.monotonic()
    try:
        found += oracle.differences(oracle.fingerprint(llm), want)
    except Exception as error:  # noqa: BLE001  as above
        found.append(f"the engine raised {type(error).__name__}: {str(error)[:400]}")
        traceback.print_exc()
    done = time.monotonic()
    verdict = {"step": name, "seconds": changed - started, "oracle_seconds": done - changed}
    _note(steps, {**verdict, "count": len(found), "differences": found[:12]})
    if found:  # NaN in old blocks would condemn every step that follows
        with contextlib.suppress(Exception):  # a dead engine: the next step says so
            llm.collective_rpc("weightlife_test_zero_kv_cache")


def _note(steps: list[dict[str, Any]], verdict: dict[str, Any]) -> None:
    steps.append(verdict)
    _progress(steps)


def _progress(steps: list[dict[str, Any]]) -> None:
    scratch = os.environ.get("WEIGHTLIFE_TEST_SCRATCH")
    if scratch:
        (Path(scratch) / "progress").write_text(json.dumps(steps))


def _facts() -> dict[str, int]:
    """What the compiler did in this process, for tests that require cache hits: "group.counter" -> times."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    out = {f"vllm.{k}": v for k, v in vars(compilation_counter).items() if isinstance(v, int) and v}
    for group in ("inductor", "aot_autograd"):
        out.update({f"{group}.{k}": int(v) for k, v in counters[group].items()})
    return out


def lines(result: dict[str, Any]) -> list[str]:
    """A readable verdict a step."""
    out = []
    for step in result["steps"]:
        wrong = step["differences"]
        spent = f"{step['seconds']:6.2f} s + {step.get('oracle_seconds', 0.0):5.2f} s"
        out.append(f"{'WRONG' if wrong else 'exact'}  {step['step']:<20} {spent}")
        if wrong:
            out += [f"         {d}" for d in wrong[: max(4, int(os.environ.get("SHOW", "4")))]]
            if step.get("count", 0) > 4:
                out.append(f"         ... {step['count']} differences in all")
    return out


def require_exact(result: dict[str, Any]) -> None:
    """Fail with every verdict when one is not exact."""
    if any(step["differences"] for step in result["steps"]):
        output = result.get("output", "")
        raise AssertionError("\n".join(["not exact:", *lines(result), output[-3000:]]))


def prepare(order: dict[str, Any]) -> None:
    """Make the checkpoints and the cold fingerprints that the child will look up."""
    from weightlife.testing import checkpoints, oracle

    given = order["arguments"]
    if given.get("want") is not None:
        return
    for folder in checkpoints.pair(given["family"], Path(given["root"])):
        link = None if given["serve_as"] is None else Path(given["serve_as"])
        oracle.cold(folder, environment=given["environment"], serve_as=link, **given["engine"])


def run(order: dict[str, Any], *, fresh: bool | None = None, timeout: float = 300.0) -> dict[str, Any]:
    """Run an order in a child; a crash comes back as a wrong last step, not as an exception."""
    from weightlife.testing import _cold

    given = order["arguments"]
    if fresh is None:
        fresh = _cold.needs_fresh(given["engine"], given["environment"])
    with _alone(given["serve_as"]):
        prepare(order)
        return _verdict(order, fresh, timeout)


@contextlib.contextmanager
def _alone(serve_as: str | None) -> Iterator[None]:
    """Whoever moves the link must be the only one who serves through it."""
    if serve_as is None:
        yield
        return
    lock = Path(f"{serve_as}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _verdict(order: dict[str, Any], fresh: bool, timeout: float) -> dict[str, Any]:
    from weightlife.testing import _cold

    try:
        answer: dict[str, Any] = _cold.run(order, fresh=fresh, timeout=timeout)
    except _cold.JobError as error:
        steps = error.progress or [{"step": "start", "seconds": 0.0, "differences": ["never began"]}]
        if not steps[-1]["differences"]:
            steps.append({"step": "after the last step", "seconds": 0.0, "differences": []})
        steps[-1]["differences"] = [f"process ended with {error.how}"]
        return {"steps": steps, "seconds": 0.0, "facts": {}, "output": error.output}
    return answer


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", required=True, help="a name, several with commas, or all")
    parser.add_argument("--ways", default="all", help="names with commas, or all")
    parser.add_argument("--weightlife", choices=("on", "off"), default="on")
    parser.add_argument("--storage", default="pinned")
    parser.add_argument("--isolation", default="staged")
    parser.add_argument("--mode", default="enforce")
    parser.add_argument(
        "--each", action="store_true", help="a new engine for each way, not one after the other"
    )
    parser.add_argument("--start", choices=("a", "dummy"), default="a")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--processes", action="store_true", help="engine core in a process of its own")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="a new interpreter, not a fork of the server")
    parser.add_argument("--output", action="store_true", help="show the end of a crashed child's output")
    parser.add_argument("--here", action="store_true", help="run in this process (debugger, print)")
    parser.add_argument("--root", default=str(REPOSITORY / ".artifacts" / "checkpoints"))
    return parser


def main() -> int:
    """The command line; 1 when a step was not exact."""
    sys.path.insert(0, str(HERE))
    sys.path.insert(0, str(REPOSITORY))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(
        ":"
    )
    os.environ.setdefault("WEIGHTLIFE_TESTING_CACHE", str(REPOSITORY / ".artifacts" / "oracle"))
    from ways import WAYS

    from weightlife.testing import _cold, checkpoints

    options = _parser().parse_args()
    chosen = list(checkpoints.FAMILIES) if options.family == "all" else options.family.split(",")
    ways = list(WAYS) if options.ways == "all" else options.ways.split(",")
    if options.start == "dummy":
        ways = [w for w in ways if WAYS[w].dummy]  # `families.ways_of` is narrower still
    engine: dict[str, Any] = {}
    environment: dict[str, str] = {}
    if options.compiled:
        engine["enforce_eager"] = False
    if options.tensor_parallel > 1:
        engine["tensor_parallel_size"] = options.tensor_parallel
        environment.update(TWO_RANKS)
    elif options.processes:
        environment.update(SEPARATE)
    settings = {"mode": options.mode, "storage": options.storage, "isolation": options.isolation}
    wrong = 0
    for family, batch in itertools.product(chosen, [[w] for w in ways] if options.each else [ways]):
        order = job(
            family,
            batch,
            Path(options.root),
            weightlife=settings if options.weightlife == "on" else None,
            start=options.start,
            engine=engine,
            environment=environment,
        )
        if options.here:
            os.environ.update(_cold._clean(os.environ) | order["environment"])
            result = execute(**order["arguments"])
        else:
            result = run(order, fresh=True if options.fresh else None)
        print(f"{family}  ({result['seconds']} s, weightlife {options.weightlife})", flush=True)
        print("\n".join(lines(result)), flush=True)
        if options.output and result.get("output"):
            print(result["output"])
        wrong += sum(bool(step["differences"]) for step in result["steps"])
    sys.stdout.flush()
    if options.here:
        os._exit(1 if wrong else 0)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
