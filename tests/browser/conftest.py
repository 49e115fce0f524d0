# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium. `make test-browser` runs these tests; they need two things that no other test needs.

- the Python package playwright (the target installs it; its own download of browsers is not used)
- a Chromium (tests/chromium.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import chromium, runmaker
from weightlife.cli.page import render
from weightlife.runs.reader import read_run
from weightlife.runs.view import updates


@pytest.fixture(name="chromium", scope="session")
def _chromium() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        pytest.fail(
            "these tests need playwright: make test-browser, or pip install playwright", pytrace=False
        )
    with sync_playwright() as playwright:
        # no sandbox: in a container of the usual kind there are no user namespaces to build it from
        browser = playwright.chromium.launch(executable_path=chromium.find(), args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page, and everything that it said or asked for."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(file.as_uri())

    def quiet(self) -> bool:
        """Nothing was said, and nothing was asked for but the file itself."""
        return self.said == [] and len(self.asked) == 1

    def layers(self) -> list[str]:
        """Names in the layer table, as shown."""
        found: list[str] = self.page.locator("#layer-rows tr td:first-child span").all_text_contents()
        return found

    def until(self, held: Callable[[], bool], what: str = "") -> None:
        """Wait for something, two seconds at most. The page's policy forbids playwright's own way (it needs eval)."""
        for _ in range(100):
            if held():
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never: {what or held}; the table says {self.status()!r}")

    def status(self) -> str:
        """What the layer table says of itself."""
        found: str = self.page.locator("#layer-status").text_content()
        return found


@pytest.fixture(name="files", scope="session")
def _files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    base = runmaker.Maker(root / "base")
    base.load(ranks=2, phases={**runmaker.PHASES, "receive": 4.5})
    before = read_run(base.done())
    out = {}
    for name, make in (("usual", runmaker.usual), ("hostile", runmaker.hostile), ("large", runmaker.large)):
        run = read_run(make(root / name))
        out[name] = root / f"{name}.html"
        out[name].write_text(
            render(run, updates(run), (before, updates(before)) if name == "usual" else None)
        )
    return out


@pytest.fixture(name="show")
def _show(chromium: Any, files: dict[str, Path]) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def show(name: str, **more: Any) -> Opened:
        contexts.append(chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **more}))
        return Opened(contexts[-1].new_page(), files[name])

    yield show
    for context in contexts:
        context.close()
