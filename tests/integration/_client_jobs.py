# SPDX-License-Identifier: Apache-2.0
"""Run scenarios on one engine in a child process."""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from _client_drivers import EXTENSION
from _client_rig import SCENARIOS, Rig

from weightlife.testing.transfer import BACKEND

HERE = Path(__file__).resolve().parent


def execute(
    family: str,
    scenarios: list[str],
    root: str,
    settings: dict[str, Any] | None,
    before: str = "",
    start: str = "a",
    drafter: bool = False,
) -> dict[str, Any]:
    """Run scenarios one after the other on one engine of `family`; name -> problems and facts.

    Args:
        settings: arguments of `weightlife.install`; None runs stock vLLM (to check the drivers themselves).
        before: a function of `_client_faults` that runs before the engine is made (patches of a client).
        start: which checkpoint the engine loads.
        drafter: the same checkpoint is loaded as a draft model too.
    """
    import _client_faults
    import _client_scenarios  # noqa: F401 - registers scenarios

    from weightlife.testing import _cold, checkpoints, oracle

    a, b = checkpoints.pair(family, Path(root))
    want = {folder: oracle.cold(folder) for folder in (a, b)}
    os.environ[oracle.POISON_VARIABLE] = "1"
    oracle.poison()
    if settings is not None:
        import weightlife

        weightlife.install(**settings)
    if before:
        getattr(_client_faults, before)()
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    first = b if start == "b" else a
    more: dict[str, Any] = {"weight_transfer_config": WeightTransferConfig(backend=BACKEND)}
    if drafter:
        more["speculative_config"] = {
            "method": "draft_model",
            "model": str(first),
            "num_speculative_tokens": 2,
        }
    llm = LLM(**oracle.engine_arguments(first, worker_extension_cls=EXTENSION, **more))
    _cold.KEEP.append(llm)
    rig = Rig(llm, a, b, want)
    out: dict[str, Any] = {}
    for name in scenarios:
        out[name] = {"problems": ["the process ended here"], "facts": {}}
        _note(out)
        rig.problems, rig.facts = [], {}
        started = time.monotonic()
        try:
            _back_to_a(rig, out)
            SCENARIOS[name](rig)
        except Exception as error:  # noqa: BLE001 - the verdict is the point: the next scenario may still work
            traceback.print_exc()
            rig.problems.append(f"raised {type(error).__name__}: {str(error)[:600]}")
            rig.problems.append(traceback.format_exc()[-1500:])
        rig.facts["seconds"] = round(time.monotonic() - started, 2)
        out[name] = {"problems": rig.problems, "facts": rig.facts}
        _note(out)
    return out


def _back_to_a(rig: Rig, out: dict[str, Any]) -> None:
    """What an earlier scenario left behind is none of this one's business."""
    engine = rig.llm.llm_engine
    engine.engine_core.engine_core.resume_scheduler()
    if engine.has_unfinished_requests():
        engine.abort_request([f"{tag}-{i}" for tag in ("one", "two", "ref", "fly") for i in range(2)])
        rig.steps(4)
    if len(out) > 1:
        for cache in rig.worker.model_runner.kv_caches:  # a NaN there would outlive the weights that made it
            cache.zero_()
        rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(rig.a)})


def _note(out: dict[str, Any]) -> None:
    scratch = os.environ.get("WEIGHTLIFE_TEST_SCRATCH")
    if scratch:
        (Path(scratch) / "progress").write_text(json.dumps(out))


def run(
    family: str,
    scenarios: list[str],
    root: Path,
    settings: dict[str, Any] | None,
    before: str = "",
    start: str = "a",
    drafter: bool = False,
    timeout: float = 300.0,
) -> dict[str, Any]:
    """`execute` in a child; when it crashes, the scenarios after the crash get another child."""
    from weightlife.testing import _cold, checkpoints, oracle

    for folder in checkpoints.pair(family, root):
        oracle.cold(folder)
    left, out = list(scenarios), {}
    while left:
        order = {
            "call": "_client_jobs:execute",
            "path": [str(HERE)],
            "arguments": {
                "family": family,
                "scenarios": left,
                "root": str(root),
                "settings": settings,
                "before": before,
                "start": start,
                "drafter": drafter,
            },
            "environment": {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "WEIGHTLIFE_TESTING_CACHE": os.environ.get("WEIGHTLIFE_TESTING_CACHE", ""),
                "WEIGHTLIFE_POISON": "1",
                **({"WEIGHTLIFE": "0"} if settings is None else {}),
            },
        }
        try:
            out.update(_cold.run(order, timeout=timeout))
            break
        except _cold.JobError as error:
            reached = error.progress or {left[0]: {"problems": [], "facts": {}}}
            last = next(reversed(reached))
            reached[last]["problems"] = [f"the process ended with {error.how}", error.output[-2000:]]
            out.update(reached)
            left = [name for name in left if name not in out]
    return out
