# SPDX-License-Identifier: Apache-2.0
"""The HTML report without a browser: one file, nothing fetched, hostile text inert, bounded. tests/browser opens it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests import runmaker
from weightlife.cli import page
from weightlife.runs import view
from weightlife.runs.reader import read_run

VOID = {"meta", "link", "br", "input", "img", "hr"}
ADDRESSED = {"src", "href", "action", "data", "poster", "srcset", "formaction", "xlink:href", "background"}


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails where an element is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.tags if "id" in attrs]

    def layer_data(self) -> Any:
        return next(json.loads(text) for text in self.texts["script"] if text.startswith("{"))


def render(folder: Path, other: Path | None = None, **more: Any) -> str:
    run = read_run(folder, **more)
    baseline = None
    if other is not None:
        found = read_run(other)
        baseline = (found, view.updates(found))
    return page.render(run, view.updates(run), baseline)


@pytest.fixture(name="usual", scope="module")
def _usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("page")
    maker = runmaker.Maker(root / "base")
    maker.load(
        ranks=2,
        phases={**runmaker.PHASES, "receive": 4.5},
        layers=runmaker.some_layers(18),
        versions={"vllm": "0.31.0"},
    )
    return render(runmaker.usual(root / "run"), maker.done())


@pytest.fixture(name="hostile", scope="module")
def _hostile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return render(runmaker.hostile(tmp_path_factory.mktemp("page") / "run"))


@pytest.fixture(name="both", params=["usual", "hostile"])
def _both(request: pytest.FixtureRequest) -> str:
    text: str = request.getfixturevalue(request.param)
    return text


class TestSelfContained:
    def test_nothing_is_fetched(self, both: str) -> None:
        for tag, attrs in Page(both).tags:
            for name in ADDRESSED & attrs.keys():
                assert str(attrs[name]).startswith("#"), (tag, attrs)
        assert "@import" not in both
        assert not re.search(r"url\((?!#)", both)
        assert "//" not in re.sub(r"^ *// .*$", "", page._template("report.js"), flags=re.MULTILINE)

    def test_its_policy_names_the_one_style_and_the_one_script(self, both: str) -> None:
        found = Page(both)
        (policy,) = (str(a["content"]) for t, a in found.tags if t == "meta" and "http-equiv" in a)
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy
        scripts = [text for text in found.texts["script"] if not text.startswith("{")]
        for kind, texts in (("script-src", scripts), ("style-src", found.texts["style"])):
            (text,) = texts
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            assert f"{kind} 'sha256-{digest}'" in policy
        assert not [a for _, a in found.tags if "style" in a or any(name.startswith("on") for name in a)]

    def test_ids_are_unique_and_links_labels_and_patterns_resolve(self, both: str) -> None:
        found = Page(both)
        ids = found.ids()
        assert len(ids) == len(set(ids))
        for _, attrs in found.tags:
            for name in ("href", "for"):
                if attrs.get(name):
                    assert str(attrs[name]).removeprefix("#") in ids
        for pattern in re.findall(r"url\(#(\w+)\)", both):
            assert pattern in ids


class TestUsual:
    def test_says_what_serves_and_what_to_do_next(self, usual: str) -> None:
        text = " ".join(" ".join(texts) for texts in Page(usual).texts.values())
        assert (
            "3 loads, 1 not as it should be. The last one of MixtralForCausalLM: aborted, the old weights"
            in text
        )
        assert "Tensors that a complete load writes did not arrive." in text
        assert "Next: send the missing tensors" in text
        assert "90 % of 6.7s went into receive" in text

    def test_a_lane_a_rank_and_a_piece_a_phase_on_one_scale(self, usual: str) -> None:
        found = Page(usual)
        words = [str(a["aria-label"]) for t, a in found.tags if t == "svg" and a.get("class") == "track"]
        assert len(words) == 4  # three loads, one on two ranks
        assert "receive 9.0s" in words[1]
        assert "receive 9.9s" in words[2]
        rects = [
            a
            for t, a in found.tags
            if t == "rect" and str(a.get("class", "")).startswith("seg") and "%" in str(a["x"])
        ]
        for rect in rects:
            assert 0 <= float(str(rect["x"])[:-1]) + float(str(rect["width"])[:-1]) <= 100.01

    def test_phases_differ_in_more_than_colour(self, usual: str) -> None:
        style = page._template("report.css")
        fills = dict(re.findall(r"\.(f\d) \{ fill: (#\w+)", style))
        patterns = dict(re.findall(r"\.(t\d) \{ fill: ([^;]+);", style))
        assert len(fills) == len(patterns) == len(view.PHASES) + 1
        assert len(set(patterns.values())) == len(patterns)
        assert len(set(page._LETTERS)) == len(view.PHASES)
        # in the legend too, which is the table of phases
        letters = set(Page(usual).texts["text"])
        assert {"P", "R", "V", "B"} <= letters

    def test_the_comparison_has_figures_layers_and_versions(self, usual: str) -> None:
        text = " ".join(" ".join(texts) for texts in Page(usual).texts.values())
        assert "\u25b2 2.00 times, slower" in text
        assert "Loads before: 1 committed. Now: 1 aborted, 1 committed. New problems: WL201." in text
        assert "0.31.0" in text
        assert "model.layers.3.qkv_proj" in text  # a layer that was not there before

    def test_every_control_has_a_name(self, usual: str) -> None:
        found = Page(usual)
        labelled = {a["for"] for t, a in found.tags if t == "label"}
        for tag, attrs in found.tags:
            if tag in ("input", "select"):
                assert attrs["id"] in labelled
            if tag == "svg":
                assert attrs.get("aria-hidden") == "true" or attrs.get("aria-label")
        assert {"lang": "en"} in [a for t, a in found.tags if t == "html"]
        assert all(a.get("scope") == "col" for t, a in found.tags if t == "th")

    def test_colours_of_text_have_enough_contrast_in_both_schemes(self) -> None:
        style = page._template("report.css")
        schemes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
        assert len(schemes) == 2

        def luminance(colour: str) -> float:
            parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
            r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
            return 0.2126 * r + 0.7152 * g + 0.0722 * b

        for scheme in schemes:
            colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
            for name in ("text", "dim", "link", "good", "bad", "warn"):
                for ground in ("bg", "soft"):
                    light, dark = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
                    assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, ground)  # WCAG 2.2, level AA


class TestHostile:
    def test_no_element_and_no_script_comes_from_a_name(self, hostile: str, usual: str) -> None:
        known = {tag for tag, _ in Page(usual).tags} | {"noscript"}
        found = Page(hostile)
        assert {tag for tag, _ in found.tags} <= known
        assert [t for t, _ in found.tags].count("script") == 2
        attributes = {name for _, attrs in found.tags for name in attrs}
        assert attributes <= {name for _, attrs in Page(usual).tags for name in attrs}

    @pytest.mark.parametrize(
        "bad", ["\x1b", "\x07", "\u202e", "\u202c", "\u2028", "\u2029", "\ud800", "<script>alert", "<img"]
    )
    def test_what_could_do_harm_is_nowhere(self, bad: str, hostile: str) -> None:
        assert bad not in hostile
        hostile.encode("utf-8")

    def test_what_it_said_can_still_be_read(self, hostile: str) -> None:
        text = " ".join(" ".join(texts) for texts in Page(hostile).texts.values())
        for shown in (
            "<script>alert(1)</script>",
            "\\u202egnp.eltit",
            "\\x1b[31mred",
            "{{ 7*7 }}",
            "&lt;b&gt;",
            "\u05e9\u05dc",
        ):
            assert shown in text
        names = Page(hostile).layer_data()["strings"]
        assert "<script>alert(1)</script>" in names
        assert max(map(len, names)) <= 300


class TestBounds:
    def test_a_hundred_thousand_layers_are_one_table_of_text(self, tmp_path: Path) -> None:
        folder = runmaker.large(tmp_path)
        started = time.perf_counter()
        text = render(folder)
        assert time.perf_counter() - started < 20
        assert len(text) < 12e6
        found = Page(text)
        (table,) = found.layer_data()["tables"]
        assert len(table["names"]) == 100_000
        assert [t for t, _ in found.tags].count("tr") < 200  # the rest is drawn a page at a time

    def test_equal_tables_are_there_once(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        for _ in range(20):
            maker.load(layers=runmaker.some_layers(600))
        data = Page(render(maker.done())).layer_data()
        assert len(data["sessions"]) == 20
        assert len(data["tables"]) == 1

    def test_older_tables_are_left_out_and_that_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page, "MAX_ROWS", 50)
        maker = runmaker.Maker(tmp_path)
        for _ in range(5):
            maker.load()
        text = render(maker.done())
        assert len(Page(text).layer_data()["sessions"]) == 2
        assert "The tables of 3 older loads are left out." in text

    def test_many_ranks_many_problems_and_no_phases(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(
            ranks=70, violations=[runmaker.Violation("WL201", f"v{i}") for i in range(90)], outcome="aborted"
        )
        maker.load(phases={}, layers=[], seconds=0.0)
        text = render(maker.done())
        assert "6 more ranks are not drawn" in text
        assert "and 40 more of this load" in text
        assert "No times were stored." in text

    def test_an_empty_run_is_a_page_too(self, tmp_path: Path) -> None:
        assert "No session is stored here." in render(tmp_path)

    def test_without_spans_phases_are_laid_end_to_end_and_that_is_said(self, tmp_path: Path) -> None:
        folder = runmaker.usual(tmp_path)
        for path in folder.glob("*.traces.jsonl"):
            path.unlink()
        text = render(folder)
        assert text.count("No spans are stored for this load") == 3


class TestView:
    def test_ranks_of_one_update_are_put_together_and_others_not(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(ranks=4)
        maker.load(ranks=4)
        maker.load(ranks=2, model="Draft")
        found = view.updates(read_run(maker.done()))
        assert [(u.first.model, len(u.ranks)) for u in found] == [
            ("MixtralForCausalLM", 4), ("MixtralForCausalLM", 4), ("Draft", 2),
        ]  # fmt: skip
        assert [s.report.rank for s in found[0].ranks] == [0, 1, 2, 3]

    @pytest.mark.parametrize(
        ("of", "apart", "together"),
        [
            (["a", "a"], 3600.0, True),
            (["a", "b"], 0.0, False),
            (["a", ""], 0.0, True),
            (["", ""], 0.0, True),
            (["a", ""], 3600.0, False),
        ],
    )
    def test_the_ranks_vote_decides_before_their_clocks(
        self, tmp_path: Path, of: list[str], apart: float, together: bool
    ) -> None:
        maker = runmaker.Maker(tmp_path)
        begun = maker.now
        for rank, update in enumerate(of):
            maker.now = begun + int(rank * apart * 1e9)
            maker.load(rank=rank, world_size=2, update_id=update)
        found = view.updates(read_run(maker.done()))
        assert [[s.report.rank for s in u.ranks] for u in found] == ([[0, 1]] if together else [[0], [1]])

    def test_a_rank_that_stored_nothing_is_missed(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(ranks=2)
        folder = maker.done()
        next(folder.glob("*rank1.sessions*")).unlink()
        (update,) = view.updates(read_run(folder))
        assert update.missing_ranks == 1
        assert "Of 2 ranks, 1 stored nothing here." in render(folder)

    def test_the_worst_rank_names_the_update(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(ranks=2)
        folder = maker.done()
        path = next(folder.glob("*rank1.sessions*"))
        path.write_text(path.read_text().replace('"outcome":"committed"', '"outcome":"poisoned"'))
        (update,) = view.updates(read_run(folder))
        assert (update.outcome, update.good) == ("poisoned", False)

    def test_time_in_no_phase_is_told(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(phases={"receive": 2.0}, seconds=5.0)
        (session,) = read_run(maker.done()).sessions
        assert [(name, round(seconds, 6)) for name, seconds, _ in view.times(session)] == [
            ("receive", 2.0),
            ("in no phase", 3.0),
        ]

    def test_a_load_that_left_tensors_out_is_marked_and_open(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        for missing in (0, 3, 0):
            maker.load(tensors_not_sent=missing)
        text = render(maker.done())
        assert "3 loads, all of them good. 1 left some of the old weights in place." in text
        assert text.count("committed</span> in part") == 1
        (shown,) = re.findall(r"<details[^>]* open[^>]*>\s*<summary>(.*?)</summary>", text, re.DOTALL)
        assert "beside old values of what was not sent (tensors: 3)" in shown

    def test_time_by_cause_and_layer_is_used(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load()
        folder = maker.done()
        path = next(folder.glob("*.sessions*"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            report = line.get("report", line)
            if "layers" not in report:
                continue
            report.update(attributed={"source": 3.5}, processing={"Hook": 1.5})
            for layer in report["layers"]:
                if layer["name"] == "model.layers.3.qkv_proj":
                    layer["seconds"] = 9.5
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (session,) = read_run(folder).sessions
        assert view.attributed(session) == {"source": 3.5, "hooks of Hook": 1.5}
        assert view.layer_seconds(session)["model.layers.3.qkv_proj"] == 9.5
        text = render(folder)
        assert "Seen across phases" in text
        assert "hooks of Hook" in text

    def test_an_error_that_is_no_violation_is_a_problem(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(outcome="aborted", error="RuntimeError: the trainer went away")
        (update,) = view.updates(read_run(maker.done()))
        (problem,) = view.problems(update)
        assert problem.message == "RuntimeError: the trainer went away"
        assert "mend its cause" in problem.hint

    def test_equal_problems_of_ranks_are_one(self, tmp_path: Path) -> None:
        maker = runmaker.Maker(tmp_path)
        maker.load(ranks=3, violations=[runmaker.MISSING], outcome="aborted", error=runmaker.ERROR)
        (update,) = view.updates(read_run(maker.done()))
        (problem,) = view.problems(update)
        assert problem.ranks == [0, 1, 2]
