# SPDX-License-Identifier: Apache-2.0
"""What traces and metrics cost a load: spans a session, microseconds a loader call, milliseconds a session.

    python benchmarks/telemetry_cost.py [--rounds 100] [--json] [--write]

One plain model of 290 small tensors, so that what is measured is bookkeeping and not copying. The ways take turns
session by session, since a machine's speed drifts. "silent" has no listener at all, "off" is weightlife as installed
where no SDK is set up, "on" keeps spans in memory, "otlp" sends spans and metrics to a receiver in another process
over HTTP, "hangs" to one that never answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import _results

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SCHEMA_VERSION = 1
LAYERS = 145  # two tensors each
WAYS = ("silent", "off", "on", "otlp", "hangs")


def telemetry(way: str, endpoint: str) -> Any:
    """Listeners of one way, closed."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from weightlife.otel.listening import Telemetry

    if way == "off":
        made = Telemetry()
    else:
        memory = way == "on"
        exporter: Any = InMemorySpanExporter() if memory else OTLPSpanExporter(f"{endpoint}/v1/traces")
        reader: Any = (
            InMemoryMetricReader()
            if memory
            else PeriodicExportingMetricReader(OTLPMetricExporter(f"{endpoint}/v1/metrics"))
        )
        spans = TracerProvider(shutdown_on_exit=False)
        spans.add_span_processor(BatchSpanProcessor(exporter))
        made = Telemetry(spans, MeterProvider([reader], shutdown_on_exit=False))
        made.exporter = exporter
    made.close()
    return made


def measure(rounds: int, address: dict[str, str]) -> dict[str, Any]:
    """Seconds of each session by way, wall and CPU of this process, and spans of one session."""
    import logging

    import torch

    import weightlife
    from weightlife import _api

    torch.set_num_threads(1)
    logging.getLogger("weightlife").setLevel(logging.ERROR)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(LAYERS)))

    @weightlife.wrap_loader
    def load(module: Any, weights: Any) -> None:
        parameters = dict(module.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)

    checkpoint = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    load(model, iter(checkpoint.items()))
    _api.silence()
    made = {way: telemetry(way, address["hangs" if way == "hangs" else "works"]) for way in WAYS[1:]}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    busy: dict[str, list[float]] = {way: [] for way in WAYS}
    calls: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(0)
    for index in range(rounds + 3):
        for way in order.sample(WAYS, len(WAYS)):
            if way in made:
                made[way].open()
            started, cpu = time.perf_counter(), time.thread_time()
            load(model, iter(checkpoint.items()))
            took = time.perf_counter() - started, time.thread_time() - cpu
            if way in made:
                made[way].close()
            if index >= 3:
                report = weightlife.last_report(model)
                assert report is not None
                seconds[way].append(took[0])
                busy[way].append(took[1])
                calls[way].append(
                    sum(report.attributed[part] for part in ("source", "host_to_device", "loaders"))
                )
    made["on"].delivery.drain(10)
    spans = len(made["on"].exporter.get_finished_spans()) / (rounds + 3)
    return {"seconds": seconds, "busy": busy, "calls": calls, "tensors": len(checkpoint), "spans": spans}


def summary(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians by way: microseconds a loader call, milliseconds a session."""
    rows = []
    for way in WAYS:
        call, middle, work = (statistics.median(found[kind][way]) for kind in ("calls", "seconds", "busy"))
        pairs = zip(found["seconds"][way], found["seconds"]["silent"], strict=True)
        rows.append({
            "way": way, "call_us": call / found["tensors"] * 1e6, "session_ms": middle * 1e3,
            "p95_ms": sorted(found["seconds"][way])[int(len(found["seconds"][way]) * 0.95)] * 1e3,
            "cpu_ms": work * 1e3, "more_ms": statistics.median(a - b for a, b in pairs) * 1e3,
        })  # fmt: skip
    return rows


_INTRODUCTION = """\
## What telemetry costs

Written by `benchmarks/telemetry_cost.py --write`; do not edit. {tensors} tensors a session, {rounds} sessions a way,
{spans} spans a session, in turn. *silent*: no listener; *off*: the API without an SDK; *on*: spans kept in memory; *otlp*:
spans and metrics exported to a receiver in another process of this machine; *hangs*: to one that never answers. A loader
call is one tensor, source included. *More than silent*: median of the differences.
"""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| way | us a loader call | ms a session: median | p95 | CPU ms of the loading thread | more than silent |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['call_us']:.2f} | {row['session_ms']:.2f} | {row['p95_ms']:.2f} | {row['cpu_ms']:.2f} "
        f"| {row['more_ms']:.2f} ms |"
        for row in rows
    ]
    return "\n".join(lines)


def receive(mode: str) -> None:
    """In a child: a receiver that prints its address and lives until its input ends."""
    from tests.otlp import Receiver

    with Receiver() as receiver:
        receiver.mode = mode
        print(receiver.http, flush=True)
        sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write its section of benchmarks/RESULTS.md")
    parser.add_argument("--receive", choices=("works", "hangs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        receive(options.receive)
        return
    receivers = {
        mode: subprocess.Popen(
            [sys.executable, __file__, "--receive", mode],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for mode in ("works", "hangs")
    }  # fmt: skip
    try:
        address = {mode: r.stdout.readline().strip() for mode, r in receivers.items() if r.stdout}
        found = measure(options.rounds, address)
    finally:
        for process in receivers.values():
            if process.stdin:
                process.stdin.close()
            process.wait(20)
    rows = summary(found)
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "spans": found["spans"], "rows": rows}))
    else:
        text = table(rows)
        about = _INTRODUCTION.format(
            tensors=found["tensors"], rounds=options.rounds, spans=f"{found['spans']:g}"
        )
        print(f"{about}\n{text}")
        if options.write:
            day = datetime.now(timezone.utc).date().isoformat()
            _results.write("telemetry", f"{about}\n{day}: {_results.machine()}.\n\n{text}")
    sys.stdout.flush()
    os._exit(0)  # an exporter that hangs would keep the interpreter from ending


if __name__ == "__main__":
    main()
