# SPDX-License-Identifier: Apache-2.0
"""End to end with a backend that people use: a real engine's updates, sent over OTLP, on the web page of Phoenix.

`make test-phoenix` runs these. It makes an environment for arize-phoenix and playwright, beside the host's: a server
has no business among the packages of an engine. They need a Chromium (tests/chromium.py). Pictures of the page stay
in pytest's temporary folder.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chromium
from tests.integration._child import ROOT, result_of, stop
from weightlife import errors
from weightlife.testing import checkpoints

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.phoenix]

BIN = Path(os.environ.get("WEIGHTLIFE_PHOENIX") or ROOT / ".venv-phoenix") / "bin"
PHASES = [
    "prepare",
    "receive",
    "validate",
    "process_quant",
    "process_attention",
    "process_model",
    "copy_back",
]


def free_ports() -> list[int]:
    """Two of them, on the loopback address."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return [one.getsockname()[1], two.getsockname()[1]]


@pytest.fixture(scope="module", name="address")
def _address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running Phoenix, which tells nobody of itself and fetches nothing."""
    if not (BIN / "phoenix").exists():
        pytest.fail(
            "these tests need arize-phoenix in an environment of its own: make test-phoenix", pytrace=False
        )
    folder = tmp_path_factory.mktemp("phoenix")
    http, grpc = free_ports()
    address = f"http://127.0.0.1:{http}"
    env = {
        **os.environ, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(http), "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false", "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
        "PHOENIX_ENABLE_MCP_SERVER": "false",
    }  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([BIN / "phoenix", "serve"], env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 180
            while True:
                try:
                    urllib.request.urlopen(f"{address}/healthz", timeout=5).close()
                    break
                except OSError:
                    said = (folder / "log").read_text()[-3000:]
                    assert server.poll() is None, said
                    assert time.monotonic() < deadline, said
                    time.sleep(0.5)
            yield address
        finally:
            stop(server)


@pytest.fixture(scope="module", name="found")
def _found(address: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pair = checkpoints.pair("mixtral", tmp_path_factory.mktemp("checkpoints"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "WEIGHTLIFE_", "traceparent"))}
    env = {**clean, "PYTHONPATH": str(ROOT)}
    return result_of("_job", pair.a, pair.b, address, package="tests.phoenix", env=env)


def stored(address: str, trace: str) -> list[dict[str, Any]]:
    """The spans of a trace as Phoenix keeps them; it takes them in from a queue."""
    deadline = time.monotonic() + 30
    spans: list[dict[str, Any]] = []
    while time.monotonic() < deadline:
        where = f"{address}/v1/projects/weightlife/spans?limit=500&trace_id={trace}"
        with urllib.request.urlopen(where) as answer:
            spans = json.load(answer)["data"]
        if sum(span["name"] == "load_weights MixtralForCausalLM" for span in spans) == 2:
            break
        time.sleep(0.5)
    return spans


def shown(address: str, trace: str, pictures: Path, event: str = "") -> dict[str, Any]:
    """What its page shows of a trace."""
    done = subprocess.run(
        [BIN / "python", Path(__file__).with_name("_view.py"), chromium.find(), address, trace, pictures, event],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, (done.stdout + done.stderr)[-4000:]
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    assert (result["said"], result["abroad"]) == ([], [])
    assert sorted(picture.stat().st_size > 20_000 for picture in pictures.iterdir()) == [True] * 3
    return result


def test_both_ranks_of_an_update_hang_under_the_trainers_span(address: str, found: dict[str, Any]) -> None:
    (trace,) = set(found["good"])
    spans = {span["context"]["span_id"]: span for span in stored(address, trace)}
    loads = [span for span in spans.values() if span["name"] == "load_weights MixtralForCausalLM"]
    assert sorted(load["attributes"]["weightlife.rank"] for load in loads) == [0, 1]
    assert [load["attributes"]["weightlife.session.outcome"] for load in loads] == ["committed"] * 2
    for load in loads:
        call = spans[load["parent_id"]]
        assert call["name"] == "collective_rpc reload_weights"
        assert spans[call["parent_id"]]["name"] == "trainer sync"
        below = {s["name"] for s in spans.values() if s["parent_id"] == load["context"]["span_id"]}
        assert below == set(PHASES)


def test_the_page_shows_an_update(address: str, found: dict[str, Any], tmp_path: Path) -> None:
    page = shown(address, found["good"][0], tmp_path)
    lines = page["tree"].splitlines()
    start = lines.index("collective_rpc reload_weights")
    assert "trainer sync" in lines[:start]
    assert lines[start:].count("load_weights MixtralForCausalLM") == 2
    for phase in PHASES:
        assert lines[start:].count(phase) == (4 if phase == "validate" else 2), phase
    assert "committed" in page["span"]


def test_the_page_says_why_an_update_failed(address: str, found: dict[str, Any], tmp_path: Path) -> None:
    assert isinstance(errors.from_message(found["error"]), errors.MissingTensorError), found["error"]
    (trace,) = set(found["bad"])
    loads = [s for s in stored(address, trace) if s["name"] == "load_weights MixtralForCausalLM"]
    assert [load["status_code"] for load in loads] == ["ERROR"] * 2
    page = shown(address, trace, tmp_path, "weightlife.violation")
    assert "aborted" in page["span"]
    assert "weightlife.violation" in page["events"]
    assert found["missing"] in page["events"]
