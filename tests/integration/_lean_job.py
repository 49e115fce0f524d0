# SPDX-License-Identifier: Apache-2.0
"""Child process of test_lean.py: updates in place without undo, on a real engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(a: Path, b: Path) -> dict[str, Any]:
    """A -> B -> a failing update -> poisoned -> A, each step judged against cold loads."""
    from vllm import LLM, SamplingParams

    import weightlife
    from weightlife.testing import checkpoints, oracle

    weightlife.install(isolation="in_place", storage="pinned", undo_budget_bytes=0)
    llm = LLM(**oracle.engine_arguments(a))

    def update(weights: dict[str, Any]) -> str:
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        except Exception as error:  # noqa: BLE001 - the test judges what the client hears
            return f"{type(error).__name__}: {error}"
        return ""

    def early() -> int:
        report = weightlife.last_report(llm)
        assert report is not None
        return sum(phase.calls for phase in report.phases if phase.name == "process_early")

    found: dict[str, Any] = {"good": update(checkpoints.tensors(b)), "early": early()}
    found["wrong"] = oracle.differences(oracle.fingerprint(llm), oracle.cold(b))[:5]
    part = checkpoints.tensors(a)
    part.pop(max(part))
    found["bad"] = update(part)
    answer = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)[
        0
    ].outputs[0]
    found["served"] = [answer.finish_reason, list(answer.token_ids)]
    found["healed"] = update(checkpoints.tensors(a))
    found["wrong_after"] = oracle.differences(oracle.fingerprint(llm), oracle.cold(a))[:5]
    return found


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        WEIGHTLIFE_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))), flush=True)
