# SPDX-License-Identifier: Apache-2.0
"""Frameworks unchanged: each way in which TRL, verl, OpenRLHF, SkyRL and NeMo-RL call vLLM, on a real engine.

After a sync the engine must equal a cold load of B exactly (tokens, top-20 log-probabilities, every reachable
tensor), with and without requests in flight; what cannot be followed is refused while A is whole. Memory that
weightlife makes is poisoned. The drivers are in `_client_drivers`, what is asked of
them in `_client_scenarios` and `_client_faults`; one child process runs all scenarios of an engine.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
sys.path.insert(0, str(HERE))

import _client_async  # noqa: E402
import _client_faults  # noqa: E402, F401 - registers scenarios
import _client_scenarios  # noqa: E402, F401 - registers scenarios
from _client_drivers import DRIVERS  # noqa: E402
from _client_jobs import run  # noqa: E402
from _client_rig import SCENARIOS  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

os.environ.setdefault("WEIGHTLIFE_TESTING_CACHE", str(REPOSITORY / ".cache" / "oracle"))
ROOT = REPOSITORY / ".cache" / "checkpoints"

SETTINGS = {"storage": "pinned", "implicit_patience": 40}
ADOPTED = {**SETTINGS, "storage": "adopted"}

FRAMEWORKS = [f"{kind}_{name}" for name in DRIVERS for kind in ("idle", "in_flight")]
# What writes straight into live parameters needs their checkpoint layout, which a quantised layer never has.
QUANTISED = [name for name in FRAMEWORKS if not name.endswith("nemo_nccl_reshard")]
GUARD = [name for name in SCENARIOS if name.startswith("guard_")]
CONSEQUENCES = [
    name
    for name in SCENARIOS
    if name.startswith("consequence_") and not name.startswith(("consequence_05", "consequence_12"))
]
IDENTITY = ["consequence_08_identity", "consequence_08_class_swapped_while_loading"]
DRAFTERS = [name for name in SCENARIOS if name.startswith("consequence_12")]

# engine -> (family, settings, scenarios, client patches before the engine is made)
ENGINES: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "dense": ("qwen2", SETTINGS, [*FRAMEWORKS, *GUARD, *CONSEQUENCES], ""),
    "tied": ("qwen2tied", ADOPTED, [*FRAMEWORKS, "consequence_02_lazy_end", "consequence_05_tied_heads"], ""),
    "moe": ("mixtral", SETTINGS, [*FRAMEWORKS, GUARD[0], "consequence_01_no_begin_no_end", *IDENTITY], ""),
    "awq": ("awq", ADOPTED, [*QUANTISED, "consequence_01_no_begin_no_end"], ""),
    "w8a8": ("w8a8dyn", SETTINGS, [*QUANTISED, GUARD[0], *IDENTITY], ""),
    "awq_own": ("awq", SETTINGS, ["own_lifecycle"], "patch_quant_methods"),
    "w8a8_own": ("w8a8dyn", SETTINGS, ["own_lifecycle"], "patch_quant_methods"),
    "asleep": (
        "qwen2",
        SETTINGS,
        ["level_2_sleep_serves_nothing_until_a_complete_reload"],
        "real_sleep_on_a_cpu",
    ),
    "asleep_tied": (
        "qwen2tied",
        SETTINGS,
        ["level_2_sleep_serves_nothing_until_a_complete_reload"],
        "real_sleep_on_a_cpu",
    ),
}


@functools.cache
def results(engine: str) -> dict[str, Any]:
    """All scenarios of one engine."""
    family, settings, scenarios, before = ENGINES[engine]
    return run(family, scenarios, ROOT, settings, before)


def cases(prefix: tuple[str, ...]) -> list[Any]:
    """(engine, scenario) pairs, engine by engine so that each child is started once."""
    return [
        pytest.param(engine, name, id=f"{engine}-{name}")
        for engine, (_, _, scenarios, _) in ENGINES.items()
        for name in scenarios
        if name.startswith(prefix)
    ]


def check(engine: str, scenario: str) -> None:
    """Fail with everything that was wrong."""
    problems = results(engine)[scenario]["problems"]
    assert not problems, f"{engine} {scenario}:\n" + "\n".join(problems)


@pytest.mark.parametrize(("engine", "scenario"), cases(("idle_", "in_flight_")))
def test_framework(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("guard_",)))
def test_guard(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_01",)))
def test_consequence_01_neither_begin_nor_end(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_02",)))
def test_consequence_02_lazy_end(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_03",)))
def test_consequence_03_processing_as_end_mark(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_04",)))
def test_consequence_04_layerwise_functions(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_05",)))
def test_consequence_05_tied_heads(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_06",)))
def test_consequence_06_reused_buffers(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_07",)))
def test_consequence_07_casts(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_08",)))
def test_consequence_08_identity(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_09",)))
def test_consequence_09_worker_names(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_10",)))
def test_consequence_10_nan_is_legal(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.faults
@pytest.mark.parametrize(("engine", "scenario"), cases(("consequence_11",)))
def test_consequence_11_raising_in_the_middle(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("own_lifecycle",)))
def test_own_lifecycle(engine: str, scenario: str) -> None:
    check(engine, scenario)


@pytest.mark.parametrize(("engine", "scenario"), cases(("level_2_sleep",)))
def test_level_2_sleep(engine: str, scenario: str) -> None:
    check(engine, scenario)


# -- a drafter is a second root ------------------------------------------------------------------------------------


@functools.cache
def cold_drafter(side: str) -> dict[str, Any]:
    """What stock vLLM makes of checkpoint `side` as target and as drafter."""
    answer = run("qwen2", ["drafter_digests"], ROOT, None, start=side, drafter=True)["drafter_digests"]
    assert not answer["problems"], answer["problems"]
    facts: dict[str, Any] = answer["facts"]
    return facts


@functools.cache
def drafted() -> dict[str, Any]:
    """All drafter scenarios, on one engine."""
    return run("qwen2", DRAFTERS, ROOT, SETTINGS, drafter=True)


@pytest.mark.parametrize("scenario", DRAFTERS)
def test_consequence_12_drafter(scenario: str) -> None:
    from weightlife.testing import oracle

    answer = drafted()[scenario]
    assert not answer["problems"], answer["problems"]
    for side in ("b", "a"):
        want = cold_drafter(side)
        oracle.assert_equal(answer["facts"][f"fingerprint_{side}"], want["fingerprint"], f"target, {side}")
        assert answer["facts"][f"drafter_{side}"] == want["drafter"], f"the drafter is not a cold {side}"


# -- an engine core in a process of its own ------------------------------------------------------------------------


@functools.cache
def concurrent() -> dict[str, Any]:
    """All asynchronous drivers, on one engine."""
    return _client_async.run("qwen2", ROOT, SETTINGS)


@pytest.mark.parametrize("driver", list(_client_async.DRIVERS))
def test_requests_in_flight_in_another_process(driver: str) -> None:
    problems = concurrent()[driver]["problems"]
    assert not problems, "\n".join(problems)
