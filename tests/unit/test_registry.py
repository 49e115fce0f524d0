# SPDX-License-Identifier: Apache-2.0
"""otel/registry against weaver's format, which no package carries: schemas/semconv.schema.json of weaver, and its rules."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightlife.otel import generate_names

REGISTRY = Path(__file__).resolve().parents[2] / "otel" / "registry"
STABILITY = {"stable", "development", "alpha", "beta", "release_candidate"}  # StabilityLevel
PLAIN = {"string": str, "int": int, "double": float, "boolean": bool}
TYPES = {
    f"{head}{kind}{tail}" for kind in PLAIN for head, tail in (("", ""), ("", "[]"), ("template[", "]"))
}  # AttributeType
BASE = {
    "id",
    "type",
    "brief",
    "note",
    "attributes",
    "display_name",
    "stability",
}  # SemanticConventionBase, as used here
OWN = {  # what each type of group has besides, all of it demanded
    "attribute_group": set(),
    "span": {"span_kind"},  # SpanSemanticConvention
    "metric": {"metric_name", "instrument", "unit"},  # MetricSemanticConvention
    "event": {"name"},  # EventSemanticConvention
}
NAME = r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+"


def problems(groups: list[dict[str, Any]]) -> list[str]:
    """What of a registry file weaver would refuse."""
    bad: list[str] = []
    defined: dict[str, Any] = {}

    def demand(ok: bool, what: str) -> None:
        if not ok:
            bad.append(what)

    for group in groups:
        where, kind = str(group.get("id")), group.get("type")
        demand(kind in OWN, f"{where}: type")
        own = OWN.get(str(kind), set())
        demand(
            {"id", "type", "brief", "attributes"} | own <= set(group) <= BASE | own,
            f"{where}: keys {set(group)}",
        )
        demand(kind == "attribute_group" or group.get("stability") in STABILITY, f"{where}: stability")
        demand(
            group.get("span_kind", "internal") in {"client", "server", "producer", "consumer", "internal"},
            where,
        )
        demand(group.get("instrument", "gauge") in {"counter", "gauge", "histogram", "updowncounter"}, where)
        # weaver's check: a metric's id is its name's, and so is an event's
        if kind in ("metric", "event"):
            name = group.get("metric_name", group.get("name"))
            demand(where == f"{kind}.{name}" and bool(re.fullmatch(NAME, str(name))), f"{where}: name {name}")
        for attribute in group.get("attributes", ()):
            if "ref" in attribute:
                demand(
                    set(attribute) <= {"ref", "requirement_level", "brief", "note"}, f"{where}: {attribute}"
                )
                demand(_level(attribute.get("requirement_level", "recommended")), f"{where}: {attribute}")
                continue
            ident = str(attribute.get("id"))
            demand(ident not in defined, f"{ident}: twice")
            defined[ident] = attribute
            bad += _attribute(ident, attribute)
    demand(len({g.get("id") for g in groups}) == len(groups), "two groups of one id")
    standard = generate_names._STANDARD
    for group in groups:
        refs = [a["ref"] for a in group.get("attributes", ()) if "ref" in a]
        demand(len(refs) == len(set(refs)), f"{group.get('id')}: an attribute twice")
        bad += [
            f"{group.get('id')}: {ref} is not defined"
            for ref in refs
            if ref not in defined and ref not in standard
        ]
    return bad


def _level(level: Any) -> bool:
    if isinstance(level, dict):
        return (
            len(level) == 1
            and set(level) <= {"conditionally_required", "recommended"}
            and all(isinstance(why, str) and why for why in level.values())
        )
    return level in {"required", "recommended", "opt_in"}


def _attribute(ident: str, attribute: dict[str, Any]) -> list[str]:
    """AttributeFullSpec, AttributeEnumType; examples of a text, which may be left out elsewhere, are demanded."""
    bad = []
    if (
        not {"id", "type", "stability", "brief"}
        <= set(attribute)
        <= {"id", "type", "stability", "brief", "note", "examples"}
    ):
        bad.append(f"{ident}: keys {set(attribute)}")
    if not re.fullmatch(NAME, ident) or attribute.get("stability") not in STABILITY:
        bad.append(f"{ident}: name or stability")
    kind = attribute.get("type")
    if isinstance(kind, dict):
        if set(kind) != {"members"}:
            return [*bad, f"{ident}: {set(kind)}"]
        for member in kind["members"]:
            if (
                not {"id", "value", "stability"}
                <= set(member)
                <= {"id", "value", "stability", "brief", "note"}
            ):
                bad.append(f"{ident}: member {member}")
            if not isinstance(member.get("value"), str) or member.get("stability") not in STABILITY:
                bad.append(f"{ident}: member {member}")
        if len({m.get("value") for m in kind["members"]}) != len(kind["members"]):
            bad.append(f"{ident}: a member twice")
        return bad
    if kind not in TYPES:
        return [*bad, f"{ident}: type {kind}"]
    several = kind.endswith("[]")
    one = PLAIN[re.sub(r"template\[|\]|\[\]", "", kind.replace("[]", ""))]
    examples = attribute.get("examples")
    if examples is None:
        return [*bad, f"{ident}: no examples"] if one is str else bad
    for example in examples:
        given = example if several else [example]
        if not isinstance(given, list) or any(type(x) is not one for x in given):
            bad.append(f"{ident}: example {example!r} is no {kind}")
    return bad


@pytest.fixture(name="groups")
def _groups() -> list[dict[str, Any]]:
    return generate_names.load_registry()


def test_registry(groups: list[dict[str, Any]]) -> None:
    data = yaml.safe_load((REGISTRY / "weightlife.yaml").read_text(encoding="utf-8"))
    assert set(data) == {"groups"}
    assert problems(groups) == []


def test_a_misspelt_key_or_value_is_seen(groups: list[dict[str, Any]]) -> None:
    for index, group in enumerate(groups):
        for key in group:
            wrong = copy.deepcopy(groups)
            wrong[index][f"{key}x"] = wrong[index].pop(key)
            assert problems(wrong), (group["id"], key)
        for place, attribute in enumerate(group["attributes"]):
            for key in attribute:
                wrong = copy.deepcopy(groups)
                wrong[index]["attributes"][place][f"{key}x"] = wrong[index]["attributes"][place].pop(key)
                assert problems(wrong), (group["id"], attribute, key)
            wrong = copy.deepcopy(groups)
            key = "ref" if "ref" in attribute else "type"
            wrong[index]["attributes"][place][key] = "no.such"
            assert problems(wrong), (group["id"], attribute)


def test_manifest() -> None:
    """RegistryManifest in weaver's crates/weaver_semconv/src/manifest.rs."""
    manifest = yaml.safe_load((REGISTRY / "registry_manifest.yaml").read_text(encoding="utf-8"))
    assert set(manifest) == {"name", "description", "semconv_version", "schema_base_url", "dependencies"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", manifest["semconv_version"])
    for dependency in manifest["dependencies"]:
        assert set(dependency) == {"name", "registry_path"}


def test_what_is_referred_to_elsewhere_is_in_opentelemetrys_registry() -> None:
    """Its generated constants are the package opentelemetry-semantic-conventions, which the SDK brings."""
    from opentelemetry.semconv.attributes import error_attributes

    assert set(generate_names._STANDARD) == {error_attributes.ERROR_TYPE}
