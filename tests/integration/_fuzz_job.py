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
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

ROUNDS: Final = (
    {"storage": "auto", "isolation": "staged", "start": "a"},
    {"storage": "pinned", "isolation": "in_place", "start": "a"},
    {"storage": "adopted", "isolation": "staged", "start": "dummy"},
    {"storage": "adopted", "isolation": "in_place", "start": "a"},
)


class Interrupted(Exception):
    """Raised by a source; must come out unchanged."""


class Wrong(Exception):
    """A stream after which something else serves than may."""


class Bench:
    """An engine, what serves on it, and how to send it anything."""

    def __init__(self, llm: Any, folders: Any, want: dict[str, Any], isolation: str) -> None:
        from weightlife._engine import lifecycle
        from weightlife.testing import checkpoints

        self.llm, self.folders, self.want = llm, folders, want
        self.staged = isolation == "staged"
        self.tensors = {side: checkpoints.tensors(Path(getattr(folders, side))) for side in ("a", "b")}
        self.model = llm.collective_rpc(lambda worker: worker.model_runner)[0].get_model()
        self.life: Any = lifecycle.of(self.model)
        self.facts: dict[str, Any] = {}
        self.serving: dict[str, str] = {}
        self.now: Any = None  # fingerprint of what serves
        self.references = 0

    # -- what is known -----------------------------------------------------------------------------------------

    def learn(self) -> None:
        """Facts of the checkpoint's tensors, from the files and the manifest."""
        import weightlife

        manifest = weightlife.manifest(self.model)
        groups = {name: i for i, group in enumerate(manifest.atomic_groups()) for name in group}
        shared = _shared(self.life)
        bound = self._bound(manifest)
        from fuzz_streams import Fact

        self.facts = {
            name: Fact(
                tuple(tensor.shape), tensor.is_floating_point() and tensor.element_size() > 1,
                8 * tensor.element_size(), bool(manifest.tensors[name].writes), groups.get(name, -1 - position),
                name in shared, bound.get(name, -1),
            )
            for position, (name, tensor) in enumerate(self.tensors["a"].items())
        }  # fmt: skip

    def _bound(self, manifest: Any) -> dict[str, int]:
        """Names that are one value: large tensors that are equal, and what the model ties."""
        import torch

        out: dict[str, int] = {}
        large = [
            n for n, t in self.tensors["a"].items() if t.ndim == 2 and t.is_floating_point() and len(t) >= 256
        ]
        for i, one in enumerate(large):
            for other in large[i + 1 :]:
                x, y = self.tensors["a"][one], self.tensors["a"][other]
                if x.shape == y.shape and torch.equal(x, y):
                    out[other] = out.setdefault(one, i)
        for number, pair in enumerate(manifest.ties.items(), len(large)):
            if all(name in self.tensors["a"] for name in pair):
                out.update(dict.fromkeys(pair, number))
        # A head of its own beside embeddings may leave or enter a tie with its values: both from one side.
        if any(n.endswith("lm_head.weight") for n in large):
            rows = len(self.tensors["a"][next(n for n in large if n.endswith("lm_head.weight"))])
            same = [n for n in large if len(self.tensors["a"][n]) == rows]
            if getattr(getattr(self.life.host.model_config, "hf_config", None), "tie_word_embeddings", False):
                out.update(dict.fromkeys(same, 10_000))
        return out

    # -- sending -----------------------------------------------------------------------------------------------

    def tensor(self, item: Any) -> Any:
        """The tensor of an item, fresh, changed as it says."""
        import torch

        value = self.tensors[item.side][item.name].clone()
        if item.change in ("float32", "float64"):
            return value.to(getattr(torch, item.change))
        if item.change == "as_float":
            return value.to(torch.float32)
        if item.change == "int8":
            return (value * 100).to(torch.int8)
        if item.change == "float8":
            return value.to(torch.float8_e4m3fn)
        if item.change == "transpose":
            return value.transpose(-1, -2).contiguous()
        if item.change == "short":
            longest = max(range(value.ndim), key=lambda d: value.shape[d])
            return value.narrow(longest, 0, value.shape[longest] - 1).contiguous()
        if item.change == "longer":
            longest = max(range(value.ndim), key=lambda d: value.shape[d])
            return torch.cat([value, value.narrow(longest, 0, 1)], longest)
        if item.change == "half_row":
            return value[..., : value.shape[-1] // 2].contiguous()
        if item.change == "one":
            return value.flatten()[:1].reshape([1] * value.ndim)
        if item.change == "scalar":
            return value.flatten()[0].clone()
        if item.change == "flat":
            return value.flatten()
        if item.change == "lead":
            return value.unsqueeze(0)
        return value

    def source(self, items: Sequence[Any], stop: int) -> Iterator[tuple[str, Any]]:
        """The items; a sender overwrites each tensor when the next one is asked for."""
        from weightlife.testing.worker_ext import spoil

        for place, item in enumerate(items):
            if place == stop:
                raise Interrupted("the trainer went away")
            tensor = self.tensor(item)
            yield item.under, tensor
            spoil(tensor)
        if stop == len(items):
            raise Interrupted("the trainer went away")

    def send(self, stream: Any) -> None:
        """Send a stream the way that it says."""
        if stream.entry == "iterator":
            source = self.source(stream.items, stream.stop)
            self.llm.collective_rpc(
                lambda worker: worker.model_runner.reload_weights(weights_iterator=source)
            )
        elif stream.entry == "path":
            with tempfile.TemporaryDirectory() as scratch:
                folder = self.write(stream, Path(scratch) / "checkpoint")
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        elif stream.entry == "layerwise":
            self.llm.collective_rpc("weightlife_test_layerwise_start")
            self.calls(stream)
            self.llm.collective_rpc("weightlife_test_layerwise_finish")
        elif stream.entry == "session":
            import weightlife

            with weightlife.session(self.model, partial="forbid"):
                self.calls(stream)
        else:
            self.calls(stream)

    def calls(self, stream: Any) -> None:
        """One `load_weights` a call, a batch before one of them."""
        sent = 0
        for number, items in enumerate(stream.calls()):
            if number == stream.peek:
                self.peek()
            last = number == len(stream.cuts)
            stop = stream.stop - sent if 0 <= stream.stop - sent < len(items) + last else -1
            self.model.load_weights(self.source(items, stop))
            sent += len(items)

    def peek(self) -> None:
        """A batch in an open session must be answered by what served before.

        Raises:
            Wrong: it was not.
        """
        from weightlife.testing import oracle

        got = oracle.fingerprint(self.llm)
        found = oracle.differences({**got, "ranks": []}, {**self.now, "ranks": []})
        if found:
            raise Wrong(f"a batch inside the session: {'; '.join(found[:3])}")

    def write(self, stream: Any, folder: Path) -> Path:
        """A checkpoint of the stream's tensors in as many shards as it has calls; repeats go to one of their own."""
        from safetensors.torch import save_file

        shutil.copytree(getattr(self.folders, stream.target), folder)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.index.json")):
            old.unlink()
        shards: list[dict[str, Any]] = [{}]
        for item in stream.items:
            name = item.under
            place = next((i for i, shard in enumerate(shards) if name not in shard), len(shards))
            if place == len(shards):
                shards.append({})
            shards[place][name] = self.tensor(item).contiguous()
        for number, shard in enumerate(shards):
            save_file(shard, folder / f"model-{number}.safetensors", metadata={"format": "pt"})
        return folder

    # -- judging -----------------------------------------------------------------------------------------------

    def fingerprint(self) -> Any:
        from weightlife.testing import oracle

        return oracle.fingerprint(self.llm)

    def expected(self, serving: dict[str, str]) -> Any:
        """The fingerprint of a cold load; of a mixture, that of a complete reload, which is exact for A and B."""
        taken = {serving[name] for name, fact in self.facts.items() if fact.taken}
        if len(taken) == 1:
            return self.want[taken.pop()]
        from fuzz_streams import Item

        self.references += 1
        # What nothing takes follows the tensor that it is tied to.
        sides = {f.bound: serving[n] for n, f in self.facts.items() if f.taken and f.bound >= 0}
        items = [
            Item(
                name,
                serving[name] if self.facts[name].taken else sides.get(self.facts[name].bound, serving[name]),
            )
            for name in self.tensors["a"]
        ]
        source = self.source(items, -1)
        self.llm.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_iterator=source))
        return self.fingerprint()

    def run(self, stream: Any) -> dict[str, Any]:
        """Send a stream, and its retry, and hold what serves against what may.

        Raises:
            Wrong: it does not.
        """
        from fuzz_streams import ACCEPT, REFUSE, Item, Stream, after, judge

        may = judge(stream, self.facts, must=self.life.must_complete)
        before = self.life.generation
        raised = _raised(lambda: self.send(stream))
        if isinstance(raised, Wrong):
            raise raised
        plain = not any(item.change or item.sent for item in stream.items)
        if stream.stop >= 0 and (raised is None or (plain and not isinstance(raised, Interrupted))):
            raise Wrong(f"the source's exception came out as {type(raised).__name__}: {str(raised)[:300]}")
        if stream.retry and stream.entry != "bare":
            outcome = ACCEPT if self.life.generation > before else REFUSE
            if outcome not in may or (outcome == ACCEPT) is (raised is not None):
                raise Wrong(
                    f"outcome {outcome} before the retry, it must be {' or '.join(sorted(may))} ({raised!r})"
                )
        if stream.retry:
            if stream.entry == "bare" and raised is None and self.life.session is not None:
                may = may | {REFUSE}  # it may be dropped, or be overwritten in one session with the retry
            full = Stream(
                stream.retry, tuple(Item(name, stream.target) for name in self.tensors["a"]), stream.target
            )
            again = _raised(lambda: self.send(full))
            if again is not None:
                raise Wrong(f"the retry ({stream.retry}) raised {type(again).__name__}: {str(again)[:400]}")
            serving = dict.fromkeys(self.facts, stream.target)
            got = self.fingerprint()
            self.compare(got, self.want[stream.target], "after the retry")
            self.now, self.serving = got, serving
            return {"outcome": "retried", "raised": type(raised).__name__ if raised else ""}
        got = self.fingerprint()
        if self.life.session is not None:
            # An implicit update that is not whole. In place no batch runs; else it is answered by what served.
            if self.staged:
                self.compare({**got, "ranks": []}, {**self.now, "ranks": []}, "while an update is not whole")
            self.life.abort()
            got = self.fingerprint()
        outcome = ACCEPT if self.life.generation > before else REFUSE
        if raised is not None and outcome == ACCEPT:
            raise Wrong(f"committed and raised {type(raised).__name__}: {str(raised)[:300]}")
        if raised is None and outcome == REFUSE and stream.entry != "bare":
            raise Wrong("neither committed nor raised")
        if outcome not in may:
            said = f"{type(raised).__name__}: {str(raised)[:400]}" if raised else "nothing was raised"
            raise Wrong(f"outcome {outcome}, it must be {' or '.join(sorted(may))} ({said})")
        if outcome == REFUSE:
            self.compare(got, self.now, f"after a refusal ({type(raised).__name__ if raised else 'silent'})")
        else:
            self.serving = after(stream, self.facts, self.serving)
            want = self.expected(self.serving)
            self.compare(got, want, "after a commit")
            self.now = want
        self.life.failed = None
        return {
            "outcome": outcome,
            "raised": type(raised).__name__ if raised else "",
            "doubtful": len(may) > 1,
        }

    def compare(self, got: Any, want: Any, context: str) -> None:
        from weightlife.testing import oracle

        found = oracle.differences(got, want)
        if found:
            raise Wrong(f"{context}: {len(found)} differences: {'; '.join(found[:4])}")

    def reset(self) -> None:
        """Back to A.

        Raises:
            Wrong: A does not serve then.
        """
        self.life.abort()
        self.life.failed = None
        self.llm.collective_rpc("weightlife_test_zero_kv_cache")
        from fuzz_streams import Item

        source = self.source([Item(name, "a") for name in self.tensors["a"]], -1)
        self.llm.collective_rpc(lambda worker: worker.model_runner.reload_weights(weights_iterator=source))
        self.now = self.fingerprint()
        self.compare(self.now, self.want["a"], "after a reset")
        self.serving = dict.fromkeys(self.facts, "a")


