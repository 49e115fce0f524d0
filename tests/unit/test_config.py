# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightlife.config import Settings, enabled_from_env, reference, unknown_variables
from weightlife.errors import ConfigError

FIELDS = dataclasses.fields(Settings)
CHOICES = {item.name: item.metadata["choices"] for item in FIELDS if "choices" in item.metadata}

settings = st.builds(
    Settings,
    **{name: st.sampled_from(values) for name, values in CHOICES.items()},
    undo_budget_bytes=st.none() | st.integers(0, 2**50),
    implicit_patience=st.integers(0, 10_000),
    runs_dir=st.none() | st.sampled_from(["runs", "/a/b c", "./\u00e4"]),
)


def test_defaults() -> None:
    assert dataclasses.asdict(Settings()) == {
        "mode": "enforce",
        "isolation": "staged",
        "storage": "auto",
        "partial_disk": "forbid",
        "partial_update": "by_layer",
        "unexpected": "ignore",
        "surplus": "strict",
        "shapes": "strict",
        "casts": "strict",
        "empty": "strict",
        "announced": "strict",
        "source": "strict",
        "nonfinite": "off",
        "contract": "strict",
        "processing": "as_complete",
        "watch_writes": "sampled",
        "copy_backend": "auto",
        "digests": "off",
        "rank_values": "strict",
        "undo_budget_bytes": None,
        "implicit_patience": 64,
        "handshake": "warn",
        "trace_layers": "slow",
        "trace_layer_ms": 100,
        "log_level": "info",
        "runs_dir": None,
    }


@given(settings)
def test_environment_round_trip(value: Settings) -> None:
    environ = value.to_env()
    assert all(key.startswith("WEIGHTLIFE_") and isinstance(text, str) for key, text in environ.items())
    assert Settings.from_env({"PATH": "x", **environ}) == value
    assert Settings.from_env(environ).digest() == value.digest()
    assert unknown_variables(environ) == {}


@given(settings, settings)
def test_digests_differ_where_settings_differ(one: Settings, other: Settings) -> None:
    assert (one.digest() == other.digest()) == (one == other)


def test_digest_is_the_same_in_another_process() -> None:
    code = "from weightlife.config import Settings; print(Settings(mode='observe').digest())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == Settings(mode="observe").digest()
    assert len(result.stdout.strip()) == 12


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().mode = "observe"  # type: ignore[misc]


def test_replace_checks() -> None:
    changed = Settings().replace(isolation="in_place", implicit_patience=3)
    assert (changed.isolation, changed.implicit_patience, changed.mode) == ("in_place", 3, "enforce")
    with pytest.raises(ConfigError):
        changed.replace(isolation="disk")
    with pytest.raises(ConfigError, match="unknown setting"):
        changed.replace(isolations="staged")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("isolatoin", "did you mean 'isolation'?"),
        ("partial", "did you mean 'partial"),
        ("undo_budget", "did you mean 'undo_budget_bytes'?"),
        ("zzz", "settings are mode, isolation"),
    ],
)
def test_an_unknown_name_tells_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_kwargs(**{name: "x"})
    assert hint in caught.value.hint
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "item", [f for f in FIELDS if not f.metadata.get("path")], ids=lambda item: item.name
)
@pytest.mark.parametrize("value", ["nonsense", True, -1, 1.5, [], ""])
def test_an_illegal_value_is_refused_with_the_legal_ones(
    item: dataclasses.Field[object], value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_kwargs(**{item.name: value})
    assert item.name in str(caught.value)
    assert f"WEIGHTLIFE_{item.name.upper()}" in caught.value.hint


def test_a_value_error_is_what_callers_may_expect() -> None:
    with pytest.raises(ValueError, match="WL001"):
        Settings(mode="off")  # type: ignore[arg-type]


def test_none_only_where_it_means_something() -> None:
    assert Settings(undo_budget_bytes=None).undo_budget_bytes is None
    with pytest.raises(ConfigError):
        Settings(implicit_patience=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8_000_000_000),
        ("5k", 5 << 10),
        ("5 KB", 5000),
        ("7B", 7),
        ("2TiB", 2 << 40),
        ("", None),
        ("  ", None),
        ("none", None),
        ("auto", None),
    ],
)
def test_sizes_in_the_environment(text: str, size: int | None) -> None:
    assert Settings.from_env({"WEIGHTLIFE_UNDO_BUDGET_BYTES": text}).undo_budget_bytes == size


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("UNDO_BUDGET_BYTES", "-1"),
        ("UNDO_BUDGET_BYTES", "8 apples"),
        ("UNDO_BUDGET_BYTES", "1.5GiB"),
        ("IMPLICIT_PATIENCE", "8GiB"),
        ("IMPLICIT_PATIENCE", "none"),
        ("IMPLICIT_PATIENCE", "-3"),
        ("IMPLICIT_PATIENCE", "9" * 5000),
        ("MODE", "\x1b[31m"),
    ],
)
def test_illegal_text_in_the_environment(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({f"WEIGHTLIFE_{name}": text})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_values_in_the_environment_ignore_case_and_blanks() -> None:
    assert Settings.from_env({"WEIGHTLIFE_MODE": " Observe "}).mode == "observe"


def test_strange_variables_are_told_and_not_refused() -> None:
    environ = {"WEIGHTLIFE_MOD": "x", "WEIGHTLIFE_QQQQQ": "y", "WEIGHTLIFE": "1", "OTHER": "z"}
    assert Settings.from_env(environ) == Settings()
    assert unknown_variables(environ) == {"WEIGHTLIFE_MOD": "WEIGHTLIFE_MODE", "WEIGHTLIFE_QQQQQ": ""}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", False), ("1", True), ("off", False), ("TRUE", True), (" no ", False), ("", None), (None, None)],
)
def test_enabled(text: str | None, value: bool | None) -> None:
    assert enabled_from_env({} if text is None else {"WEIGHTLIFE": text}) is value


def test_enabled_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match="neither on nor off"):
        enabled_from_env({"WEIGHTLIFE": "maybe"})


def test_the_reference_documents_every_setting() -> None:
    records = {record["name"]: record for record in reference()}
    assert list(records) == [item.name for item in FIELDS]
    for record in records.values():
        assert record["variable"] == f"WEIGHTLIFE_{record['name'].upper()}"
        assert len(record["doc"]) > 20
        assert record["values"]
    assert records["mode"]["values"] == "enforce | observe"
    assert records["undo_budget_bytes"]["values"] == "integer >= 0, or None"


def test_light_modules_load_nothing_heavy() -> None:
    code = (
        "import sys, weightlife.config, weightlife.errors, weightlife.report, weightlife._engine.events\n"
        "heavy = {'torch', 'vllm', 'triton', 'opentelemetry.sdk', 'yaml', 'wrapt', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("value", ["", "  ", " runs", "a\0b", "a\nb", 3, b"runs"])
def test_a_directory_that_can_be_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="a directory, or None"):
        Settings(runs_dir=value)  # type: ignore[arg-type]
