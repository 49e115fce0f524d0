# SPDX-License-Identifier: Apache-2.0
"""What the ledger costs: seconds a loader call, first load and later ones, against the bare loader.

    python benchmarks/ledger_cost.py [--calls 500 20000 94000] [--rounds 5] [--json]

A plain module whose layers hold stacked experts, filled expert by expert through `param.weight_loader` as vLLM's are
(narrow the parameter, then copy). 94,000 calls are DeepSeek-V3's count. The tensors are small (8 x 16), so that it is
the call that is timed and not the copy. Rounds alternate between the bare loader and weightlife.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

import _results
import torch
from torch import nn

from weightlife._engine.lifecycle import Lifecycle
from weightlife.config import Settings
from weightlife.hosts.torch import TorchHost

SCHEMA_VERSION = 1
EXPERTS, ROWS, COLUMNS = 256, 8, 16
SHARDS = ("w1", "w3")


class Experts(nn.Module):
    """One parameter for all experts, gate and up projections stacked: shape (256, 16, 16)."""

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


def stream(calls: int, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Names of one checkpoint; every tensor is the same one, so that reading costs nothing."""
    for call in range(calls):
        layer, rest = divmod(call, EXPERTS * 2)
        yield f"layers.{layer}.experts.{rest // 2}.{SHARDS[rest % 2]}", tensor


def seconds(call: Any, *args: Any) -> float:
    """One timed call, garbage collected before it and not during it."""
    gc.collect()
    gc.disable()
    try:
        started = time.perf_counter()
        call(*args)
        return time.perf_counter() - started
    finally:
        gc.enable()


def reload(life: Lifecycle, model: Model, calls: int, tensor: torch.Tensor) -> None:
    """One explicit update, begin to end."""
    with life.owned("benchmark"):
        life.open("benchmark", "update", True, "by_layer")
    life.load_weights(model.load_weights, stream(calls, tensor))
    life.finish("benchmark")


def measure(calls: int, rounds: int) -> dict[str, Any]:
    """Medians for one number of calls."""
    tensor = torch.ones(ROWS, COLUMNS)
    layers = -(-calls // (EXPERTS * 2))
    bare, first, later = [], [], []
    region_bytes = 0.0
    plain = Model(layers)
    plain.load_weights(stream(calls, tensor))
    for number in range(rounds):
        bare.append(seconds(plain.load_weights, stream(calls, tensor)))
        model = Model(layers)
        life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))
        start = life.first
        assert start is not None
        if number == 0:
            tracemalloc.start()
            life.load_weights(model.load_weights, stream(calls, tensor))
            region_bytes = tracemalloc.get_traced_memory()[0] / calls
            tracemalloc.stop()
            model = Model(layers)
            life = Lifecycle(model, TorchHost(model), Settings(log_level="error"))
            assert life.first is not None
        first.append(seconds(life.load_weights, model.load_weights, stream(calls, tensor)))
        assert life.first is not None
        life.first.process(lambda: None)
        reload(life, model, calls, tensor)  # the first one finds memory to be allocated
        later.append(seconds(reload, life, model, calls, tensor))
        report = life.reports[-1]
        assert report.outcome == "committed" and report.tensors_received == calls
    micro = {"bare": bare, "first": first, "later": later}
    out: dict[str, Any] = {"calls": calls, "bytes_a_call": region_bytes}
    for name, values in micro.items():
        out[f"{name}_us"] = statistics.median(values) / calls * 1e6
    for name, values in (("first", first), ("later", later)):
        out[f"{name}_ratio"] = statistics.median(v / b for v, b in zip(values, bare, strict=True))
    return out


_INTRODUCTION = """\
## What the ledger costs a call

Written by `benchmarks/ledger_cost.py --write`; do not edit. A plain module with stacked experts, filled by calls of
`param.weight_loader` with tensors of 8 x 16, so that the call is timed and not the copy; medians of {rounds} rounds in
turn with the bare loader, one thread. *Later* is a whole update, from prepare to commit, of which all but one item in
some hundred runs by rule. *Bytes kept a call*: what the ledger and the manifest hold for each after the first load,
divided by the calls; what a process allocates once (72 MB) is in it, and is most of the row with 500.

Goals: first load at most {first}x, later loads at most {later}x a bare call, at most {size} bytes a region. {verdict}

Where the rest is. First load: an empty fallback for the dispatch key costs 2.2 us a call (an empty dispatch mode 15), the
source, the name and the region 5 us; the first two names of a kind run under a mode, 15 us more each, which shows with
few calls. Later loads: the mode is put on the stack while the sender's generator is pulled and taken
off for the loader (0.8 us), the item is compared with its rule (1 us), memory for the new generation is made and
touched for the first time (0.5 us), the ledger is filled and compared (0.7 us), one item in 256 is observed. With
tensors of real size the copy hides all of it (the table above).
"""

GOALS = {"first": 3.0, "later": 1.3, "size": 300}


def verdict(rows: list[dict[str, Any]]) -> str:
    """Which goals are met, by the rows beyond 500 calls."""
    large = [row for row in rows if row["calls"] >= 20_000] or rows
    worst = {
        "first": max(row["first_ratio"] for row in large),
        "later": max(row["later_ratio"] for row in large),
        "size": max(row["bytes_a_call"] for row in large),
    }
    words = {"first": "first load", "later": "later loads", "size": "bytes"}
    missed = [f"{words[name]} ({worst[name]:.3g})" for name, goal in GOALS.items() if worst[name] > goal]
    return f"**Missed**: {', '.join(missed)}." if missed else "All are met."


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| calls | bare us | first load us | ratio | later load us | ratio | bytes kept a call |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['calls']:,} | {row['bare_us']:.1f} | {row['first_us']:.1f} | {row['first_ratio']:.2f}x "
        f"| {row['later_us']:.1f} | {row['later_ratio']:.2f}x | {row['bytes_a_call']:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, nargs="+", default=[500, 20_000, 94_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write its section of benchmarks/RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(calls, options.rounds) for calls in options.calls]
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
