# SPDX-License-Identifier: Apache-2.0
"""What a real engine exports, received by a real receiver: over HTTP and gRPC, one rank, two ranks, and a server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration._child import result_of, stop
from tests.integration._otel_job import COMMON
from tests.otlp import Receiver, Span
from tests.telemetry import Registry, group_of
from weightlife.otel import generate_names
from weightlife.otel.spans import MAX_SPANS
from weightlife.testing import checkpoints
from weightlife.testing._source import names

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
GROUPS = generate_names.load_registry()
registry = Registry(GROUPS)
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
METRICS = {group["metric_name"]: group for group in GROUPS if group["type"] == "metric"}


def environment(**more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "WEIGHTLIFE_", "traceparent"))}
    return {**clean, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more}


def run(job: str, a: Path, b: Path, endpoint: str) -> dict[str, Any]:
    return result_of("_otel_job", job, a, b, endpoint, timeout=400, env=environment())


def ids_are_unique(receiver: Receiver) -> None:
    """Though the host seeds every worker with the same number (see otel/ids.py)."""
    ours = [span.id for span in receiver.spans if span.scope == "weightlife"]
    assert len(set(ours)) == len(ours)
    loads = [span.id for span in receiver.named("Load model")]
    assert len(set(loads)) == len(loads)
    assert not set(ours) & {span.id for span in receiver.spans if span.scope != "weightlife"}


def held_to_the_registry(receiver: Receiver) -> None:
    """Everything under our scope is declared, with the declared types, as it was on the wire."""
    ours = [span for span in receiver.spans if span.scope == "weightlife"]
    assert ours
    for span in ours:
        registry.check(group_of(span.name), span.attributes)
        for name, attributes in span.events:
            if name != "exception":
                registry.check(f"event.{name}", attributes)
        for _, _, attributes in span.links:
            registry.check("link.weightlife.session", attributes)
    for metric in receiver.metrics:
        if metric.scope == "weightlife":
            assert metric.unit == METRICS[metric.name]["unit"]
            for attributes, _ in metric.points:
                registry.check(f"metric.{metric.name}", attributes)


def children(receiver: Receiver, root: Span) -> list[Span]:
    return [span for span in receiver.spans if span.parent == root.id and span.scope == "weightlife"]


@pytest.fixture(scope="module", name="one")
def _one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Receiver]]:
    pair = checkpoints.pair("mixtral", tmp_path_factory.mktemp("otel"))
    with Receiver() as receiver:
        yield run("single", pair.a, pair.b, receiver.http), receiver


class TestOneRank:
    """vLLM's own tracer, OTLP over HTTP."""

    @staticmethod
    def sessions(receiver: Receiver) -> list[Span]:
        return receiver.named("load_weights MixtralForCausalLM")

    def test_the_first_load_hangs_under_the_hosts_span(self, one: Any) -> None:
        _, receiver = one
        first = self.sessions(receiver)[0]
        assert first.attributes["weightlife.session.operation"] == "first_load"
        assert receiver.above(first)[0] == "Load model"
        assert len(receiver.above(first)) > 1
        assert {c.name for c in children(receiver, first)} == {"receive", "process"}
        assert first.attributes["weightlife.processing.duration.UnquantizedLinearMethod"] > 0
        assert first.links == []

    def test_a_trainers_span_and_the_worker_are_one_trace(self, one: Any) -> None:
        found, receiver = one
        reload = self.sessions(receiver)[1]
        assert receiver.above(reload) == ["collective_rpc reload_weights", "trainer sync by path"]
        assert reload.trace == found["trace"]
        first = self.sessions(receiver)[0]
        assert (first.trace, first.id, {"weightlife.link.kind": "first_load"}) in reload.links
        assert reload.trace != first.trace
        assert reload.resource["service.name"] == "rollout"
        assert reload.resource["vllm.process_kind"] == "worker"

    def test_cached_blocks_of_the_old_weights_are_forgotten_after_a_traced_call_too(self, one: Any) -> None:
        assert one[0]["fresh_cache"]

    def test_what_a_reload_says(self, one: Any) -> None:
        _, receiver = one
        reload = self.sessions(receiver)[1]
        said = reload.attributes
        assert said["weightlife.session.outcome"] == "committed"
        assert said["weightlife.tensor.count"] == 41
        assert said["weightlife.tensor.size"] > 1_000_000
        assert said["weightlife.receive.rate"] > 0
        assert said["weightlife.copy.size"] > 0
        assert said["weightlife.layer.strategy.rebuild"] == 14
        assert said["weightlife.version.vllm"]
        spent = sum(v for k, v in said.items() if k.startswith("weightlife.activity.duration."))
        assert 0 < spent <= (reload.end - reload.start) / 1e9
        assert said["weightlife.layer.slowest.names"][0].startswith("model.")
        assert not reload.failed

    def test_phases_lie_within_the_session_and_layers_within_their_phase(self, one: Any) -> None:
        _, receiver = one
        reload = self.sessions(receiver)[1]
        phases = children(receiver, reload)
        assert [p.name for p in sorted(phases, key=lambda p: p.start)] == [
            "prepare", "receive", "validate", "process_quant", "process_attention", "process_model", "validate",
            "copy_back",
        ]  # fmt: skip
        layers = [s for phase in phases for s in children(receiver, phase)]
        assert layers
        assert {layer.name for layer in layers} >= {"process_layer UnquantizedLinearMethod"}
        assert 1 + len(phases) + len(layers) == MAX_SPANS
        for span, parent in [*((p, reload) for p in phases)] + [
            (layer, phase) for phase in phases for layer in children(receiver, phase)
        ]:
            assert parent.start <= span.start <= span.end <= parent.end

    def test_an_update_in_calls_is_one_trace(self, one: Any) -> None:
        _, receiver = one
        update = self.sessions(receiver)[2]
        assert update.attributes["weightlife.session.operation"] == "update"
        assert receiver.above(update) == ["collective_rpc start_weight_update"]
        calls = [s for s in receiver.named("collective_rpc") if s.trace == update.trace]
        assert [c.name.partition(" ")[2] for c in calls] == [
            "start_weight_update", "update_weights", "finish_weight_update",
        ]  # fmt: skip

    def test_a_bare_load_of_a_clients_own_method(self, one: Any) -> None:
        _, receiver = one
        implicit = self.sessions(receiver)[3]
        assert implicit.attributes["weightlife.session.operation"] == "implicit"
        assert implicit.attributes["weightlife.session.outcome"] == "committed"
        assert receiver.above(implicit) == ["trainer sync bare"]

    def test_a_failure(self, one: Any) -> None:
        found, receiver = one
        failed = self.sessions(receiver)[4]
        assert "WL201" in found["error"]
        assert failed.failed
        assert receiver.above(failed) == ["trainer sync incomplete"]
        assert failed.attributes["error.type"] == "weightlife.errors.MissingTensorError"
        assert failed.attributes["weightlife.session.outcome"] == "aborted"
        (violation,) = (a for name, a in failed.events if name == "weightlife.violation")
        assert violation["weightlife.violation.kind"] == "WL201"
        assert violation["weightlife.violation.tensors"]
        assert [name for name, _ in failed.events].count("exception") == 1

    def test_no_more_spans_than_promised(self, one: Any) -> None:
        _, receiver = one
        counts: dict[str, int] = {}
        for span in receiver.spans:
            session = span.attributes.get("weightlife.session.id")
            if session:
                counts[session] = counts.get(session, 0) + 1
        assert len(counts) >= 5
        assert max(counts.values()) <= MAX_SPANS

    def test_an_exporter_costs_a_load_next_to_nothing_whatever_it_does(self, one: Any) -> None:
        found, receiver = one
        middle = {mode: statistics.median(seconds) for mode, seconds in found["seconds"].items()}
        for mode in ("slow", "refuses", "hangs"):
            assert middle[mode] < middle["works"] + 0.05 + 0.02, (mode, found["seconds"])
        # The first waits in vain for 50 ms, later ones find older work stuck and don't.
        assert statistics.median(found["seconds"]["hangs"][1:]) < middle["works"] + 0.03, found["seconds"]
        assert any(request.startswith("http/v1/traces") for request in receiver.requests)

    def test_names_and_types(self, one: Any) -> None:
        held_to_the_registry(one[1])
        ids_are_unique(one[1])


