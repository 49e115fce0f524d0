# SPDX-License-Identifier: Apache-2.0
"""Child process of test_ray.py: one engine whose two workers are actors of a real Ray."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def _call_it_a_device() -> None:
    """vLLM's CPU platform names no device for Ray's placement, so its workers sit on Ray's logical GPUs."""
    from vllm.platforms import current_platform

    type(current_platform).ray_device_key = "GPU"


def main(a: str, b: str, broken: str, under: bool) -> dict[str, Any]:
    """A cold load of B under stock (`under` false), or what A, B and a broken update do under weightlife."""
    import ray

    if under:
        import weightlife

        weightlife.install(
            handshake="strict", storage="adopted"
        )  # not the default: it shows that settings travel
    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
        runtime_env={"worker_process_setup_hook": _call_it_a_device},
    )  # fmt: skip
    _call_it_a_device()
    from vllm import LLM

    from weightlife.testing import oracle

    arguments = oracle.engine_arguments(
        a if under else b, tensor_parallel_size=2, distributed_executor_backend="ray"
    )
    del arguments[
        "weight_transfer_config"
    ]  # its backend is registered in the workers of the other tests alone
    llm = LLM(**arguments)
    if not under:
        return {"b": oracle.fingerprint(llm)}
    found: dict[str, Any] = {"a": oracle.fingerprint(llm)}
    try:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": broken})
        found["error"] = ""
    except Exception as error:  # noqa: BLE001 - the test looks at what was heard
        found["error"] = str(error)
    found["a_again"] = oracle.fingerprint(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": b})
    found["b"] = oracle.fingerprint(llm)
    reports = weightlife.last_reports(llm)
    found["reports"] = [[r.outcome, r.rank, r.world_size, r.storage] for r in reports]
    return found


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        VLLM_USE_RAY_V2_EXECUTOR_BACKEND=sys.argv[5], VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
        RAY_USAGE_STATS_ENABLED="0",
    )  # fmt: skip
    result = main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "weightlife")
    print("RESULT " + json.dumps(result), flush=True)
