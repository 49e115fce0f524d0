# SPDX-License-Identifier: Apache-2.0
"""The documentation site builds with warnings as errors, has every page, and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", name="site")
def _site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", target)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return target


def build(config: Path, target: Path) -> subprocess.CompletedProcess[str]:
    # A proxy that nobody listens on: whatever would be fetched while building fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config), "--site-dir", str(target)],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


def pages(site: Path) -> list[Path]:
    return [path for path in site.rglob("*.html") if "source" not in path.relative_to(site).parts]


def test_every_page_is_there(site: Path) -> None:
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted |= {Path(name) for name in ("index.html", "changelog.html", "examples.html", "performance.html")}
    assert {path.relative_to(site) for path in pages(site)} == wanted | {Path("404.html")}


def test_pages_fetch_nothing(site: Path) -> None:
    """No font, script, style or picture of another host; links are for people."""
    for path in pages(site):
        text = path.read_text(encoding="utf-8")
        found = re.findall(
            r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", text
        )
        assert found == [], path.name
        assert "fonts.googleapis" not in text
        assert 'class="mermaid"' not in text  # the theme would fetch Mermaid for it
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", style.read_text(encoding="utf-8")), (
            style.name
        )


def test_every_local_reference_leads_somewhere(site: Path) -> None:
    for path in pages(site):
        if path.name == "404.html":  # served from anywhere, so its links begin at the root
            continue
        for target in re.findall(r"(?:src|href)=\"([^\"#?]+)", path.read_text(encoding="utf-8")):
            if not re.match(r"[a-z]+:", target):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_state_machine_is_drawn(site: Path) -> None:
    for name in ("concepts.html", "architecture.html"):
        text = (site / name).read_text(encoding="utf-8")
        assert 'src="assets/session-states.svg"' in text
        assert "stateDiagram-v2" not in text


def test_the_performance_page_is_the_results(site: Path) -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", results, re.MULTILINE)
    text = (site / "performance.html").read_text(encoding="utf-8")
    assert titles
    assert [title for title in titles if title.replace("<", "&lt;") not in text] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](errors.md#wl999)", "#wl999"),
        ("[x](../tests/nowhere.py)", "nowhere.py"),
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, text: str, said: str) -> None:
    """Otherwise the strict build would prove nothing."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "errors.md").write_text("# Errors\n")
    (docs / "page.md").write_text(f"# Page\n\n{text}\n")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    config = config.replace("scripts/docs_site.py", str(ROOT / "scripts" / "docs_site.py"))
    (tmp_path / "mkdocs.yml").write_text(config + "\nnav:\n  - Errors: errors.md\n  - Page: page.md\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert said in done.stderr
