# SPDX-License-Identifier: Apache-2.0
"""Opens Phoenix's page of a trace in headless Chromium, as a user would. Runs in .venv-phoenix, which has playwright.

    python _view.py CHROMIUM ADDRESS TRACE PICTURES EVENT

Prints as JSON what the page showed, and leaves pictures of it in a folder. EVENT is one that the load has, or empty.
"""

import json
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright


def main(chromium: str, address: str, trace: str, pictures: Path, event: str) -> dict[str, object]:
    """What the page of a trace says: of the whole, and of the first load that is clicked."""
    said: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        # no sandbox: in a container of the usual kind there are no user namespaces to build it from
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1500, "height": 1150})
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/redirects/traces/{trace}")
        loads = page.get_by_text("load_weights MixtralForCausalLM")
        loads.nth(1).wait_for()
        tree = page.inner_text("body")
        page.screenshot(path=pictures / "trace.png")
        loads.first.click()
        # the pane beside the tree has caught up when it names the session's attributes
        page.get_by_text("outcome").first.wait_for()
        span = page.inner_text("body")
        page.screenshot(path=pictures / "load.png")
        page.get_by_role("tab", name="Events").click()
        if event:
            page.get_by_text(event).first.wait_for()
        events = page.inner_text("body")
        page.screenshot(path=pictures / "events.png")
        browser.close()
    abroad = [url for url in asked if not url.startswith((address, "data:", "blob:"))]
    return {"tree": tree, "span": span, "events": events, "said": said, "abroad": abroad}


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])))
