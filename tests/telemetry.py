# SPDX-License-Identifier: Apache-2.0
"""The registry as a judge of what was emitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weightlife.otel import names

_KINDS: dict[str, type] = {"string": str, "int": int, "double": float}
_ACTIONS = {"load_weights": "session", "process_layer": "layer", "collective_rpc": "rpc"}


def group_of(span_name: str) -> str:
    """The registry's group of one of our spans, by its name."""
    return f"span.weightlife.{_ACTIONS.get(span_name.partition(' ')[0], 'phase')}"


class Registry:
    """Which attributes each group may have, and of which type."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.groups = {group["id"]: group for group in groups}
        self.allowed = {
            ident: {a["ref"] for a in group.get("attributes", ()) if "ref" in a}
            for ident, group in self.groups.items()
        }

    def declared(self, name: str) -> str:
        """The declared name of an attribute: its own, or the template that it fits."""
        if name in names.TYPES:
            return name
        fitting = [
            n for n, kind in names.TYPES.items() if kind.startswith("template") and name.startswith(f"{n}.")
        ]
        assert fitting, f"{name} is not in the registry"
        return max(fitting, key=len)

    def check(self, group: str, attributes: Mapping[str, Any]) -> None:
        """Every attribute is declared for the group, and its value has the declared type."""
        for name, value in attributes.items():
            declared = self.declared(name)
            assert declared in self.allowed[group], (group, name)
            kind = names.TYPES[declared]
            if kind.startswith("template"):
                assert name != declared, name
                kind = kind.removeprefix("template[").removesuffix("]")
            if kind.endswith("[]"):
                item = _KINDS[kind.removesuffix("[]")]
                assert isinstance(value, Sequence), (name, value)
                assert not isinstance(value, str), (name, value)
                assert all(type(x) is item for x in value), (name, value)
            else:
                assert type(value) is _KINDS[kind], (name, value)
        required = {
            a["ref"]
            for a in self.groups[group].get("attributes", ())
            if a.get("requirement_level") == "required"
        }
        assert required <= set(attributes), (group, required - set(attributes))
