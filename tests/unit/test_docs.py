# SPDX-License-Identifier: Apache-2.0
"""What the documentation says is what the code has: tables, links, names of tests, examples that compile."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import weightlife
from scripts import generate_docs
from weightlife import _api, errors
from weightlife._engine.states import TRANSITIONS, State
from weightlife.config import Settings, reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md",
]  # fmt: skip
EXPECTED = {
    "architecture",
    "command-line",
    "concepts",
    "decisions",
    "digests",
    "errors",
    "field-reports",
    "full-results",
    "not-covered",
    "quickstart",
    "reading-the-report",
    "settings",
    "symptoms",
    "tracing",
}
GUIDES = {"custom-loader", "openrlhf", "skyrl-nemo-rl", "trl", "verl", "vllm-serve"}

page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block in a language."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match[1]) for match in found]


def rows(path: Path, first: str) -> list[list[str]]:
    """Cells of the table whose header begins with `first`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    out = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        out.append([cell.strip().replace("\\|", "|") for cell in cells])
    return out


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code(cell: str) -> str:
    return cell.strip("`")


def test_every_page_is_there() -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} >= EXPECTED
    assert {path.stem for path in (ROOT / "docs" / "guides").glob("*.md")} >= GUIDES


class TestPages:
    @page
    def test_python_blocks_compile_and_name_what_exists(self, path: Path) -> None:
        for line, text in blocks(path, "python"):
            tree = ast.parse(text, filename=f"{path.name}:{line}")
            for node in ast.walk(tree):
                if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                    continue
                if node.value.id == "weightlife":
                    assert hasattr(weightlife, node.attr), f"{path.name}:{line}: weightlife.{node.attr}"

    @page
    def test_links_resolve(self, path: Path) -> None:
        text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            name, _, anchor = target.partition("#")
            other = (path.parent / name).resolve() if name else path
            assert other.exists(), f"{path.name}: {target}"
            if anchor:
                assert anchor in anchors(other), f"{path.name}: {target}"

    @page
    def test_no_path_of_a_machine(self, path: Path) -> None:
        found = re.findall(
            r"(?:^|[\s(`\"'=])(/(?:home|root|tmp|work|opt|mnt)/\S+)", path.read_text(encoding="utf-8")
        )
        assert found == []

    @page
    def test_every_page_is_reached_from_the_readme(self, path: Path) -> None:
        """Guides by way of the quick start."""
        if path.name == "README.md":
            return
        front = ROOT / ("docs/quickstart.md" if path.parent.name == "guides" else "README.md")
        assert f"({path.relative_to(front.parent).as_posix()}" in front.read_text(encoding="utf-8")


class TestSettings:
    path = ROOT / "docs" / "settings.md"

    def test_the_table_is_the_reference(self) -> None:
        want = [
            [row["name"], row["variable"], row["default"] or "empty", row["values"], row["doc"]]
            for row in reference()
        ]
        got = [[code(a), code(b), code(c), d, e] for a, b, c, d, e in rows(self.path, "setting")]
        assert got == want

    def test_every_setting_has_an_effect(self) -> None:
        sources = "\n".join(
            path.read_text(encoding="utf-8")
            for top in ("weightlife", "otel", "kernels")
            for path in (ROOT / top).rglob("*.py")
            if path.name != "config.py" and "testing" not in path.parts
        )
        idle = [
            f.name
            for f in fields(Settings)
            if not re.search(rf"(settings(\(\))?|wanted)\.{f.name}\b", sources)
        ]
        assert idle == [], "a setting that nothing reads"


def test_what_is_generated_is_up_to_date() -> None:
    """Otherwise: `python scripts/generate_docs.py`."""
    assert generate_docs.stale() == []


