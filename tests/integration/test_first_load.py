# SPDX-License-Identifier: Apache-2.0
"""Under weightlife the first load is bit-identical to stock's, for every family and in both modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration import _run
from weightlife.testing import _cold, checkpoints, oracle

pytestmark = pytest.mark.vllm

Engine = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_first_load_equals_stock(family: str, engine: Engine) -> None:
    result = engine(family, [], weightlife={"mode": "enforce"})
    _run.require_exact(result)
    assert [step["step"] for step in result["steps"]] == ["start", "first_load"]


@pytest.mark.parametrize("family", ["qwen2tied", "mixtral", "w8a8dyn", "granite_hybrid"])
def test_observing_changes_nothing(family: str, engine: Engine) -> None:
    _run.require_exact(engine(family, [], weightlife={"mode": "observe"}))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gptq"])
def test_installed_before_vllm_is_imported(family: str, engine: Engine) -> None:
    _run.require_exact(engine(family, ["path"], weightlife={"mode": "enforce"}, fresh=True))


@pytest.mark.slow
def test_a_fork_of_the_server_answers_like_a_new_interpreter(checkpoint_root: Any) -> None:
    folder = checkpoints.pair("mixtral", checkpoint_root).a
    order = {
        "call": "weightlife.testing._cold:measure",
        "arguments": {"folder": str(folder), "kwargs": {}},
        "environment": {"WEIGHTLIFE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    oracle.assert_equal(_cold.run(order, fresh=True), oracle.cold(folder))
