# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the documentation, and how a block is run.

Every block of Python or of a shell carries a mark in the line above it, which no reader sees:

    <!-- run: plain -->              Python that needs torch at most
    <!-- run: engine leaves=b -->    Python on a real engine that serves A; afterwards it must equal a cold load of B
    <!-- run: server leaves=b -->    the same, over HTTP, on `vllm serve`
    <!-- run: pytest -->             a file of tests, run as it stands (plain/test_kernel_authors.py)
    <!-- run: shell -->              a shell session: commands, options and variables must exist; cheap ones are run

Blocks of a page share one namespace, in their order. A block of nothing but definitions is called: each of its
functions that no other function of it calls gets values by the names of its parameters.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md",
    ROOT / "benchmarks" / "RESULTS.md",
]  # fmt: skip
KINDS = {"python": ("plain", "engine", "server", "pytest"), "console": ("shell",)}
SILENT = frozenset({"text", "mermaid", "yaml", "json"})  # shown, not run
_MARK = re.compile(r"<!-- run: (\w+)((?: \w+=\S+)*) -->")


@dataclass
class Block:
    """One fenced block."""

    page: str
    line: int  # of its first line of text
    language: str
    text: str
    kind: str = ""
    options: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        ValueError: a fence is not closed, or is indented, where the rules here would not see it.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    page = path.relative_to(ROOT).as_posix()
    out: list[Block] = []
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if line != line.lstrip():
            raise ValueError(f"{page}:{number + 1}: an indented fence")
        if start is None:
            start = number
            continue
        if line != "```":
            raise ValueError(f"{page}:{number + 1}: a fence in a fence")
        block = Block(page, start + 2, lines[start][3:], "\n".join(lines[start + 1 : number]) + "\n")
        found = _MARK.fullmatch(lines[start - 1]) if start else None
        if found is not None:
            block.kind = found[1]
            block.options = dict(pair.split("=", 1) for pair in found[2].split())
        out.append(block)
        start = None
    if start is not None:
        raise ValueError(f"{page}:{start + 1}: a fence that nothing closes")
    return out


def complaints(block: Block) -> list[str]:
    """What is wrong with how a block is marked."""
    if block.language in SILENT:
        return [f"{block.where}: nothing runs a block of {block.language}"] if block.kind else []
    if block.language not in KINDS:
        return [f"{block.where}: nothing here knows how to run {block.language!r}"]
    if not block.kind:
        return [f"{block.where}: no mark says how it is run"]
    if block.kind not in KINDS[block.language]:
        return [f"{block.where}: {block.kind} is nothing for {block.language}"]
    wrong = set(block.options) - {"leaves", "before", "trained", "path"}
    return [f"{block.where}: unknown options {sorted(wrong)}"] if wrong else []


def every(kind: str) -> list[Block]:
    """All blocks of a kind, in order."""
    return [block for path in PAGES for block in blocks_of(path) if block.kind == kind]


def run(block: Block, namespace: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Execute a block, and call what it defines.

    Raises:
        LookupError: a parameter whose name stands for nothing. Whatever the block raises.
    """
    path = ROOT / block.page
    # Padded, so that a traceback shows the line of the page.
    source = "\n" * (block.line - 1) + block.text
    tree = ast.parse(source, filename=str(path))
    exec(compile(tree, str(path), "exec"), namespace)
    for function in to_call(tree):
        names = [argument.arg for argument in function.args.args]
        lacking = [name for name in names if name not in values]
        if lacking:
            raise LookupError(
                f"{block.where}: nothing stands for the parameters {lacking} of {function.name}"
            )
        namespace[function.name](*(values[name] for name in names))


def to_call(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions to call: of a block of imports and definitions those that no other function there calls."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    rest = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    ]
    if rest:
        return []
    used = {
        node.func.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return [function for function in functions if function.name not in used]
