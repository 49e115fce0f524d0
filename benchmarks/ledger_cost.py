# SPDX-License-Identifier: Apache-2.0
"""What the ledger costs: seconds a loader call, first load and later ones, against the bare loader.

    python benchmarks/ledger_cost.py [--calls 500 20000 94000] [--rounds 5] [--loaders minimal vllm] [--json]

Two loaders. *minimal*: a plain module whose layers hold stacked experts, filled expert by expert through
`param.weight_loader` (narrow the parameter, then copy); it does nothing else, so that what is added shows as large as it
can. *vllm*: the host's own (`_host_loader.py`). 94,000 calls are DeepSeek-V3's count. The tensors are small (8 x 16 float,
16 x 32 bfloat16), so that it is the call that is timed and not the copy. Rounds alternate between the bare loader
and weightlife.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import _host_loader
import _results
import torch
from torch import nn

from weightlife._engine.lifecycle import Lifecycle
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost

SCHEMA_VERSION = 3
EXPERTS, ROWS, COLUMNS = 250, 8, 16
SHARDS = ("w1", "w3")


class Experts(nn.Module):
    """One parameter for all experts, gate and up projections stacked: shape (250, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(EXPERTS, 2 * ROWS, COLUMNS), requires_grad=False)
        self.w13.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: torch.Tensor, tensor: torch.Tensor, expert: int, shard: str) -> None:
        """Copy one expert's shard, shape (8, 16), to its place."""
        assert tensor.shape == (ROWS, COLUMNS)
        parameter.data[expert].narrow(0, ROWS * SHARDS.index(shard), ROWS).copy_(tensor)


class Model(nn.Module):
    """As many layers as the calls need."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(layers))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The usual loop: find the parameter, call its loader."""
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            _, layer, _, expert, shard = name.split(".")
            parameter = parameters[f"layers.{layer}.w13"]
            parameter.weight_loader(parameter, tensor, int(expert), shard)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Loader:
    """A way to load: the model, its host, and a stream of `calls` items."""

    title: str
    calls_a_layer: int
    make: Callable[[int], Any]
    host: Callable[[Any], TorchHost]
    stream: Callable[[int], Iterable[tuple[str, torch.Tensor]]]


def loader(name: str) -> Loader:
    """By name. What is sent is made here, once."""
    if name == "vllm":
        import vllm

        sent = _host_loader.tensors()
        return Loader(
            f"vLLM {vllm.__version__}", _host_loader.CALLS_A_LAYER, _host_loader.make, _host_loader.Unprocessed,
            lambda calls: _host_loader.stream(calls, sent),
        )  # fmt: skip
    tensor = torch.ones(ROWS, COLUMNS)
    return Loader("minimal", EXPERTS * 2, Model, TorchHost, lambda calls: stream(calls, tensor))


def stream(calls: int, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of one checkpoint; every tensor is the same one, so that reading costs nothing."""
    for call in range(calls):
        layer, rest = divmod(call, EXPERTS * 2)
        yield f"layers.{layer}.experts.{rest // 2}.{SHARDS[rest % 2]}", tensor


def timed(call: Any, *args: Any) -> tuple[float, Any]:
    """Seconds of one call and what it returns, garbage collected before it and not during it."""
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        out = call(*args)
        return time.perf_counter() - started, out
    finally:
        gc.enable()


def reload(life: Lifecycle, model: Any, items: Iterable[tuple[str, torch.Tensor]]) -> float:
    """One explicit update, begin to end. Returns the seconds of its load, without prepare and finish."""
    with life.owned("benchmark"):
        life.open("benchmark", "update", True, "by_layer")
    started = time.perf_counter()
    life.load_weights(model.load_weights, items)
    took = time.perf_counter() - started
    life.finish("benchmark")
    return took


def measure(which: Loader, calls: int, rounds: int) -> dict[str, Any]:
    """Medians for one number of calls, rounded up to whole layers: half a layer is no checkpoint."""
    layers = -(-calls // which.calls_a_layer)
    calls = layers * which.calls_a_layer
    took: dict[str, list[float]] = {"bare": [], "first": [], "later": [], "update": []}
    region_bytes = 0.0
    plain = which.make(layers)
    plain.load_weights(which.stream(calls))
    for number in range(rounds):
        took["bare"].append(timed(plain.load_weights, which.stream(calls))[0])
        model = which.make(layers)
        life = Lifecycle(model, which.host(model), Settings(log_level="error"))
        start = life.first
        assert start is not None
        if number == 0:
            life.load_weights(
                model.load_weights, which.stream(calls)
            )  # what a process keeps once is kept now
            model = which.make(layers)
            life = Lifecycle(model, which.host(model), Settings(log_level="error"))
            tracemalloc.start()
            life.load_weights(model.load_weights, which.stream(calls))
            region_bytes = tracemalloc.get_traced_memory()[0] / calls
            tracemalloc.stop()
            model = which.make(layers)
            life = Lifecycle(model, which.host(model), Settings(log_level="error"))
            assert life.first is not None
        took["first"].append(timed(life.load_weights, model.load_weights, which.stream(calls))[0])
        assert life.first is not None
        life.first.process(lambda: None)
        reload(life, model, which.stream(calls))  # the first one finds memory to be allocated
        update, load = timed(reload, life, model, which.stream(calls))
        took["update"].append(update)
        took["later"].append(load)
        report = life.reports[-1]
        assert report.outcome == "committed" and report.tensors_received == calls
    out: dict[str, Any] = {"loader": which.title, "calls": calls, "bytes_a_call": region_bytes}
    for name, values in took.items():
        out[f"{name}_us"] = statistics.median(values) / calls * 1e6
        out[f"{name}_ratio"] = statistics.median(v / b for v, b in zip(values, took["bare"], strict=True))
    return out


_INTRODUCTION = """\
## What the ledger costs a call

Written by `benchmarks/ledger_cost.py --write`; do not edit. Two loaders. *minimal*: a plain module with stacked experts,
filled by calls of `param.weight_loader` that narrow and copy, and do nothing else (8 x 16 float). *vLLM*: its Mixtral
with 256 experts a layer, by the model's own `load_weights` (16 x 32 bfloat16; the source holds the experts alone, and
nothing is processed afterwards). Small tensors, so that the call is timed and not the copy; whole layers; medians of
{rounds} rounds in turn with the bare loader, one thread, a generator as source. *Later load*: the load of an update,
of which all but one item in some hundred runs by rule; *whole update*: with its prepare, finish and commit. *Bytes kept a call*: what the ledger and the
manifest hold for each after the first load, divided by the calls; what a process keeps once is not in it.