@pytest.fixture(scope="module", name="two")
def _two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Receiver]]:
    pair = checkpoints.pair("qwen2", tmp_path_factory.mktemp("otel"))
    with Receiver() as receiver:
        yield run("ranks", pair.a, pair.b, receiver.grpc), receiver


class TestTwoRanks:
    """`configure_otel`, OTLP over gRPC."""

    def test_every_rank_is_in_the_trainers_trace(self, two: Any) -> None:
        found, receiver = two
        reloads = [
            s
            for s in receiver.named("load_weights")
            if s.attributes["weightlife.session.operation"] == "reload"
        ]
        assert sorted(s.attributes["weightlife.rank"] for s in reloads) == [0, 1]
        assert {s.attributes["weightlife.world_size"] for s in reloads} == {2}
        (trainer,) = receiver.named("trainer sync")
        assert {s.trace for s in reloads} == {trainer.trace}
        assert found["traces"] == [trainer.trace] * 2
        assert [receiver.above(s) for s in reloads] == [["collective_rpc reload_weights", "trainer sync"]] * 2
        assert len({s.resource["vllm.process_id"] for s in reloads}) == 2
        assert all(s.attributes["weightlife.activity.duration.ranks"] > 0 for s in reloads)
        (lowest,) = (
            s.attributes["weightlife.session.id"] for s in reloads if not s.attributes["weightlife.rank"]
        )
        assert {s.attributes["weightlife.update.id"] for s in reloads} == {lowest}
        assert len({s.attributes["weightlife.session.id"] for s in reloads}) == 2

    def test_first_loads_hang_under_the_hosts_spans(self, two: Any) -> None:
        _, receiver = two
        first = [
            s
            for s in receiver.named("load_weights")
            if s.attributes["weightlife.session.operation"] == "first_load"
        ]
        assert len(first) == 2
        assert [receiver.above(s)[0] for s in first] == ["Load model"] * 2
        assert not any("weightlife.update.id" in s.attributes for s in first)  # they do not vote

    def test_metrics_come_from_every_worker(self, two: Any) -> None:
        _, receiver = two
        ours = [m for m in receiver.metrics if m.scope == "weightlife"]
        assert {m.name for m in ours} >= {
            "weightlife.session.duration", "weightlife.phase.duration", "weightlife.activity.time",
            "weightlife.tensor.received", "weightlife.receive.io", "weightlife.tensor.copied", "weightlife.copy.io",
        }  # fmt: skip
        last: dict[str, Any] = {}
        for metric in ours:
            if metric.name == "weightlife.session.duration":
                last[str(metric.resource.get("service.instance.id") or len(last))] = metric
        seen = {
            attributes["weightlife.session.operation"]
            for metric in last.values()
            for attributes, _ in metric.points
        }
        assert seen == {"first_load", "reload"}
        assert all(m.resource["service.name"] == "rollout" for m in ours)

    def test_it_went_over_grpc(self, two: Any) -> None:
        found, receiver = two
        assert set(receiver.requests) == {"grpc/traces", "grpc/metrics"}
        assert set(found["configured"].values()) == {receiver.grpc}

    def test_names_and_types(self, two: Any) -> None:
        held_to_the_registry(two[1])
        ids_are_unique(two[1])


