# SPDX-License-Identifier: Apache-2.0
"""Child process of test_ties.py: ties that a checkpoint breaks, or that a model can't break."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def _start(folder: Path, **more: Any) -> Any:
    from vllm import LLM

    from weightlife.testing import oracle

    return LLM(**oracle.engine_arguments(folder, **more))


def _update(llm: Any, folder: Path, *, by_path: bool = True) -> str:
    from weightlife.testing import checkpoints

    source = (
        {"weights_path": str(folder)}
        if by_path
        else {"weights_iterator": iter(checkpoints.tensors(folder).items())}
    )
    try:
        llm.collective_rpc("reload_weights", kwargs=source)
    except Exception as error:  # noqa: BLE001 - the test judges what the client hears
        return f"{type(error).__name__}: {error}"
    return ""


def main(case: str, tied: Path, untied: Path) -> dict[str, Any]:
    """Run one case.

    Args:
        case: pinned, auto (a head equal at first, another one later) or dummy.
        tied: checkpoint whose head equals its embeddings, so that vLLM ties them after the load.
        untied: checkpoint with a head of its own.
    """
    import weightlife
    from weightlife.testing import oracle

    weightlife.install(storage="pinned" if case == "pinned" else "auto")
    llm = _start(tied, load_format="dummy") if case == "dummy" else _start(tied)
    before = oracle.fingerprint(llm)
    heard = _update(llm, untied, by_path=case != "dummy")  # a dummy loader can't reload by path at all
    after = oracle.fingerprint(llm)
    report = weightlife.last_report(llm)
    assert report is not None
    found = {
        "heard": heard,
        "old": oracle.differences(after, before) == [],
        "new": oracle.differences(after, oracle.cold(untied)) == [],
        "storage": report.storage,
    }
    if case != "dummy":  # and a good update still is one
        found["then"] = _update(llm, tied)
        found["then_exact"] = oracle.differences(oracle.fingerprint(llm), oracle.cold(tied)) == []
    return found


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        WEIGHTLIFE_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))), flush=True)
