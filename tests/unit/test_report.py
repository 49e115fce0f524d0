# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from weightlife.errors import ConfigError
from weightlife.report import (
    OPERATIONS,
    OUTCOMES,
    SCHEMA_VERSION,
    LayerRecord,
    LoadReport,
    PhaseRecord,
    Violation,
    format_bytes,
    format_seconds,
)


def full() -> LoadReport:
    return LoadReport(
        session_id="reload#3",
        model="Qwen3ForCausalLM",
        operation="reload",
        source="/checkpoints/step-200",
        opened_by="reload_weights",
        rank=1,
        world_size=2,
        generation=4,
        isolation="staged",
        isolation_why="default",
        storage="adopted",
        storage_why="eager, no sleep mode",
        started_at="2026-11-29T03:00:00+00:00",
        seconds=2.31,
        phases=[
            PhaseRecord("receive", 1.9, 290),
            PhaseRecord("process quant", 0.2),
            PhaseRecord("commit", 0.009),
        ],
        layers_by_strategy={"direct": 22, "rebuild": 2},
        layers=[
            LayerRecord("model.norm", "direct", "", True, 1792),
            LayerRecord("model.layers.0.mlp", "rebuild", "weight was repacked", True, 1024),
            LayerRecord("lm_head", "direct", "", False, 2048),
        ],
        tensors_received=290,
        bytes_received=16_320_875_725,
        layers_touched=23,
        layers_untouched=1,
        contract_changes=[{"path": "model.norm.weight", "was": 1, "is": 2}],
        violations=[Violation("WL203", "1 unexpected tensor", "", ["extra.weight"])],
        notes=["stage stepped down to host: 3 GiB free on the device"],
        outcome="committed",
        versions={"weightlife": "0.1.0", "torch": "2.13.0"},
        peak_bytes=2**31,
    )


def test_round_trip() -> None:
    report = full()
    assert LoadReport.from_dict(report.to_dict()) == report
    assert LoadReport.from_dict(json.loads(report.to_json())) == report
    assert LoadReport.from_dict(LoadReport().to_dict()) == LoadReport()


def test_an_update_of_one_rank_is_its_session_and_one_of_several_is_what_they_voted() -> None:
    alone = LoadReport(session_id="s1")
    assert alone.update_id == "s1"
    assert "update" not in str(alone) + alone.summary_line()
    several = LoadReport(session_id="s1", rank=1, world_size=2)
    assert several.update_id == ""
    several.update_id = "s0"
    assert "session s1 of update s0 reload" in several.summary_line()
    assert "  update       s0" in str(several)


def test_to_dict_is_a_deep_copy() -> None:
    report = full()
    data = report.to_dict()
    data["phases"][0]["name"] = "x"
    data["contract_changes"][0]["path"] = "x"
    data["versions"]["torch"] = "x"
    assert report == full()
    back = LoadReport.from_dict(report.to_dict())
    back.contract_changes[0]["path"] = "x"
    back.violations[0].tensors.append("x")
    assert report == full()


def test_the_fields_of_schema_1() -> None:
    """A field that vanishes or is renamed breaks readers: that takes a new schema version."""
    data = full().to_dict()
    assert SCHEMA_VERSION == 1
    assert set(data) >= {
        *("schema_version", "session_id", "model", "operation", "source", "opened_by", "rank", "world_size"),
        *("generation", "isolation", "isolation_why", "storage", "storage_why", "started_at", "seconds"),
        *("phases", "layers_by_strategy", "layers", "tensors_received", "bytes_received", "layers_touched"),
        *("layers_untouched", "contract_changes", "violations", "notes", "outcome", "error", "versions"),
        *("peak_bytes", "tensors_not_sent", "update_id"),
    }
    assert set(data["phases"][0]) >= {"name", "seconds", "calls"}
    assert set(data["layers"][0]) >= {"name", "strategy", "reason", "touched", "bytes"}
    assert set(data["violations"][0]) >= {"code", "message", "layer", "tensors"}


@pytest.mark.parametrize("version", [None, 0, 2, "1", True, 1.5])
def test_an_unknown_schema_is_refused(version: object) -> None:
    data = {**full().to_dict(), "schema_version": version}
    with pytest.raises(ConfigError, match="schema version"):
        LoadReport.from_dict(data)


def test_unknown_keys_are_ignored_and_absent_ones_keep_their_default() -> None:
    report = LoadReport.from_dict(
        {"schema_version": 1, "later": 3, "phases": [{"name": "receive", "later": 3}]}
    )
    assert report == LoadReport(phases=[PhaseRecord("receive")])


