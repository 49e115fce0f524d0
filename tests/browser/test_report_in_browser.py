# SPDX-License-Identifier: Apache-2.0
"""The HTML report in a real browser: it opens, sorts, filters, stays inert, and fits phones, dark rooms and keyboards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow]

Show = Callable[..., Any]
SCREENS = {
    "desktop": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
    "phone, dark": {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 700, "height": 800}},
}


class TestOpens:
    @pytest.mark.parametrize("name", ["usual", "hostile", "large"])
    @pytest.mark.parametrize("screen", SCREENS)
    def test_in_silence_and_without_scrolling_sideways(
        self, name: str, screen: str, show: Show, tmp_path: Path
    ) -> None:
        opened = show(name, **SCREENS[screen])
        page = opened.page
        for details in page.locator("details").all():
            details.evaluate("element => { element.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("window.innerWidth")
        assert page.title() == f"weightlife report: {name}"
        page.screenshot(path=tmp_path / "screen.png", full_page=name == "usual")
        assert opened.quiet(), (opened.said, opened.asked)

    @pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
    def test_background_follows_the_scheme(self, scheme: str, dark: bool, show: Show) -> None:
        page = show("usual", color_scheme=scheme).page
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")) / 3
        assert (brightness < 100) == dark

    def test_tables_become_cards_on_a_phone(self, show: Show) -> None:
        page = show("usual", **SCREENS["phone"]).page
        cell = page.locator("#loads tbody tr").first.locator("td").nth(1)
        assert cell.evaluate("e => getComputedStyle(e, '::before').content") == '"Result"'
        assert page.locator("#layer-sort").is_visible()
        assert not show("usual").page.locator("#layer-sort").is_visible()

    def test_without_scripts_the_first_rows_are_there(self, show: Show) -> None:
        opened = show("usual", java_script_enabled=False)
        assert len(opened.layers()) == 24
        assert "need scripts" in opened.page.locator("noscript").inner_text()


class TestLayers:
    def test_sort_by_name_is_natural_and_turns_round(self, show: Show) -> None:
        opened = show("large")
        head = opened.page.locator("#layer-table th[data-key=name]")
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        # 2 before 10, as people count
        assert opened.layers()[:11] == [f"m.0.e.{i}.w" for i in range(11)]
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert opened.layers()[0] == "m.999.e.99.w"

    def test_time_is_sorted_from_the_longest_down(self, show: Show) -> None:
        opened = show("usual")
        opened.page.locator("a[data-session]").nth(1).evaluate("e => e.click()")
        opened.page.locator("#layer-table th[data-key=seconds] button").click()
        times = opened.page.locator("#layer-rows td:last-child").all_text_contents()
        assert [bool(text) for text in times] == [True] * 5 + [False] * 19

    def test_filter_by_words_strategy_and_state(self, show: Show) -> None:
        opened = show("usual")
        page = opened.page
        page.fill("#layer-filter", "proj LAYERS.2.")
        opened.until(lambda: " of 4 " in opened.status())
        assert opened.layers() == [
            f"model.layers.2.{n}" for n in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        ]
        page.fill("#layer-filter", "")
        page.select_option("#layer-strategy", "direct")
        page.select_option("#layer-written", "not written")
        opened.until(lambda: " of 4 " in opened.status())
        assert all("rotary_emb" in name for name in opened.layers())
        page.fill("#layer-filter", "nothing has this name")
        opened.until(lambda: opened.status().startswith("No layer"))
        assert opened.quiet()

    def test_a_hundred_thousand_layers_are_turned_page_by_page_and_filtered_at_once(self, show: Show) -> None:
        opened = show("large")
        page = opened.page
        assert opened.status() == "1 to 100 of 100,000 layers"
        page.click("#layer-next")
        assert opened.status() == "101 to 200 of 100,000 layers"
        assert opened.layers()[0] == "m.1.e.0.w"
        page.click("#layer-previous")
        assert page.locator("#layer-previous").is_disabled()
        started = time.perf_counter()
        page.fill("#layer-filter", "m.777.e.77.")
        opened.until(lambda: opened.status().startswith("1 to 1 of 1 "))
        assert time.perf_counter() - started < 3
        assert opened.layers() == ["m.777.e.77.w"]
        assert page.locator("#layer-rows tr").count() == 1

    def test_another_load_is_shown_by_its_link_and_by_the_menu(self, show: Show) -> None:
        opened = show("usual")
        page = opened.page
        page.locator("#load-1 > summary").click()
        page.locator("#load-1 a[data-session]").click()
        assert page.locator("#layer-session").input_value() == "0"
        page.select_option("#layer-session", "2")
        assert "3 reload" in page.locator("#layer-session option:checked").text_content()
        assert opened.quiet()


class TestKeyboard:
    def test_everything_is_reached_by_tab_in_order_and_seen(self, show: Show) -> None:
        page = show("usual").page
        seen = []
        for _ in range(60):
            page.keyboard.press("Tab")
            found = page.evaluate(
                "() => { const e = document.activeElement; const s = getComputedStyle(e);"
                " return [e.id || e.textContent.trim().slice(0, 30), s.outlineStyle, parseFloat(s.outlineWidth)]; }"
            )
            seen.append(found[0])
            if found[0] != "":
                assert found[1] == "solid" or found[2] > 0, f"{found[0]} has the focus and does not show it"
        assert seen[0] == "Skip to the loads"
        wanted = ["layer-session", "layer-filter", "layer-strategy", "layer-written"]
        places = [seen.index(name) for name in wanted]
        assert places == sorted(places)

    def test_a_load_is_opened_and_a_column_sorted_by_keys(self, show: Show) -> None:
        page = show("usual").page
        page.locator("#load-1 > summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#load-1").get_attribute("open") is not None
        page.locator("#layer-table th[data-key=strategy] button").focus()
        page.keyboard.press("Space")
        assert page.locator("#layer-table th[data-key=strategy]").get_attribute("aria-sort") == "ascending"

    def test_a_link_to_a_load_opens_it(self, show: Show) -> None:
        opened = show("usual")
        page = opened.page
        assert page.locator("#load-2").get_attribute("open") is None
        page.locator("#loads a[href='#load-2']").focus()
        page.keyboard.press("Enter")
        opened.until(lambda: page.locator("#load-2").get_attribute("open") is not None)


class TestInert:
    def test_hostile_names_are_text_and_nothing_else(self, show: Show) -> None:
        opened = show("hostile")
        page = opened.page
        page.locator("#layer-session").select_option("0")
        for number in range(page.locator("#layer-session option").count()):
            page.select_option("#layer-session", str(number))
        page.wait_for_timeout(200)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 2
        assert page.title() == "weightlife report: hostile"
        assert opened.quiet(), opened.said
        page.select_option("#layer-session", "0")
        assert opened.layers()[0] == "<script>alert(1)</script>"

    def test_a_right_to_left_name_does_not_turn_its_neighbours(self, show: Show) -> None:
        page = show("hostile").page
        assert (
            page.locator("#loads .name").first.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
        )

    def test_the_policy_stops_what_would_get_through(self, show: Show) -> None:
        opened = show("usual")
        blocked = opened.page.evaluate(
            """async () => {
              const script = document.createElement("script");
              script.textContent = "window.owned = true";
              document.body.append(script);
              const image = document.createElement("img");
              image.setAttribute("onerror", "window.owned = true");
              image.src = "x";
              document.body.append(image);
              let fetched = true;
              try { await fetch("http://127.0.0.1:9/"); } catch { fetched = false; }
              await new Promise((done) => setTimeout(done, 200));
              return [window.owned === undefined, !fetched];
            }"""
        )
        assert blocked == [True, True]
        assert [text for text in opened.said if "Content Security Policy" in text]
