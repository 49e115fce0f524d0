# SPDX-License-Identifier: Apache-2.0
"""What `weightlife.verify` found: plain data with a schema version, and a text for people. No values of tensors.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from weightlife.errors import ConfigError, clean
from weightlife.report import format_bytes, format_seconds

__all__ = ["SCHEMA_VERSION", "WHATS", "Difference", "RankVerification", "Untold", "VerifyReport"]

SCHEMA_VERSION = 1

WHATS = {
    "value": "other bytes",
    "geometry": "another shape, stride, dtype or device",
    "size": "memory of another size, so that its layer could not be rebuilt",
    "missing": "a cold load has it, what serves does not",
    "unexpected": "what serves has it, a cold load does not",
    "attribute": "a plain value (number, text, flag) that differs",
    "kind": "an object of another kind",
    "native": "memory that no tensor owns: its kernel gives other answers",
}
"""What a difference may be."""

MAX_DIFFERENCES = 1000
"""Differences that a record keeps; more are counted."""
_SHOWN = 20
_PATHS = 32


@dataclass
class Difference:
    """One place in which what serves is not what a cold load would hold.

    Attributes:
        path: attribute path, from the model.
        what: a key of `WHATS`.
        detail: in words.
        elements: how many of a tensor differ (`value`), or of a kernel's answers (`native`).
        numel: of how many.
        first: index of the first.
    """

    path: str
    what: str
    detail: str = ""
    elements: int = 0
    numel: int = 0
    first: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{clean(self.path, 300)}: {self.what}"
        if self.elements:
            text += f", {self.elements} of {self.numel} elements"
        if self.first:
            text += f", first at {self.first}"
        return text + (f", {clean(self.detail, 300)}" if self.detail else "")


@dataclass
class Untold:
    """What could not be compared, and why. `count`: elements, where it is a part of a tensor."""

    path: str
    reason: str
    count: int = 0


@dataclass
class RankVerification:
    """What one rank found.

    Attributes:
        model: class of the model.
        rank: of `world_size`.
        world_size: see there.
        generation: of the weights, how many updates were committed.
        source: what they were compared with.
        random_access: whether single tensors of it could be read; else all of it passed by.
        layers: with tensors, of the model.
        layers_compared: how many were.
        share: of the layers, as asked for.
        seed: with which they were chosen.
        groups: that were rebuilt one after another.
        largest_bytes: of the largest of them, as the constructor made it.
        waiting_bytes: most that waited for the rest of their layer (sources without random access).
        tensors: how many were compared bit by bit.
        bytes: of those.
        probed: layers whose native memory was compared by its kernel's answers.
        differences: what differs, at most `MAX_DIFFERENCES`.
        more: how many differences are not in the list.
        untold: reason -> number of places that were not compared, and the first paths.
        seconds: wall time of it all.
        phases: seconds by phase.
    """

    model: str
    rank: int = 0
    world_size: int = 1
    generation: int = 0
    source: str = ""
    random_access: bool = True
    layers: int = 0
    layers_compared: int = 0
    left_out: int = 0  # layers that a source without random access had no second time: verify again
    share: float = 1.0
    seed: int = 0
    groups: int = 0
    largest_bytes: int = 0
    waiting_bytes: int = 0
    tensors: int = 0
    bytes: int = 0
    probed: int = 0
    differences: list[Difference] = field(default_factory=list)
    more: int = 0
    untold: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Nothing differs of what could be compared, and no layer was left out. `untold` has what can't be."""
        return not self.differences and self.layers_compared > 0 and not self.left_out

    def differ(self, found: list[Difference]) -> None:
        """Add differences, as many as are kept."""
        room = max(0, MAX_DIFFERENCES - len(self.differences))
        self.differences += found[:room]
        self.more += len(found) - len(found[:room])

    def tell(self, untold: Untold) -> None:
        """Add what could not be compared."""
        entry = self.untold.setdefault(untold.reason, {"places": 0, "elements": 0, "paths": []})
        entry["places"] += 1
        entry["elements"] += untold.count
        if len(entry["paths"]) < _PATHS:
            entry["paths"].append(untold.path)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "ok": self.ok}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankVerification:
        """What `to_dict` made.

        Raises:
            ConfigError: it did not.
        """
        try:
            known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
            known["differences"] = [
                Difference(**{k: item[k] for k in Difference.__dataclass_fields__ if k in item})
                for item in data.get("differences", [])
            ]
            return cls(**known)
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"this is no record of a verification ({type(error).__name__})") from None

    def __str__(self) -> str:
        verdict = "equal to a cold load" if self.ok else "NOT what a cold load holds"
        if not self.layers_compared:
            verdict = "nothing was compared"
        elif self.left_out and not self.differences:
            verdict = f"{self.left_out} layers were not compared: verify again"
        lines = [
            f"weightlife verify {clean(self.model)}: {verdict}",
            f"  source       {clean(self.source, 300)}"
            + ("" if self.random_access else " (no random access: all of it passed by)"),
            f"  rank         {self.rank} of {self.world_size}",
            f"  weights      generation {self.generation}",
            f"  compared     {self.tensors} tensors, {format_bytes(self.bytes)}, bit by bit",
            f"  layers       {self.layers_compared} of {self.layers}"
            + (f" (a share of {self.share:g}, seed {self.seed})" if self.share < 1 else ""),
            f"  at a time    {self.groups} groups, the largest {format_bytes(self.largest_bytes)}",
            f"  time         {format_seconds(self.seconds)}",
        ]
        if self.probed:
            lines.insert(5, f"  probed       {self.probed} layers by their kernel's answers (native memory)")
        if self.differences:
            lines.append(f"  differences  {len(self.differences) + self.more}")
            lines += [f"    {item}" for item in self.differences[:_SHOWN]]
            if len(self.differences) + self.more > _SHOWN:
                lines.append(f"    and {len(self.differences) + self.more - _SHOWN} more")
        if self.untold:
            lines.append("  not compared")
            for reason, entry in self.untold.items():
                size = f", {entry['elements']} elements" if entry["elements"] else ""
                shown = ", ".join(clean(path, 120) for path in entry["paths"][:2])
                more = ", ..." if entry["places"] > 2 else ""
                lines.append(f"    {clean(reason, 200)}: {entry['places']} places{size} ({shown}{more})")
        return "\n".join(lines)


@dataclass
class VerifyReport:
    """What a verification found, on every rank."""

    ranks: list[RankVerification]

    @property
    def ok(self) -> bool:
        """No rank found a difference, and each compared something."""
        return bool(self.ranks) and all(rank.ok for rank in self.ranks)

    @property
    def differences(self) -> list[Difference]:
        """Of all ranks, in their order."""
        return [difference for rank in self.ranks for difference in rank.differences]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that survives JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "ok": self.ok,
            "ranks": [rank.to_dict() for rank in self.ranks],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VerifyReport:
        """What `to_dict` made. Fields that this version does not know are ignored.

        Raises:
            ConfigError: another schema, or no report.
        """
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ConfigError(
                f"a verification of schema {clean(version)}; this version reads {SCHEMA_VERSION}"
            )
        ranks = data.get("ranks")
        if not isinstance(ranks, list):
            raise ConfigError("a verification lacks its ranks")
        return cls([RankVerification.from_dict(rank) for rank in ranks])

    def __str__(self) -> str:
        return "\n".join(str(rank) for rank in self.ranks)