class TestErrors:
    """docs/errors.md against the tree, without the script that writes the page."""

    path = ROOT / "docs" / "errors.md"

    def test_every_error_has_a_row_with_its_bases(self) -> None:
        want = [
            [name, cls.__name__, [base.__name__ for base in cls.__bases__ if base is not Exception]]
            for name, cls in sorted(errors.CODES.items())
        ]
        got = [
            [re.findall(r"`(\w+)`", a)[0], code(b), re.findall(r"`(\w+)`", c)]
            for a, b, c, _ in rows(self.path, "code")
        ]
        assert got == want

    @pytest.mark.parametrize("name", sorted(errors.CODES))
    def test_every_error_has_a_section_with_its_next_step(self, name: str) -> None:
        cls = errors.CODES[name]
        found = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", self.path.read_text(), re.MULTILINE | re.DOTALL)
        assert found is not None
        assert f"`{cls.__name__}`. {(cls.__doc__ or '').splitlines()[0]}" in found[1]
        assert f"**Next step:** {cls.default_hint}." in found[1]

    def test_codes_that_nothing_raises_are_called_reserved(self) -> None:
        text = self.path.read_text()
        reserved = re.findall(r"^### (WL\d+)\n(?:(?!^### ).*\n)*?Reserved", text, re.MULTILINE)
        assert reserved == ["WL303", "WL402"]


class TestStates:
    """The drawing and the diagram against the table that the engine follows."""

    def test_every_step_is_in_both(self) -> None:
        diagram = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
        svg = (ROOT / "docs" / "assets" / "session-states.svg").read_text(encoding="utf-8")
        steps = 0
        for old, targets in TRANSITIONS.items():
            assert f">{old.name}</text>" in svg
            for new, why in targets.items():
                steps += 1
                assert f"    {old.name} --> {new.name}: {why.replace(';', ',')}\n" in diagram
                assert f">{why}</text>" in svg
        assert svg.count("<path") == steps + 2  # the arrow's tip, and the way into a poisoned model
        assert set(TRANSITIONS) == set(State)


class TestFieldReports:
    path = ROOT / "docs" / "field-reports.md"

    def table(self) -> list[list[str]]:
        return rows(self.path, "id")

    def test_every_report_has_one_row(self) -> None:
        assert [row[0] for row in self.table()] == [f"F{number:02d}" for number in range(1, 81)]

    def test_the_counts_are_those_of_the_rows(self) -> None:
        verdicts = [row[3] for row in self.table()]
        names = ["prevented", "refused", "in part", "visible", "not yet", "outside"]
        assert rows(self.path, "prevented")[0] == [str(verdicts.count(name)) for name in names]

    def test_named_tests_exist(self) -> None:
        files = dict(re.findall(r"\[(\w+)\]\(\.\./(tests/\S+\.py)\)", self.path.read_text(encoding="utf-8")))
        named = {match for row in self.table() for match in re.findall(r"`(\w+)::(test_\w+)`", row[5])}
        assert named
        for short, test in named:
            assert f"def {test}(" in (ROOT / files[short]).read_text(encoding="utf-8"), f"{short}::{test}"

    def test_prevented_or_refused_means_that_a_test_shows_it(self) -> None:
        for row in self.table():
            if row[3] in ("prevented", "refused"):
                assert "::" in row[5] or re.fullmatch(r"as F\d\d", row[5]), row


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [
        path.name
        for folder in ("weightlife", "weightlife/_engine", "weightlife/hosts", "weightlife/hosts/vllm")
        for path in (ROOT / folder).glob("*.py")
        if path.name not in ("__init__.py", "_version.py", "_errortext.py", "_models.py")
    ]
    assert [name for name in modules if name not in text] == []


def test_what_status_calls_not_covered_is_in_the_page() -> None:
    text = (ROOT / "docs" / "not-covered.md").read_text(encoding="utf-8").lower()
    for line in _api.NOT_COVERED:
        topics = (
            "lora",
            "pipeline",
            "online quantisation",
            "cpu offload",
            "eplb",
            "asleep",
            "votes",
            "dummy",
            "memory",
        )
        named = [topic for topic in topics if topic in line.lower()]
        assert named, f"nothing in this test looks for: {line}"
        words = {"asleep": "sleep", "votes": "ranks"}
        assert [topic for topic in named if words.get(topic, topic) not in text] == []


def test_the_makefile_has_every_target_that_is_named() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name
        for path in PAGES
        for name in re.findall(
            r"`make ([a-z-]+)`|^make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in name
        if name
    }
    assert named >= {"demo", "test"}
    assert named <= targets