@pytest.fixture(scope="module", name="served")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    a, b = checkpoints.pair("qwen2", tmp_path_factory.mktemp("otel"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Receiver() as receiver, server(a, port, receiver.http, tmp_path_factory.mktemp("log")):
        post(port, "start_weight_update", {}, HEADERS)
        post(port, "update_weights", {"update_info": {"folder": str(b), "names": names(b)}}, HEADERS)
        post(port, "finish_weight_update", {}, HEADERS)
        post(port, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(a)}}, {})
        receiver.wait(lambda r: len(r.named("collective_rpc")) >= 4)
        receiver.wait(lambda r: sum(" rank0: committed, " in line.text for line in r.lines) >= 3)
        yield receiver


class TestServer:
    """`opentelemetry-instrument vllm serve`, which alone installs weightlife, and a client that sends its span's header."""

    def test_auto_instrumentation_made_the_provider_of_each_process(self, served: Receiver) -> None:
        ours = [span for span in served.spans if span.scope == "weightlife"]
        assert {span.resource["service.name"] for span in ours} == {"rollout"}
        by_process = {span.name.partition(" ")[0]: span.resource for span in ours}
        assert (
            "telemetry.auto.version" in by_process["collective_rpc"]
        )  # OpenTelemetry's distribution made it
        assert len({resource["service.instance.id"] for resource in by_process.values()}) == 2
        assert "weightlife.session.duration" in {metric.name for metric in served.metrics}

    def test_one_log_line_a_session(self, served: Receiver) -> None:
        """Of Python's logging, which whoever wants them exported has a handler for: here the distribution's."""
        said = [line for line in served.lines if " rank0: committed, " in line.text]
        assert [line.text.split()[2] for line in said] == ["first_load", "update", "reload"]
        assert {(line.severity, line.scope) for line in said} == {("INFO", "weightlife")}
        assert said[1].trace == "0af7651916cd43dd8448eb211c80319c"  # the client's
        sessions = {s.attributes["weightlife.session.id"] for s in served.named("load_weights")}
        assert {line.text.split()[1] for line in said} == sessions

    def test_the_clients_trace_goes_through_the_server_into_the_worker(self, served: Receiver) -> None:
        (update,) = (
            s
            for s in served.named("load_weights")
            if s.attributes["weightlife.session.operation"] == "update"
        )
        assert update.trace == "0af7651916cd43dd8448eb211c80319c"
        assert served.above(update) == ["collective_rpc start_weight_update"]
        calls = [s for s in served.named("collective_rpc") if s.trace == update.trace]
        assert [s.parent for s in calls] == ["b7ad6b7169203331"] * 3

    def test_a_request_without_a_header_is_a_trace_of_its_own(self, served: Receiver) -> None:
        (reload,) = (
            s
            for s in served.named("load_weights")
            if s.attributes["weightlife.session.operation"] == "reload"
        )
        assert served.above(reload) == ["collective_rpc reload_weights"]
        assert reload.trace != "0af7651916cd43dd8448eb211c80319c"


