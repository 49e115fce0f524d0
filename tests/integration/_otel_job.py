# SPDX-License-Identifier: Apache-2.0
"""Child processes of test_otel.py: real engines that export to a receiver of the test."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from weightlife.testing._source import names

COMMON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "WEIGHTLIFE_POISON": "1",
    "OTEL_SERVICE_NAME": "rollout",
}


def single(a: Path, b: Path, endpoint: str) -> dict[str, Any]:
    """One rank in a process of its own, with vLLM's tracer, over HTTP."""
    import weightlife

    weightlife.install(handshake="strict", trace_layer_ms=0)
    from opentelemetry import trace
    from vllm import LLM, SamplingParams

    from weightlife.testing import oracle

    # vLLM's request spans need its statistics: without them an assertion fails in its output processor.
    llm = LLM(
        **oracle.engine_arguments(a, otlp_traces_endpoint=f"{endpoint}/v1/traces", disable_log_stats=False)
    )
    tracer = trace.get_tracer("trainer")
    found: dict[str, Any] = {}

    def reload(folder: Path) -> float:
        started = time.perf_counter()
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        return time.perf_counter() - started

    def answers() -> Any:
        prompt = {"prompt_token_ids": list(range(5, 85))}  # two whole blocks that the prefix cache keeps
        sampling = SamplingParams(temperature=0.0, max_tokens=4, logprobs=20, ignore_eos=True)
        (out,) = llm.generate([prompt], sampling, use_tqdm=False)
        return [sorted((k, v.logprob) for k, v in step.items()) for step in out.outputs[0].logprobs]

    before = answers()
    with tracer.start_as_current_span("trainer sync by path"):
        reload(b)
    after = answers()
    llm.reset_prefix_cache()
    found["fresh_cache"] = after == answers() != before
    found["trace"] = weightlife.last_report(llm).trace_id

    llm.collective_rpc("start_weight_update")
    llm.collective_rpc("update_weights", kwargs={"update_info": {"folder": str(a), "names": names(a)}})
    llm.collective_rpc("finish_weight_update")

    with tracer.start_as_current_span("trainer sync bare"):
        llm.collective_rpc("weightlife_test_load", args=(str(b), names(b)))
    llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)

    with tracer.start_as_current_span("trainer sync incomplete"):
        try:
            llm.collective_rpc("weightlife_test_reload_iterator", args=(str(a), names(a)[:-1]))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found["error"] = str(error)[:2000]

    found["seconds"] = {}
    for mode in ("works", "slow", "refuses", "hangs"):
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/mode/{mode}", method="POST", data=b"")
        ).close()
        found["seconds"][mode] = [reload(folder) for folder in (a, b) * 4]
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/mode/works", method="POST", data=b"")).close()
    return found


def ranks(a: Path, b: Path, endpoint: str) -> dict[str, Any]:
    """Two ranks, over gRPC, set up by `configure_otel`."""
    import weightlife

    found: dict[str, Any] = {"configured": weightlife.configure_otel(endpoint, protocol="grpc")}
    weightlife.install(handshake="strict")
    from opentelemetry import trace
    from vllm import LLM

    from weightlife.testing import oracle

    llm = LLM(**oracle.engine_arguments(a, tensor_parallel_size=2))
    with trace.get_tracer("trainer").start_as_current_span("trainer sync"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(b)})
    found["traces"] = [report.trace_id for report in weightlife.last_reports(llm)]
    trace.get_tracer_provider().force_flush()  # type: ignore[attr-defined]
    return found


if __name__ == "__main__":
    os.environ.update(COMMON)
    if sys.argv[1] == "single":
        os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    answer = {"single": single, "ranks": ranks}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    )
    print("RESULT " + json.dumps(answer), flush=True)
