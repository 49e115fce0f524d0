# SPDX-License-Identifier: Apache-2.0
"""Workers that are actors of a real Ray: settings reach them, a reload is exact, a failure changes nothing.

`make test-ray` runs these: it makes an environment that has Ray beside the host's packages. vLLM's CPU platform does
not offer Ray, for want of a device name; the job gives it one, and everything else is vLLM's own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration._child import ROOT, result_of
from weightlife import errors
from weightlife.testing import checkpoints, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.ray]

EXECUTORS = {"actors of the multiprocessing kind": "1", "compiled graphs": "0"}


@pytest.fixture(scope="module", params=EXECUTORS.values(), ids=EXECUTORS.keys(), name="found")
def _found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    pair = checkpoints.pair("qwen2", folder)
    broken = folder / "broken"
    broken.mkdir()
    for file in Path(pair.b).iterdir():
        if file.suffix == ".safetensors":
            tensors: dict[str, torch.Tensor] = load_file(file)
            tensors.pop("model.layers.1.mlp.down_proj.weight", None)
            save_file(tensors, broken / file.name)
        else:
            (broken / file.name).write_bytes(file.read_bytes())
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    under, stock = (
        result_of("_job", pair.a, pair.b, broken, which, request.param, package="tests.ray", env=env)
        for which in ("weightlife", "stock")
    )
    return {**under, "cold": stock["b"]}


def test_settings_reach_the_actors(found: dict[str, Any]) -> None:
    assert found["reports"] == [["committed", 0, 2, "adopted"], ["committed", 1, 2, "adopted"]]


def test_a_reload_equals_a_cold_load(found: dict[str, Any]) -> None:
    oracle.assert_equal(found["b"], found["cold"])
    assert found["a"]["tokens"] != found["b"]["tokens"]


def test_an_incomplete_update_changes_nothing(found: dict[str, Any]) -> None:
    assert isinstance(errors.from_message(found["error"]), errors.MissingTensorError), found["error"]
    oracle.assert_equal(found["a_again"], found["a"])