@pytest.mark.parametrize(
    "change",
    [
        {"model": 3},
        {"rank": "0"},
        {"rank": True},
        {"seconds": "2"},
        {"phases": {}},
        {"phases": [3]},
        {"phases": [{}]},
        {"phases": [{"name": "x", "seconds": None}]},
        {"layers": [{"name": "x", "touched": 1}]},
        {"layers_by_strategy": {"direct": "2"}},
        {"layers_by_strategy": [1]},
        {"violations": [{"code": "WL201", "tensors": [1]}]},
        {"contract_changes": ["x"]},
        {"notes": "x"},
        {"error": 3},
        {"peak_bytes": 1.5},
        {"outcome": "fine"},
        {"operation": "magic"},
        {"versions": {"a": 1}},
    ],
)
def test_wrong_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadReport.from_dict({**full().to_dict(), **change})


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError):
        LoadReport.from_dict([1])  # type: ignore[arg-type]


def test_strange_values_become_plain_data() -> None:
    report = LoadReport(contract_changes=[{"shape": (2, 3), "value": float("nan"), "type": int, "3": {1}}])
    assert json.loads(report.to_json())["contract_changes"] == [
        {"shape": [2, 3], "value": "nan", "type": "<class 'int'>", "3": [1]}
    ]


def test_summary_line() -> None:
    assert full().summary_line() == (
        "session reload#3 reload Qwen3ForCausalLM rank1: committed, 290 tensors 15.2 GiB in 2.3s "
        "(receive 1.9s, process quant 200ms, commit 9ms), layers 23 touched 1 untouched, staged/adopted, violations 1"
    )


def test_summary_line_of_a_failure_says_what_serves() -> None:
    report = LoadReport(session_id="s", outcome="aborted", error="[WL201] x\ny")
    line = report.summary_line()
    assert "ABORTED" in line
    assert line.endswith("- the old weights serve, unchanged: [WL201] x | y")
    report.operation = "first_load"
    assert "nothing serves" in report.summary_line()


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_texts_exist_for_every_kind(outcome: str, operation: str) -> None:
    report = LoadReport(outcome=outcome, operation=operation)
    assert outcome in report.summary_line().lower()
    assert re.search(rf"result +{outcome}: \w", str(report))
    assert "serve" in str(report).lower() or outcome in ("open", "observed")


def test_text_for_people() -> None:
    text = str(full())
    for part in (
        "weightlife session reload#3: reload",
        "committed: the new weights serve",
        "/checkpoints/step-200",
        "rank         1 of 2",
        "290 tensors, 15.2 GiB",
        "adopted (eager, no sleep mode)",
        "receive            1.9s   82.3 %  (290 calls)",
        "23 touched, 1 untouched (22 direct, 2 rebuild)",
        "model.layers.0.mlp: rebuild (weight was repacked)",
        "lm_head: direct, untouched",
        "WL203 1 unexpected tensor: extra.weight",
        "path=model.norm.weight, was=1, is=2",
        "stage stepped down to host",
        "peak memory  2 GiB",
    ):
        assert part in text
    assert "model.norm: direct" not in text


def test_texts_are_safe_and_short_whatever_the_names() -> None:
    report = full()
    evil = "\x1b[2J\nfake line\u202e" + "x" * 5000
    report.model = report.source = report.error = report.session_id = evil
    report.layers = [LayerRecord(evil, "rebuild", evil, True)] * 500
    report.violations = [Violation(evil, evil, evil, [evil] * 500)] * 500
    report.phases = [PhaseRecord(evil)] * 3
    report.contract_changes = [{evil: evil}] * 500
    report.notes = [evil] * 500
    lines = str(report).split("\n")
    assert len(lines) < 120
    assert all(line.isprintable() and len(line) < 4000 for line in lines)
    assert "and 488 more" in str(report)
    assert report.summary_line().isprintable()
    assert len(report.summary_line()) < 2000


def test_a_report_with_no_time_has_no_shares() -> None:
    assert "-" in str(LoadReport(phases=[PhaseRecord("receive")]))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1010 << 20, "1010 MiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0us"), (0.00002, "20us"), (0.009, "9ms"), (1.94, "1.9s"), (59.9, "59.9s"), (192.4, "3m12s")],
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_report_can_be_copied() -> None:
    assert copy.deepcopy(full()) == full()
