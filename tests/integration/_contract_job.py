# SPDX-License-Identifier: Apache-2.0
"""Child process of test_contract_engine.py: an engine whose addresses are recorded by two oracles, then reloaded.

python -m tests.integration._contract_job A B pinned staged
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def kv(path: str) -> bool:
    """What requests leave behind, and what owners of native resources hold, is no contract."""
    return "kv_cache" in path


def main(a: Path, b: Path, storage: str, isolation: str) -> dict[str, Any]:
    """Load A; record; reload to B, to A and to B by path; say what moved."""
    import weightlife
    from weightlife._engine import lifecycle, slots
    from weightlife.testing import oracle
    from weightlife.testing.contract import Addresses, Captured

    weightlife.install(storage=storage, isolation=isolation)
    from vllm import LLM

    llm = LLM(**oracle.engine_arguments(a, weight_transfer_config=None))
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
    model = runner.get_model()
    life = lifecycle.of(model)
    assert life is not None
    prompts: Any = [{"prompt_token_ids": list(p)} for p in oracle.PROMPTS]

    def run() -> None:
        llm.reset_prefix_cache()
        llm.generate(prompts, use_tqdm=False)

    run()
    graph = Captured(run, model)
    before = Addresses(model, kv)
    captured_by_runner = runner.capture_model()  # no graphs here: says 0, and seals nothing
    found: dict[str, Any] = {"runner": [captured_by_runner, life.addresses.captured]}
    started = time.perf_counter()
    life.addresses.take()
    found["walk_ms"] = round((time.perf_counter() - started) * 1e3, 2)
    found["sealed"] = weightlife.seal(llm.llm_engine.model_executor.driver_worker.worker)[0]
    found["recorded"] = [len(graph.memory), len(before.seen)]
    found["mirrors"] = len(life.addresses.mirrors._agreed)
    # An owner of a native resource is replaced whole, with what hangs on it.
    native = {
        slots.step(holder.path, key).split(".<")[0]
        for holder, state in _holders(life)
        for key, value in state.items()
        if slots.is_opaque(value)
    }
    found["rounds"] = []
    for folder in (b, a, b):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        report = life.reports[-1]
        moved = [line for line in before.moved(model) if not any(line.startswith(n) for n in native)]
        found["rounds"].append({
            "outcome": report.outcome, "violations": [v.message for v in report.violations],
            "changes": [[c["kind"], c["path"], c["detail"]] for c in report.contract_changes if c["kind"] != "opaque"],
            "graph": [p for p in graph.problems() if "no path" not in p], "moved": moved,
            "share": round(life.addresses.seconds / report.seconds, 4), "ms": round(life.addresses.seconds * 1e3, 2),
            "derived": round(life.addresses.derived_seconds / report.seconds, 4),
        })  # fmt: skip
    found["native"] = len(native)
    return found


def _holders(life: Any) -> list[tuple[Any, Any]]:
    from weightlife._engine import slots

    holders, states = slots.walk(life.model, life.host.skip)
    return [(holders[ident], state) for ident, state in states.items()]


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR",
        OMP_WAIT_POLICY="PASSIVE", WEIGHTLIFE_POISON="1", WEIGHTLIFE_TEST_POISON="1",
    )  # fmt: skip
    print("RESULT " + json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])), flush=True)
