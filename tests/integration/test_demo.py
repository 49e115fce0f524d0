# SPDX-License-Identifier: Apache-2.0
"""`make demo` shows what it claims, and says so when it does not hold."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
LIMIT = 180  # seconds: what the demo may take after set-up
COLD = {"A": [1, 2], "B": [3, 4]}


@pytest.fixture(name="demo", scope="module")
def _demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weightlife_demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="ran", scope="module")
def _ran() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--json"], capture_output=True, text=True, timeout=3 * LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.vllm
class TestRun:
    def test_everything_held_in_time(self, ran: dict[str, Any]) -> None:
        assert ran["schema_version"] == 1
        assert ran["held"] is True
        assert ran["seconds"] < LIMIT

    def test_both_sides_got_the_same_sequence(self, ran: dict[str, Any]) -> None:
        sequence = [(step["title"], step["serving"]) for step in ran["weightlife"]]
        assert [(step["title"], step["serving"]) for step in ran["stock"]] == sequence[: len(ran["stock"])]
        assert len(sequence) == 7

    def test_stock_begins_exact_and_is_then_wrong_in_silence(self, ran: dict[str, Any]) -> None:
        first, swap, *_ = ran["stock"]
        assert first["equal"]
        assert swap["happened"] == "done, no error"
        assert not swap["equal"]
        assert swap["differences"]

    def test_under_weightlife_every_step_is_exact(self, ran: dict[str, Any]) -> None:
        assert [step["differences"] for step in ran["weightlife"]] == [[]] * 7
        assert all(step["as_expected"] for step in ran["weightlife"])
        failed = [step["happened"] for step in ran["weightlife"] if step["happened"] != "done, no error"]
        assert [text.partition(":")[0] for text in failed] == ["MissingTensorError", "SourceError"]

    def test_what_answers_is_what_a_cold_load_answers(self, ran: dict[str, Any]) -> None:
        assert ran["cold_tokens"]["A"] != ran["cold_tokens"]["B"]
        for step in ran["weightlife"]:
            assert step["tokens"] == ran["cold_tokens"][step["serving"]]


def step(demo: ModuleType, **more: Any) -> Any:
    given = {"happened": "done, no error", "equal": True, "as_expected": True, "tokens": [1, 2]}
    return demo.Step("a step", "A", **{**given, **more})


def shown(demo: ModuleType, stock: list[Any], ours: list[Any]) -> Any:
    show = demo.Show("mixtral", sys.stderr)
    show.steps = {"stock": stock, "weightlife": ours}
    return show


class TestVerdict:
    def test_all_as_expected_holds(self, demo: ModuleType) -> None:
        good = step(demo)
        held, lines = demo.verdict(shown(demo, [good, good], [good, good]))
        assert held
        assert lines[-1] == "Everything held."

    @pytest.mark.parametrize(
        ("stock", "ours"),
        [
            ([], [{}, {}]),
            ([{"equal": False}], [{}, {}]),
            ([{}], []),
            ([{}], [{}]),  # the process died after its first step
            ([{}], [{}, {"as_expected": False}]),
        ],
    )
    def test_anything_else_does_not(
        self, demo: ModuleType, stock: list[dict[str, Any]], ours: list[dict[str, Any]]
    ) -> None:
        held, lines = demo.verdict(
            shown(demo, [step(demo, **more) for more in stock], [step(demo, **more) for more in ours])
        )
        assert not held
        assert "NOT EVERYTHING HELD" in lines[-1]

    @pytest.mark.parametrize(
        ("more", "text"),
        [
            ({}, "yes, equal to A"),
            ({"equal": False, "tokens": [3, 4], "differences": ["x"]}, "NO: answers as B, should be A"),
            ({"equal": False, "tokens": [5, 6], "differences": ["x"]}, "NO: answers as neither A nor B"),
            ({"equal": False, "tokens": [0, 0], "differences": ["9 are NaN"]}, "NO: computes with NaN"),
            ({"equal": False, "tokens": [], "differences": ["no answer: boom"]}, "NO: no answer: boom"),
        ],
    )
    def test_a_step_is_judged_in_words(self, demo: ModuleType, more: dict[str, Any], text: str) -> None:
        assert demo.judgement(step(demo, **more), COLD).startswith(text)
        assert any("a step" in line for line in demo.table([step(demo, **more)], COLD))
