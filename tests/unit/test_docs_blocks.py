# SPDX-License-Identifier: Apache-2.0
"""Every code block of the documentation is run, or held against what there is. Engines: integration/test_docs_run.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import docblocks, docshell, runmaker
from tests.docblocks import PAGES, ROOT, Block, blocks_of
from tests.integration._child import result_of
from tests.otlp import Receiver

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@page
def test_every_block_says_how_it_is_run(path: Path) -> None:
    assert [problem for block in blocks_of(path) for problem in docblocks.complaints(block)] == []


@page
def test_what_shell_blocks_name_is_there(path: Path) -> None:
    assert [p for block in blocks_of(path) if block.kind == "shell" for p in docshell.complaints(block)] == []


@page
def test_commands_in_running_text_are_there(path: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`(weightlife [a-z][^`]*)`", text):
        first, *others = command.removeprefix("weightlife ").split(" | ")  # `manifest show | diff | check`
        group = first.rpartition(" ")[0]
        for words in (first, *(f"{group} {other}" for other in others)):
            # a command that is named rather than shown lacks what it needs
            found = [p for p in docshell.of_weightlife(shlex.split(words)) if not p.startswith("Missing ")]
            assert not found, command


def test_blocks_of_every_kind_are_found() -> None:
    kinds = {block.kind for path in PAGES for block in blocks_of(path)}
    assert kinds >= {"plain", "engine", "server", "shell"}


def test_python_without_an_engine() -> None:
    """With a real receiver where a block exports."""
    with Receiver() as receiver:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "WEIGHTLIFE"))}
        env.update(PYTHONPATH=str(ROOT), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.http)
        assert result_of("_docs_job", "plain", timeout=120, env=env) == {}


@pytest.fixture(name="workplace", scope="module")
def _workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runs that the pages speak of."""
    where = tmp_path_factory.mktemp("docs")
    for name in ("monday", "tuesday", "server", "grpo"):
        runmaker.usual(where / "runs" / name)
    return where


# Those that need neither an engine nor a network nor somebody to end them.
CHEAP = {
    shlex.join(words)
    for path in PAGES
    for block in blocks_of(path)
    if block.kind == "shell"
    for words in docshell.commands(block.text)
    if words[0] == "weightlife"
    and words[1] in ("report", "demo", "trace", "--help")
    and (words[1] != "trace" or "--once" in words)
}


@pytest.mark.parametrize("command", sorted(CHEAP))
def test_cheap_commands_are_run(command: str, workplace: Path) -> None:
    words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=workplace, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    # The stored run ends with a load that failed, which is exit code 1.
    assert done.returncode == (1 if words[1] in ("report", "trace") else 0), done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr  # no colour in a pipe
    for flag in ("-o", "--output"):
        if flag in words:
            assert (workplace / words[words.index(flag) + 1]).read_text().startswith("<!doctype html>")


class TestTheRulesThemselves:
    """A block that breaks one must be seen."""

    @staticmethod
    def blocks(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
        monkeypatch.setattr(docblocks, "ROOT", tmp_path)
        path = tmp_path / "page.md"
        path.write_text(text)
        return blocks_of(path)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("```python\n1\n```\n", "no mark"),
            ("<!-- run: plain -->\n\n```python\n1\n```\n", "no mark"),  # not in the line above
            ("<!-- run: shell -->\n```python\n1\n```\n", "shell is nothing for python"),
            ("<!-- run: never -->\n```python\n1\n```\n", "never is nothing for python"),
            ("<!-- run: plain lea=b -->\n```python\n1\n```\n", "unknown options ['lea']"),
            ("```bash\nls\n```\n", "nothing here knows how to run 'bash'"),
            ("```\nls\n```\n", "nothing here knows how to run ''"),
            ("<!-- run: plain -->\n```text\n1\n```\n", "nothing runs a block of text"),
        ],
    )
    def test_marks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
        (block,) = self.blocks(tmp_path, text, monkeypatch)
        assert said in docblocks.complaints(block)[0]

    @pytest.mark.parametrize(
        "text", ["  ```python\n  1\n  ```\n", "```python\n1\n", "```python\n```text\n```\n"]
    )
    def test_fences_that_would_be_overlooked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        with pytest.raises(ValueError, match=r"page\.md:"):
            self.blocks(tmp_path, text, monkeypatch)

    def test_what_a_block_defines_is_called(self) -> None:
        said: list[str] = []
        block = Block("page.md", 1, "python", "def help(x):\n    x('a')\n\ndef use(say):\n    help(say)\n")
        docblocks.run(block, {}, {"say": said.append})
        assert said == ["a"]
        with pytest.raises(LookupError, match="say"):
            docblocks.run(block, {}, {})

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("weightlife reprot x", "no command"),
            ("weightlife report x --colour", "No such option"),
            ("weightlife report", "Missing argument"),
            ("export WEIGHTLIFE_RUN_DIR=x", "no variable"),
            ("export WEIGHTLIFE_MODE=watch", "WEIGHTLIFE_MODE"),
            ("export VLLM_SERVER_DEV_MODES=1", "no variable"),
            ("export OTEL_NO=1", "no variable"),
            ("pip install 'weightlife[none]'", "no extra"),
            ("make nothing", "no target"),
            ("vllm serve M --otlp-traces-endpoints x", "has no"),
            ("docker compose --profile all up", "no profile"),
            ("python nowhere.py", "no file"),
            ("curl x", "nothing here knows"),
            ('ray job submit --runtime-env-json \'{"env_vars": {"WEIGHTLIF": "1"}}\' -- x', "no variable"),
        ],
    )
    def test_shells(self, line: str, said: str) -> None:
        try:
            found = docshell.complaints(Block("page.md", 1, "console", f"$ {line}\n", "shell"))
        except ValueError as error:  # a ConfigError is one
            found = [str(error)]
        assert said in found[0]
