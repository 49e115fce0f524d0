# SPDX-License-Identifier: Apache-2.0
"""Generate ``names.py`` and the reference in docs/tracing.md: ``python otel/generate_names.py``.

The registry is the source of every name that weightlife tells; a test holds what is generated equal to it.
Needs PyYAML, which nothing else at run time does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["generate", "load_registry", "reference", "with_reference"]

_HERE = Path(__file__).resolve().parent
REGISTRY = _HERE / "registry" / "weightlife.yaml"
TARGET = _HERE / "names.py"
PAGE = _HERE.parent / "docs" / "tracing.md"

# Names that the registry refers to and OpenTelemetry's own registry defines.
_STANDARD = {"error.type": ("string", "Class of the error that ended the operation.")}

_HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""Names of attributes, events and metrics. Generated from registry/weightlife.yaml; do not edit."""

from __future__ import annotations

'''


def load_registry(path: Path = REGISTRY) -> list[dict[str, Any]]:
    """The groups of a registry file."""
    import yaml

    groups: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return groups


def generate(groups: list[dict[str, Any]]) -> str:
    """The text of ``names.py``, formatted as ``ruff format`` leaves it."""
    defined = [
        attribute for group in groups for attribute in group.get("attributes", ()) if "id" in attribute
    ]
    referred = {a["ref"] for group in groups for a in group.get("attributes", ()) if "ref" in a}
    rows = [(a["id"], _type(a["type"]), a["brief"]) for a in defined]
    rows += [(name, *_STANDARD[name]) for name in referred - {a["id"] for a in defined}]
    rows.sort()
    lines: list[str] = []
    for name, _, brief in rows:
        lines += [f'{_constant(name)} = "{name}"', f'"""{" ".join(brief.split())}"""']
    for group in groups:
        if group["type"] == "event":
            lines += [f'EVENT_{_constant(group["name"])} = "{group["name"]}"', f'"""{group["brief"]}"""']
        elif group["type"] == "metric":
            name, unit = group["metric_name"], group["unit"]
            lines += [
                f'METRIC_{_constant(name)} = "{name}"',
                f'"""{group["brief"]} {group["instrument"]}, {unit}."""',
            ]
    lines += ["", "UNITS: dict[str, str] = {"]
    lines += [
        f'    METRIC_{_constant(group["metric_name"])}: "{group["unit"]}",'
        for group in groups
        if group["type"] == "metric"
    ]
    lines += ["}", '"""Unit of each metric."""']
    lines += ["", "TYPES: dict[str, str] = {"]
    lines += [f'    {_constant(name)}: "{kind}",' for name, kind, _ in rows]
    lines += [
        "}",
        '"""Type of each attribute\'s value; of a template, the type of the values under its prefix."""',
    ]
    return _HEAD + "\n".join(lines) + "\n"


def reference(groups: list[dict[str, Any]]) -> str:
    """Markdown tables of all spans, events, links and metrics with their attributes."""
    about = {a["id"]: a for group in groups for a in group.get("attributes", ()) if "id" in a}
    lines: list[str] = []
    for group in groups:
        kind = group["type"]
        if group["id"].startswith("registry"):
            continue
        title = group.get("metric_name") or group.get("name") or group["id"].partition(".")[2]
        what = {"metric": f"{group.get('instrument')}, unit `{group.get('unit')}`", "attribute_group": "link"}
        lines += [
            "",
            f"### `{title}` ({what.get(kind, kind)})",
            "",
            group["brief"] + _sentence(group.get("note")),
        ]
        rows = [_row(a, about) for a in group["attributes"]]
        if rows:
            lines += ["", "| attribute | type | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines).strip() + "\n"


def _sentence(note: str | None) -> str:
    return f" {note}" if note else ""


def _row(used: dict[str, Any], about: dict[str, dict[str, Any]]) -> str:
    name = used["ref"]
    if name in about:
        declared, brief = about[name]["type"], " ".join(about[name]["brief"].split())
    else:
        declared, brief = _STANDARD[name]
    if isinstance(declared, dict):
        values = ", ".join(f"`{member['value']}`" for member in declared["members"])
        declared, brief = "string", f"{brief} One of {values}."
    shown = f"`{name}.KEY`" if declared.startswith("template") else f"`{name}`"
    condition = used.get("requirement_level")
    if isinstance(condition, dict):
        brief += f" {condition['conditionally_required']}"
    return f"| {shown} | {declared.removeprefix('template[').removesuffix(']') if 'template' in declared else declared} | {brief} |"


_BEGIN, _END = (
    "<!-- generated from otel/registry; do not edit below -->\n",
    "<!-- end of what is generated -->\n",
)


def with_reference(page: str, groups: list[dict[str, Any]]) -> str:
    """A page with the reference between its two marks brought up to date."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{reference(groups)}\n{_END}{after}"


def _type(declared: str | dict[str, Any]) -> str:
    return declared if isinstance(declared, str) else "string"


def _constant(name: str) -> str:
    return name.removeprefix("weightlife.").replace(".", "_").upper()


if __name__ == "__main__":
    TARGET.write_text(generate(load_registry()), encoding="utf-8")
    PAGE.write_text(with_reference(PAGE.read_text(encoding="utf-8"), load_registry()), encoding="utf-8")
