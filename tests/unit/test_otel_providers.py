# SPDX-License-Identifier: Apache-2.0
"""Providers: none unless asked for, what is there is kept, workers are told. In processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightlife import errors
from weightlife.otel import providers

ROOT = Path(__file__).resolve().parents[2]
PRELUDE = """
import os, sys
sys.path.insert(0, os.getcwd())
import weightlife
from opentelemetry import metrics, trace
def kinds():
    return type(trace.get_tracer_provider()).__name__, type(metrics.get_meter_provider()).__name__
NONE = ("ProxyTracerProvider", "_ProxyMeterProvider")
"""


def child(code: str, **variables: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "WEIGHTLIFE"))}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], cwd=ROOT, env={**clean, **variables}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nothing_is_set_by_installing_nor_by_a_session() -> None:
    child(
        """
weightlife.install()
from weightlife._engine import events
events.bus.emit(events.SESSION_START, "s", model="M")
events.bus.emit(events.SESSION_END, "s", outcome="committed")
assert kinds() == NONE
assert "opentelemetry.sdk" not in sys.modules
assert "WEIGHTLIFE_OTEL" not in os.environ
assert weightlife.status()["telemetry"] == {"listening": True, "traces": "none", "metrics": "none", "dropped": 0}
weightlife.uninstall()
assert not weightlife.status()["telemetry"]["listening"]
""",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1",
    )


def test_a_plain_model_is_traced_without_installing() -> None:
    child("""
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weightlife import _api
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
model = torch.nn.Linear(2, 2)
@weightlife.wrap_loader
def load(module, weights):
    for name, tensor in weights:
        dict(module.named_parameters())[name].data.copy_(tensor)
weights = {name: torch.ones_like(value) for name, value in model.named_parameters()}
load(model, iter(weights.items()))
load(model, iter(weights.items()))
assert _api._telemetry[0].delivery.drain(10)
roots = [span for span in exporter.get_finished_spans() if span.name == "load_weights Linear"]
assert [span.attributes["weightlife.session.operation"] for span in roots] == ["first_load", "update"], roots
assert weightlife.last_report(model).trace_id == f"{roots[1].context.trace_id:032x}"
os._exit(0)
""")


def test_asked_for() -> None:
    child("""
done = weightlife.configure_otel("http://127.0.0.1:1")
assert kinds() == ("TracerProvider", "MeterProvider"), kinds()
assert done == {"traces": "http://127.0.0.1:1/v1/traces", "metrics": "http://127.0.0.1:1/v1/metrics"}, done
assert os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://127.0.0.1:1/v1/traces"
assert os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
assert os.environ["OTEL_SERVICE_NAME"] == "vllm"
assert os.environ["WEIGHTLIFE_OTEL"] == "1"
assert trace.get_tracer_provider().resource.attributes["service.name"] == "vllm"
first = trace.get_tracer_provider()
assert weightlife.configure_otel()["traces"] == "kept"
assert trace.get_tracer_provider() is first
os._exit(0)
""")


def test_over_grpc() -> None:
    child("""
done = weightlife.configure_otel("http://127.0.0.1:1", protocol="grpc", service_name="rollout")
assert kinds() == ("TracerProvider", "MeterProvider"), kinds()
assert set(done.values()) == {"http://127.0.0.1:1"}
(processor,) = trace.get_tracer_provider()._active_span_processor._span_processors
assert "grpc" in type(processor.span_exporter).__module__
assert trace.get_tracer_provider().resource.attributes["service.name"] == "rollout"
os._exit(0)
""")


def test_what_the_environment_says_is_kept_and_what_the_caller_says_wins() -> None:
    child(
        """
done = weightlife.configure_otel()
assert done["traces"] == "http://127.0.0.1:2/elsewhere"
assert done["metrics"] == "http://127.0.0.1:3/v1/metrics"
assert os.environ["OTEL_SERVICE_NAME"] == "mine"
os._exit(0)
""",
        OTEL_SERVICE_NAME="mine",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:3/",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:2/elsewhere",
    )
    child(
        """
done = weightlife.configure_otel("http://127.0.0.1:4/v1/traces")
assert done == {"traces": "http://127.0.0.1:4/v1/traces", "metrics": "http://127.0.0.1:4/v1/metrics"}
os._exit(0)
""",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:2/elsewhere",
    )


def test_a_providers_of_somebody_else_is_kept() -> None:
    child("""
from opentelemetry.sdk.trace import TracerProvider
mine = TracerProvider()
trace.set_tracer_provider(mine)
done = weightlife.configure_otel("http://127.0.0.1:1")
assert done["traces"] == "kept"
assert trace.get_tracer_provider() is mine
assert kinds()[1] == "MeterProvider"
os._exit(0)
""")


@pytest.mark.parametrize("value", ["true", "TRUE"])
def test_a_disabled_sdk_stays_out(value: str) -> None:
    child(
        """
assert weightlife.configure_otel() == {"traces": "disabled", "metrics": "disabled"}
assert kinds() == NONE
assert "WEIGHTLIFE_OTEL" not in os.environ
""",
        OTEL_SDK_DISABLED=value,
    )


def test_one_signal_may_be_left_out() -> None:
    child(
        """
assert weightlife.configure_otel()["metrics"] == "none"
assert kinds() == ("TracerProvider", NONE[1])
os._exit(0)
""",
        OTEL_METRICS_EXPORTER="none",
    )


def test_uninstall_takes_the_variables_back() -> None:
    child(
        """
