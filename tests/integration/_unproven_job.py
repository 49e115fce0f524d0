# SPDX-License-Identifier: Apache-2.0
"""Child process of test_unproven.py: an engine of a vLLM that lacks something which weightlife needs.

python -m tests.integration._unproven_job A B
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

# Who imports it by name is imported first: vLLM itself goes on without the attribute.
GONE = ("vllm.model_executor.model_loader.reload.layerwise", "finalize_layerwise_reload")


def main(a: Path, b: Path) -> dict[str, Any]:
    """One engine: A, then B by path, by vLLM's own means."""
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM

    import weightlife
    from weightlife.testing import oracle

    want = {"a": oracle.cold(a), "b": oracle.cold(b)}
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                lines.append(record.getMessage())

    logger, handler = logging.getLogger("weightlife"), Keep()
    module, attribute = GONE
    delattr(importlib.import_module(module), attribute)
    weightlife.install()
    logger.addHandler(handler)
    llm = LLM(**oracle.engine_arguments(a, weight_transfer_config=None))
    here: dict[str, Any] = {"first": oracle.differences(oracle.fingerprint(llm), want["a"])[:3]}
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    here["update"] = oracle.differences(oracle.fingerprint(llm), want["b"])[:3]
    status = weightlife.status(llm)
    report = weightlife.last_report(llm)
    assert report is not None
    here.update(
        modes=[[s["mode"], s["mode_asked"], s["mode_why"]] for s in (status, *status["workers"])],
        models=[row["observed"] for row in status["models"]], lines=lines,
        report=[report.outcome, report.opened_by, *report.notes],
    )  # fmt: skip
    return here


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        OMP_WAIT_POLICY="PASSIVE", WEIGHTLIFE_POISON="1", WEIGHTLIFE_TEST_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))), flush=True)
