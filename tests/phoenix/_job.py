# SPDX-License-Identifier: Apache-2.0
"""Child process of test_phoenix.py: an engine of two ranks whose updates are traced, one good and one incomplete."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.integration._otel_job import COMMON
from weightlife.testing._source import names


def main(a: Path, b: Path, endpoint: str) -> dict[str, Any]:
    """Update to B by path, and fail to go back to A for want of a tensor."""
    import weightlife

    weightlife.configure_otel(endpoint)
    weightlife.install(handshake="strict")
    from opentelemetry import trace
    from vllm import LLM

    from weightlife.testing import oracle

    llm = LLM(**oracle.engine_arguments(a, tensor_parallel_size=2))
    tracer = trace.get_tracer("trainer")
    found: dict[str, Any] = {}
    with tracer.start_as_current_span("trainer sync"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    found["good"] = [report.trace_id for report in weightlife.last_reports(llm)]
    with tracer.start_as_current_span("trainer sync incomplete"):
        try:
            llm.collective_rpc("weightlife_test_reload_iterator", args=(str(a), names(a)[:-1]))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found["error"] = str(error)[:2000]
    found["missing"] = names(a)[-1]
    found["bad"] = [report.trace_id for report in weightlife.last_reports(llm)]
    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
    return found


if __name__ == "__main__":
    # a receiver of traces alone, in a project of its own
    os.environ.update(
        COMMON, OTEL_METRICS_EXPORTER="none", OTEL_RESOURCE_ATTRIBUTES="openinference.project.name=weightlife"
    )
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])), flush=True)