weightlife.install()
weightlife.configure_otel("http://127.0.0.1:1")
weightlife.uninstall()
assert not [name for name in os.environ if name.startswith(("WEIGHTLIFE", "OTEL_EXPORTER"))]
assert os.environ["OTEL_SERVICE_NAME"] == "mine"
os._exit(0)
""",
        OTEL_SERVICE_NAME="mine",
    )


def test_a_worker_sets_up_what_the_front_end_left_for_it() -> None:
    told = child("""
weightlife.configure_otel("http://127.0.0.1:1", protocol="grpc")
import json
weightlife.install()
print(json.dumps({k: v for k, v in os.environ.items() if k.startswith(("OTEL_", "WEIGHTLIFE"))}), flush=True)
os._exit(0)
""")
    import json

    child(
        """
from weightlife.hosts.vllm.plugin import register
register()
register()
assert kinds() == ("TracerProvider", "MeterProvider")
assert weightlife.status()["telemetry"]["traces"] == "TracerProvider"
os._exit(0)
""",
        **json.loads(told),
    )
    child(
        "from weightlife.hosts.vllm.plugin import register\nregister()\nassert kinds() == NONE",
        WEIGHTLIFE="1",
    )


def test_a_worker_without_the_sdk_runs_all_the_same() -> None:
    said = child(
        """
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk"):
            raise ImportError(name, name=name)
sys.meta_path.insert(0, Block())
import logging
logging.basicConfig(stream=sys.stdout)
from weightlife.hosts.vllm.plugin import register
register()
assert weightlife.status()["installed"]
try:
    weightlife.configure_otel()
except weightlife.errors.ConfigError as error:
    assert "weightlife[otel]" in str(error)
else:
    raise AssertionError
""",
        WEIGHTLIFE="1",
        WEIGHTLIFE_OTEL="1",
    )
    assert "telemetry could not be set up" in said


@pytest.mark.parametrize(
    "bad",
    [
        {"endpoint": "localhost:4317"},
        {"endpoint": "ftp://x"},
        {"endpoint": "http://"},
        {"protocol": "http/json"},
    ],
)
def test_bad_arguments(bad: dict[str, Any]) -> None:
    environ: dict[str, str] = {}
    given = {"endpoint": None, "protocol": None, "service_name": None, **bad}
    with pytest.raises(errors.ConfigError):
        providers.configure(**given, environ=environ)
    assert environ == {}


@pytest.mark.parametrize("asked", [False, True])
def test_ray_workers_get_the_variables_that_they_need(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    from weightlife.hosts.vllm.seams import ray_variables

    monkeypatch.setenv("OTEL_SERVICE_NAME", "x")
    monkeypatch.setenv("WEIGHTLIFE_OTEL", "1" if asked else "")
    names = ray_variables(lambda: {"A"}, None, (), {})
    assert {"A", "WEIGHTLIFE_OTEL"} <= names
    assert ("OTEL_SERVICE_NAME" in names) is asked


INSTRUMENT = """
from weightlife.otel.instrumentor import WeightlifeInstrumentor
instrumentor = WeightlifeInstrumentor()
"""


class TestInstrumentor:
    def test_watches_and_takes_itself_back(self) -> None:
        child(
            INSTRUMENT
            + """
instrumentor.instrument()
assert weightlife.status()["mode"] == "observe"
assert os.environ["WEIGHTLIFE_MODE"] == "observe" and os.environ["WEIGHTLIFE_OTEL"] == "1"
assert kinds() == NONE
instrumentor.instrument()
instrumentor.uninstrument()
assert not weightlife.status()["installed"]
assert not [name for name in os.environ if name.startswith("WEIGHTLIFE")]
"""
        )

    def test_what_the_user_installs_is_obeyed(self) -> None:
        child(
            INSTRUMENT
            + """
instrumentor.instrument()
weightlife.install()
assert weightlife.status()["mode"] == "enforce"
weightlife.install(mode="observe")
weightlife.install()
assert weightlife.status()["mode"] == "observe"  # his own choice stays
"""
        )

    @pytest.mark.parametrize(
        ("variables", "mode"),
        [
            ({"WEIGHTLIFE": "1"}, "enforce"),
            ({"WEIGHTLIFE_MODE": "enforce"}, "enforce"),
            ({"WEIGHTLIFE": "0"}, None),
        ],
    )
    def test_the_environment_decides(self, variables: dict[str, str], mode: str | None) -> None:
        child(
            INSTRUMENT + f"instrumentor.instrument()\nassert weightlife.status()['mode'] == {mode!r}",
            **variables,
        )

    def test_given_providers(self) -> None:
        child(
            INSTRUMENT
            + """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weightlife import _api
from weightlife._engine import events
exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
weightlife.install()
instrumentor.instrument(tracer_provider=provider)
def session():
    events.bus.emit(events.SESSION_START, "s", model="M")
    events.bus.emit(events.SESSION_END, "s", outcome="committed")
session()
assert _api._telemetry[0].delivery.drain(10)
assert [s.name for s in exporter.get_finished_spans()] == ["load_weights M"]
assert kinds() == NONE
instrumentor.uninstrument()
assert weightlife.status()["installed"]  # it was there before
session()
assert len(exporter.get_finished_spans()) == 1
os._exit(0)
"""
        )