Goals: first load at most {first}x, later loads at most {later}x a bare call, at most {size} bytes a region.
{verdict}

Where the rest is. First load: an empty fallback for the dispatch key costs 2.2 us a call (an empty dispatch mode 15), the
source, the name and the region 5 us; the first two names of a kind run under a mode, 15 us more each, which shows with
few calls. Later loads, minimal: the mode is put on the stack while the sender's generator is pulled and taken off for
the loader (0.5 to 0.8 us; not for a list, a dict or the host's own reader), the item is compared with its rule (0.5 us),
two readings of the clock and two generators (0.3 us), memory for the new generation is touched for the first time
(0.3 us). With vLLM's loader the same work stands beside a call that is five times as long; of a whole update 2.4 us a
call are the walk of 27 layers' modules, validating and copying back. The parts are from measurements of each alone.
"""

GOALS = {"first": 3.0, "later": 1.3, "size": 300}


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which goals are met with each loader."""
    titles = dict.fromkeys(row["loader"] for row in rows)
    return " ".join(
        f"{title}: {_verdict([row for row in rows if row['loader'] == title])}" for title in titles
    )


def _verdict(rows: list[dict[str, Any]]) -> str:
    """By the worst of the rows."""
    worst = {
        "first": max(row["first_ratio"] for row in rows),
        "later": max(row["later_ratio"] for row in rows),
        "size": max(row["bytes_a_call"] for row in rows),
    }
    words = {"first": "first load", "later": "later loads", "size": "bytes"}
    missed = [f"{words[name]} ({worst[name]:.3g})" for name, goal in GOALS.items() if worst[name] > goal]
    return f"**missed**: {', '.join(missed)}." if missed else "all met."


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| loader | calls | bare us | first load us | ratio | later load us | ratio | whole update us | ratio | bytes kept a call |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['loader']} | {row['calls']:,} | {row['bare_us']:.1f} | {row['first_us']:.1f} | {row['first_ratio']:.2f}x "
        f"| {row['later_us']:.1f} | {row['later_ratio']:.2f}x | {row['update_us']:.1f} | {row['update_ratio']:.2f}x "
        f"| {row['bytes_a_call']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, nargs="+", default=[500, 20_000, 94_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loaders", nargs="+", choices=("minimal", "vllm"), default=["minimal", "vllm"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write its section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(way, calls, options.rounds) for way in map(loader, options.loaders) for calls in options.calls
    ]
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "rows": rows}))
        return
    text = table(rows)
    print(text)
    if options.write:
        _results.write(
            "ledger",
            f"{_INTRODUCTION.format(rounds=options.rounds, verdict=verdict(rows), **GOALS)}\n{datetime.now(timezone.utc).date().isoformat()}: {_results.machine()}.\n\n{text}",
        )


if __name__ == "__main__":
    main()
