# SPDX-License-Identifier: Apache-2.0
"""Child process of test_docs_run.py and tests/unit/test_docs_blocks.py: runs the Python blocks of the documentation.

python -m tests.integration._docs_job plain
python -m tests.integration._docs_job engine A B SCRATCH
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import docblocks


def plain() -> dict[str, str]:
    """Run the blocks that need torch at most; what went wrong, by place."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:  # blocks may write files
        os.chdir(folder)
        try:
            return _plain()
        finally:
            os.chdir(before)


def _plain() -> dict[str, str]:
    import torch
    from torch import nn

    problems: dict[str, str] = {}
    spaces: dict[str, dict[str, Any]] = {}
    for block in docblocks.every("plain"):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        weights = [(name, torch.rand_like(p)) for name, p in model.named_parameters()]
        sent: list[Any] = []
        values = {"model": model, "weights": weights, "send": sent.append}
        attempt(block, spaces.setdefault(block.page, {}), values, problems)
        if (
            "load(model, weights)" in block.text and block.page == "README.md"
        ):  # its loader wrote what it was given
            wrong = [name for name, p in model.named_parameters() if not torch.equal(p, dict(weights)[name])]
            if wrong:
                problems[block.where] = f"{wrong} are not what was loaded"
        if "send" in block.text and not sent:
            problems[block.where] = "nothing was sent"
    return problems


def attempt(
    block: docblocks.Block, namespace: dict[str, Any], values: dict[str, Any], problems: dict[str, str]
) -> None:
    """Run a block; note what it raises."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            docblocks.run(block, namespace, values)
    except BaseException:  # noqa: BLE001 - the other blocks still have to be run
        problems[block.where] = traceback.format_exc()[-1500:]


class Bench:
    """One engine, and what the parameters in the blocks stand for."""

    def __init__(self, a: Path, b: Path, scratch: Path) -> None:
        import weightlife
        from weightlife.testing import oracle

        self.a, self.b, self.scratch = a, b, scratch
        self.want = {"a": oracle.cold(a), "b": oracle.cold(b)}
        weightlife.install(digests="commit")
        from vllm import LLM

        self.llm: Any = LLM(**oracle.engine_arguments(a))
        self.first = weightlife.digest(self.llm)

    @property
    def worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker

    def values(self, block: docblocks.Block) -> dict[str, Any]:
        import torch

        from weightlife import digests
        from weightlife.testing._source import names
        from weightlife.testing.checkpoints import tensors

        new = tensors(self.b)
        if block.options.get("trained") == "float32":
            trained = {n: t.float() if t.dtype is torch.bfloat16 else t for n, t in new.items()}
        else:
            trained = dict(new)
        values = {
            "llm": self.llm,
            "worker": self.worker,
            "path": str(self.b),
            "folder": self.b,
            "file": self.scratch / "manifest.json",
            "trained": trained,
            "buckets": buckets(new),
            "table": digests.digest_table(new),
            "first": self.first,
            "update_info": {"folder": str(self.b), "names": names(self.b)},
        }
        if "path" in block.options:
            values["path"] = values[block.options["path"]]
        return values

    def run(self, block: docblocks.Block, namespace: dict[str, Any], problems: dict[str, str]) -> None:
        import weightlife
        from weightlife.testing import oracle

        if "leaves" in block.options:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.a)})
        if block.options.get("before") == "open":
            self.llm.collective_rpc("start_weight_update")
            try:
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.b)})
            except Exception as error:  # noqa: BLE001 - the page says which error it is
                problem = weightlife.errors.from_message(str(error)) or error
                if getattr(problem, "code", "") != "WL101":
                    problems[block.where] = f"an open update was met by {problem!r}"
            else:
                problems[block.where] = "an open update was not in the way"
        attempt(block, namespace, self.values(block), problems)
        side = block.options.get("leaves")
        if side is not None and block.where not in problems:
            found = oracle.differences(oracle.fingerprint(self.llm), self.want[side])
            if found:
                problems[block.where] = f"not a cold {side}: {found[:4]}"
            report = weightlife.last_report(self.llm)
            if report is None or report.outcome != "committed":
                problems[block.where] = f"the last report says {report and report.outcome}"


def buckets(weights: dict[str, Any]) -> Iterator[list[tuple[str, Any]]]:
    """Buckets of a few tensors; each one is overwritten when the next is asked for, as in a buffer that is reused."""
    from weightlife.testing.worker_ext import spoil

    order = list(weights)
    for start in range(0, len(order), 5):
        bucket = [(name, weights[name].clone()) for name in order[start : start + 5]]
        yield bucket
        for _, tensor in bucket:
            spoil(tensor)


def engine(a: Path, b: Path, scratch: Path) -> dict[str, str]:
    """Run the blocks that need an engine; what went wrong, by place."""
    bench = Bench(a, b, scratch)
    problems: dict[str, str] = {}
    spaces: dict[str, dict[str, Any]] = {}
    for block in docblocks.every("engine"):
        bench.run(block, spaces.setdefault(block.page, {}), problems)
    return problems


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        WEIGHTLIFE_POISON="1",
    )
    answer = plain() if sys.argv[1] == "plain" else engine(*map(Path, sys.argv[2:5]))
    print("RESULT " + json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # an exporter of a block may hold on to the process