def _raised(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - what was raised is part of the verdict
        return error
    return None


def _shared(life: Any) -> set[str]:
    """Names some of whose elements are written by another name as well."""
    from weightlife._engine import ledger

    out: set[str] = set()
    by_storage: dict[int, list[tuple[str, Any]]] = {}
    for name, entry in life.manifest.names.items():
        for number, part in entry.writes:
            by_storage.setdefault(number, []).append((name, part))
    for number, writes in by_storage.items():
        numel = life.skeleton.storages[number].numel
        # A loader may write an element of its own twice (and transform it in place): each name counts once.
        once = {(name, part) for name, part in writes}
        masks = {name: ledger.counts(numel, [p for n, p in once if n == name]) > 0 for name, _ in once}
        total = sum(mask.astype(int) for mask in masks.values())
        out |= {name for name, mask in masks.items() if (total[mask] > 1).any()}
    return out


def execute(
    family: str,
    round_number: int,
    numbers: list[int],
    root: str,
    verbose: bool = False,
    settings: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Run the numbered streams of a family in this process."""
    from fuzz_streams import ENTRIES, draw

    import weightlife
    from weightlife.testing import _cold, checkpoints, oracle

    chosen = ROUNDS[round_number % len(ROUNDS)]
    folders = checkpoints.pair(family, Path(root))
    want = {side: oracle.cold(getattr(folders, side)) for side in ("a", "b")}
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    row = checkpoints.FAMILIES[family]
    start = "a" if row.head == "other" else chosen["start"]
    weightlife.install(
        storage=chosen["storage"], isolation=chosen["isolation"], log_level="error", **(settings or {})
    )
    from vllm import LLM

    more = {"load_format": "dummy"} if start == "dummy" else {}
    llm = LLM(**oracle.engine_arguments(folders.a, **more))
    _cold.KEEP.append(llm)
    bench = Bench(llm, folders, want, chosen["isolation"])
    results: list[dict[str, Any]] = []
    if start == "dummy":
        from fuzz_streams import Item, Stream

        entry = ("iterator", "session", "layerwise")[round_number % 3]
        first = Stream(entry, tuple(Item(name, "a") for name in bench.tensors["a"]), "a")
        raised = _raised(lambda: bench.send(first))
        problem = oracle.differences(bench.fingerprint(), want["a"])
        if raised is not None or problem:
            text = f"the first load after a dummy start: {raised!r} {problem[:3]}"
            return {"results": [{"number": n, "wrong": text, "stream": ""} for n in numbers], "references": 0}
        bench.learn()
        bench.now, bench.serving = want["a"], dict.fromkeys(bench.facts, "a")
    else:
        bench.learn()
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
            entries=[e for e in ENTRIES if e != "path" or start != "dummy"],  # a dummy loader reads no files
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
    return {"results": results, "references": bench.references}


def run(
    family: str, round_number: int, numbers: Sequence[int], root: Path, cache: Path, *, timeout: float = 600.0,
    verbose: bool = False, settings: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Verdicts of the numbered streams, each on an engine that a former one left right."""
    from weightlife.testing import _cold, checkpoints, oracle

    os.environ["WEIGHTLIFE_TESTING_CACHE"] = str(cache)
    for folder in checkpoints.pair(family, root):
        oracle.cold(folder)
    left, out = list(numbers), []
    while left:
        order = {
            "call": "_fuzz_job:execute",
            "path": [str(HERE)],
            "arguments": {
                "family": family, "round_number": round_number, "numbers": left, "root": str(root), "verbose": verbose, "settings": settings,
            },
            "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "WEIGHTLIFE_TESTING_CACHE": str(cache)},
        }  # fmt: skip
        try:
            done = _cold.run(order, fresh=False, timeout=timeout)["results"]
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
        "--round", type=int, default=-1, help=f"settings: 0 to {len(ROUNDS) - 1}; default: by turns"
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
        number = options.round if options.round >= 0 else list(checkpoints.FAMILIES).index(family)
        seeds = [int(n) for n in options.seeds.split(",")] if options.seeds else range(options.streams)
        wanted = [n for n in seeds if (family, number % len(ROUNDS), n) not in done]
        if not wanted:
            continue
        started = time.monotonic()
        found = run(
            family, number % len(ROUNDS), wanted, REPOSITORY / ".artifacts" / "checkpoints",
            REPOSITORY / ".artifacts" / "oracle", verbose=options.verbose,
        )  # fmt: skip
        with results.open("a") as file:
            for row in found:
                file.write(json.dumps({"family": family, "round": number % len(ROUNDS), **row}) + "\n")
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
