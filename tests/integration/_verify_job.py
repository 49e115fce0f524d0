# SPDX-License-Identifier: Apache-2.0
"""Child of test_verify.py: one engine, verified on A and on B, with faults in live memory and failures on the way.

python -m tests.integration._verify_job FAMILY [FAMILY ...]      # what each family's verification says
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def _engine(folder: Path, **more: Any) -> Any:
    from vllm import LLM

    from weightlife.testing import _cold, oracle

    llm = LLM(**oracle.engine_arguments(folder, **more))
    _cold.KEEP.append(llm)
    return llm


def _reload(llm: Any, folder: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def clean(family: str, root: str) -> dict[str, Any]:
    """Load A, verify; go to B, verify against both: what each says, and that nothing moved."""
    import weightlife
    from weightlife.testing import checkpoints, oracle

    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    weightlife.install()
    pair = checkpoints.pair(family, Path(root))
    llm = _engine(pair.a)
    found: dict[str, Any] = {}
    before = oracle.fingerprint(llm)
    found["first"] = weightlife.verify(llm).ranks[0].to_dict()
    found["moved"] = oracle.differences(oracle.fingerprint(llm), before)
    _reload(llm, pair.b)
    before = oracle.fingerprint(llm)
    found["b"] = weightlife.verify(llm, pair.b).ranks[0].to_dict()
    found["own"] = weightlife.verify(llm).ranks[0].to_dict()["ok"]
    found["a"] = weightlife.verify(llm, pair.a).ranks[0].to_dict()
    found["sampled"] = weightlife.verify(llm, pair.b, layers=0.3, seed=7).ranks[0].to_dict()
    found["stream"] = weightlife.verify(llm, checkpoints.tensors(pair.b).items()).ranks[0].to_dict()
    found["moved"] += oracle.differences(oracle.fingerprint(llm), before)
    _reload(llm, pair.a)
    found["back"] = weightlife.verify(llm, pair.a).ranks[0].to_dict()["ok"]
    return found


def main(families: list[str]) -> None:
    """Show what verification says of some families."""
    from weightlife.testing import _cold

    root = str(Path(__file__).resolve().parents[2] / ".artifacts" / "checkpoints")
    for family in families:
        started = time.monotonic()
        try:
            found = _cold.run(job("clean", family=family, root=root), fresh=False)
        except _cold.JobError as error:
            print(family, "FAILED", str(error)[-3000:])
            continue
        print(
            family, "ok" if found["first"]["ok"] and found["b"]["ok"] and found["back"] else "WRONG",
            {k: len(found[k]["differences"]) for k in ("first", "b", "a", "stream")}, found["moved"][:3],
            f"{time.monotonic() - started:.1f} s", {k: round(v, 3) for k, v in found["b"]["phases"].items()},
            f"{found['b']['seconds']:.3f}", found["b"]["groups"],
        )  # fmt: skip
        for item in (found["first"]["differences"] + found["b"]["differences"])[:6]:
            print("   ", item)
        for reason, entry in found["b"]["untold"].items():
            print("    untold:", reason, entry["places"], entry["elements"], entry["paths"][:3])


def job(call: str, **arguments: Any) -> dict[str, Any]:
    """The order for `_cold.run`."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        "call": f"tests.integration._verify_job:{call}", "path": [root], "arguments": arguments,
        "environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