@contextlib.contextmanager
def server(model: Path, port: int, endpoint: str, logs: Path) -> Iterator[None]:
    with (logs / "server").open("w") as log:
        child = subprocess.Popen(
            [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable,
             "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
             "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--block-size", "32",
             "--max-model-len", "256", "--max-num-seqs", "4", "--num-gpu-blocks-override", "256",
             "--skip-tokenizer-init", "--worker-extension-cls", "weightlife.testing.worker_ext.TestWorkerExtension",
             "--weight-transfer-config", '{"backend": "weightlife_test_folder"}'],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
            env=environment(
                **COMMON, WEIGHTLIFE_MODE="enforce", VLLM_SERVER_DEV_MODE="1", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
                OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf", OTEL_TRACES_EXPORTER="otlp", OTEL_METRICS_EXPORTER="otlp",
                OTEL_LOGS_EXPORTER="otlp", OTEL_PYTHON_LOGGING_AUTO_INSTRUMENTATION_ENABLED="true",
            ),
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while True:
                assert child.poll() is None, (logs / "server").read_text()[-4000:]
                assert time.monotonic() < deadline, (logs / "server").read_text()[-4000:]
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                time.sleep(0.3)
            yield
        finally:
            stop(child)


def post(port: int, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{path}",
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 200
