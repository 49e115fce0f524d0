# SPDX-License-Identifier: Apache-2.0
"""The documentation's Python blocks on real engines: what a page says to do leaves the engine equal to a cold load."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import docblocks, docshell
from tests.docblocks import ROOT
from tests.integration._child import result_of, stop
from weightlife import errors
from weightlife.runs.reader import read_run
from weightlife.testing import checkpoints, oracle
from weightlife.testing._source import names

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_blocks_that_need_an_engine(checkpoint_root: Path, tmp_path: Path) -> None:
    """One engine, in process as TRL has it, for all pages; a mixture of experts, whose weights are repacked."""
    pair = checkpoints.pair("mixtral", checkpoint_root)
    assert result_of("_docs_job", "engine", pair.a, pair.b, tmp_path, timeout=300) == {}


@pytest.fixture(name="served", scope="module")
def _served(checkpoint_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server that the guide starts, with its own options and variables, on a tiny model and another port."""
    a, _ = checkpoints.pair("qwen2tied", checkpoint_root)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (block,) = (
        block
        for block in docblocks.blocks_of(ROOT / "docs" / "guides" / "vllm-serve.md")
        if "vllm serve" in block.text
    )
    workplace = tmp_path_factory.mktemp("server")
    exports, serve = docshell.commands(block.text)
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "WEIGHTLIFE"))},
        **dict(word.replace("$PWD", str(workplace)).split("=", 1) for word in exports[1:]),
        "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "WEIGHTLIFE_POISON": "1",
    }  # fmt: skip
    given = {
        "MODEL": str(a),
        "8000": str(port),
        '{"backend": "nccl"}': '{"backend": "weightlife_test_folder"}',
    }
    assert set(given) <= set(serve)
    small = ["--dtype", "bfloat16", "--enforce-eager", "--block-size", "32", "--max-model-len", "256",
             "--max-num-seqs", "4", "--num-gpu-blocks-override", "256", "--skip-tokenizer-init",
             "--worker-extension-cls", oracle.EXTENSION]  # fmt: skip
    # What the page says of the CPU build, whose command `vllm` does not start.
    assert serve[:2] == ["vllm", "serve"]
    assert "python -m vllm.entrypoints.openai.api_server --model" in (ROOT / block.page).read_text(
        encoding="utf-8"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
               *(given.get(word, word) for word in serve[2:]), *small]  # fmt: skip
    with server(command, workplace, env, port) as url:
        yield url, workplace


@contextlib.contextmanager
def server(command: list[str], workplace: Path, env: dict[str, str], port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    said = workplace / "said"
    with said.open("w") as log:
        child = subprocess.Popen(command, cwd=workplace, stdout=log, stderr=subprocess.STDOUT, env=env)
    try:
        deadline = time.monotonic() + 120
        while True:
            assert child.poll() is None, said.read_text()[-4000:]
            assert time.monotonic() < deadline, said.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(0.3)
        yield url
    finally:
        stop(child)


def call(url: str, method: str, **more: Any) -> Any:
    request = urllib.request.Request(
        f"{url}/collective_rpc",
        json.dumps({"method": method, **more}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        body = answer.read()
    return json.loads(body)["results"] if body else None


def test_blocks_that_need_a_server(served: tuple[str, Path], checkpoint_root: Path) -> None:
    url, workplace = served
    a, b = checkpoints.pair("qwen2tied", checkpoint_root)
    want = oracle.cold(b)["ranks"][0]
    values = {"url": url, "path": str(b), "update_info": {"folder": str(b), "names": names(b)}}
    spaces: dict[str, dict[str, Any]] = {}
    blocks = docblocks.every("server")
    assert {block.page for block in blocks} == {"docs/guides/vllm-serve.md", "docs/tracing.md"}
    for block in blocks:
        call(url, "reload_weights", kwargs={"weights_path": str(a)})
        docblocks.run(block, spaces.setdefault(block.page, {}), values)
        assert block.options == {"leaves": "b"}
        (held,) = call(url, "weightlife_test_fingerprint")
        assert held["tensors"] == want["tensors"], block.where
        assert held["nan"] == []

    # The guide's own helper makes a typed error of what the server answers.
    post = spaces["docs/guides/vllm-serve.md"]["post"]
    half = next(name for name in names(b) if ".q_proj." in name)  # its layer needs k and v, too
    post(url, "start_weight_update", {})
    post(url, "update_weights", {"update_info": {"folder": str(b), "names": [half]}})
    with pytest.raises(errors.CompletenessError):
        post(url, "finish_weight_update", {})

    deadline = time.monotonic() + 20
    while len(loads := read_run(workplace / "runs" / "server").sessions) < 2 * len(blocks) + 2:
        assert time.monotonic() < deadline, loads
        time.sleep(0.2)
