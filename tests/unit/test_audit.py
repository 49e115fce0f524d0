# SPDX-License-Identifier: Apache-2.0
"""`weightlife audit`: what it reads, how it puts runs together, what it does about crashes, and its exit codes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from weightlife import cli
from weightlife.cli import audit
from weightlife.hosts.vllm import hooks


def hook(text: str) -> ast.FunctionDef:
    tree = ast.parse(f"class A:\n    def process_weights_after_loading(self, layer):\n{text}")
    function = tree.body[0].body[0]  # type: ignore[attr-defined]
    assert isinstance(function, ast.FunctionDef)
    return function


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ("        pass", "nothing"),
        ('        """Text."""\n        return', "nothing"),
        ('        """Text."""\n        return None', "nothing"),
        ("        raise NotImplementedError", "abstract"),
        ("        super().process_weights_after_loading(layer)", "delegates"),
        ("        self.kernel.process_weights_after_loading(layer)", "delegates"),
        ("        layer.weight = layer.weight.t()", "writes"),
        ("        pass\n        layer.x = 1", "writes"),
    ],
)
def test_what_a_hook_reads_as(text: str, reads: str) -> None:
    assert hooks._reads(hook(text)) == reads


def test_every_class_of_the_installed_vllm_with_a_hook_is_found() -> None:
    """Against a count by text: a hook is a method, indented by four."""
    found = hooks.implementations()
    names = {item.name for item in found}
    assert "vllm.model_executor.layers.linear:UnquantizedLinearMethod" in names
    assert "vllm.model_executor.layers.attention.attention:Attention" in names
    kinds = {item.kind for item in found}
    assert kinds == {"layer", "method", "scheme", "kernel", "attention impl", "parameter", "model"}
    assert {item.reads for item in found} == {"nothing", "abstract", "delegates", "writes"}
    assert len(found) == len(names) > 150


FOUND: list[dict[str, Any]] = [
    {"name": name, "line": 1, "kind": "method", "reads": reads}
    for name, reads in (
        ("m:Good", "writes"),
        ("m:Bad", "writes"),
        ("m:Far", "writes"),
        ("m:Base", "abstract"),
    )
]


def recipe(
    name: str, verdict: str | None, classes: list[str], forced: str = "", **more: Any
) -> dict[str, Any]:
    return {"recipe": name, "built": verdict is not None, "classes": classes, "forced": forced, "why": "because",
            **({"verdict": verdict} if verdict else {}), **more}  # fmt: skip


class TestRows:
    def test_the_worst_verdict_counts_and_says_where(self) -> None:
        ran = {
            "error": None,
            "recipes": [recipe("one", "rebuild", ["m:Good", "m:Bad"]), recipe("two", "unsafe", ["m:Bad"])],
        }
        table = {row["name"]: row for row in audit.rows(FOUND, ran)}
        assert (table["m:Good"]["verdict"], table["m:Good"]["how"]) == ("rebuild", "ran")
        assert (table["m:Bad"]["verdict"], table["m:Bad"]["recipe"]) == ("unsafe", "two")
        assert (table["m:Far"]["verdict"], table["m:Far"]["how"]) == ("not run", "read")
        assert "no" in table["m:Far"]["why"] and "changes the layer" in table["m:Far"]["why"]
        assert "abstract" in table["m:Base"]["why"]
        assert audit.exit_code(ran, list(table.values())) == 1

    def test_what_could_not_be_built_says_why(self) -> None:
        ran = {
            "error": None,
            "recipes": [recipe("one", None, [], "is_supported(): no", **{"class": "m:Far"})],
        }
        table = {row["name"]: row for row in audit.rows(FOUND, ran)}
        assert (table["m:Far"]["verdict"], table["m:Far"]["why"]) == ("not run", "because")

    def test_what_vllm_would_not_choose_here_is_no_failure_of_this_machine(self) -> None:
        ran = {"error": None, "recipes": [recipe("one", "unsafe", ["m:Bad"], "is_supported(): no")]}
        assert audit.exit_code(ran, audit.rows(FOUND, ran)) == 0

    def test_nothing_that_ran_is_no_success(self) -> None:
        assert audit.exit_code({"error": None, "recipes": []}, []) == 2
        assert audit.exit_code({"error": "no", "recipes": [recipe("one", "direct", [])]}, []) == 2


class TestCollect:
    def play(
        self, monkeypatch: pytest.MonkeyPatch, *runs: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Any]]:
        orders: list[Any] = []
        waiting = list(runs)

        def lines(order: Any, timeout: float) -> Iterator[dict[str, Any]]:
            orders.append(order)
            yield from waiting.pop(0)

        monkeypatch.setattr(audit, "_lines", lines)
        return audit.collect(), orders

    def test_a_crash_is_a_finding_and_the_rest_is_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        good, other = recipe("good", "direct", ["m:Good"]), recipe("other", "rebuild", ["m:Bad"])
        out, orders = self.play(
            monkeypatch,
            [{"vllm": "1"}, {"begin": "good"}, good, {"begin": "dies"}, {"ended": -11, "last": ""}],
            [{"vllm": "1"}, {"begin": "other"}, other, {"done": True}, {"ended": 0, "last": ""}],
        )
        assert orders[1]["skip"] == ["dies", "good"]
        assert [r["recipe"] for r in out["recipes"]] == ["good", "dies", "other"]
        assert (out["recipes"][1]["verdict"], out["recipes"][1]["why"]) == (
            "unsafe",
            "the process died in it: exit code -11",
        )
        assert audit.exit_code(out, []) == 1

    def test_one_that_takes_too_long_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        out, _ = self.play(
            monkeypatch, [{"vllm": "1"}, {"begin": "slow"}, {"ended": None, "last": ""}], [{"done": True}]
        )
        assert "too long" in out["recipes"][0]["why"]

    def test_a_process_that_dies_at_once_is_an_error_not_a_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, _ = self.play(monkeypatch, [{"ended": 1, "last": "No module named vllm"}])
        assert "No module named vllm" in out["error"]

    def test_lines_of_a_real_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        popen = subprocess.Popen
        script = (
            "import sys; print('{\"begin\": \"x\"}', flush=True); sys.stderr.write('last words'); sys.exit(3)"
        )
        monkeypatch.setattr(
            subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, "-c", script], **kwargs)
        )
        assert list(audit._lines({}, 30)) == [{"begin": "x"}, {"ended": 3, "last": "last words"}]
        script = "import time; time.sleep(60)"
        assert list(audit._lines({}, 0.2)) == [{"ended": None, "last": ""}]


def test_the_command_prints_what_ran_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = {"vllm": "1.0", "error": None, "recipes": [recipe("one", "rebuild", [FOUND[0]["name"]])]}
    monkeypatch.setattr(audit, "collect", lambda *_: ran)
    monkeypatch.setattr(hooks, "implementations", lambda: [hooks.Found(**item) for item in FOUND])
    monkeypatch.setattr(sys, "argv", ["weightlife", "audit"])
    assert cli.main() == 0
    out = capsys.readouterr().out
    assert (
        "Good" in out
        and "4 classes with a hook of their own: 0 unsafe, 1 rebuild, 0 direct, 3 not run" in out
    )
    monkeypatch.setattr(sys, "argv", ["weightlife", "audit", "--json"])
    assert cli.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema_version"], document["exit_code"], len(document["classes"])) == (1, 0, 4)
