# SPDX-License-Identifier: Apache-2.0
"""What one session did on one rank: plain data with a schema version, one log line, and a text for people.

Reports cross processes and are kept in files, so they hold nothing but strings, numbers, lists and
dictionaries. Within a schema version fields are only added; a reader ignores those that it does not know.

Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, TypeVar

from weightlife.errors import ConfigError, clean, names

__all__ = [
    "ATTRIBUTED",
    "OPERATIONS",
    "OUTCOMES",
    "SCHEMA_VERSION",
    "LayerRecord",
    "LoadReport",
    "PhaseRecord",
    "Violation",
    "format_bytes",
    "format_seconds",
]

SCHEMA_VERSION = 1

OPERATIONS = ("first_load", "reload", "update", "implicit", "kernel_format")
ATTRIBUTED = {
    "source": "in the source: reading files, receiving, whatever the iterator does",
    "host_to_device": "in copies from the host's memory to a device, which loaders make",
    "loaders": "in the host's weight loaders, apart from these copies",
    "between_calls": "receiving, but outside of any load call: waiting for the sender, or the host's preparations",
    "ranks": "waiting for the other ranks' votes",
}
"""What ``attributed`` counts. The rest of a session's time is in its phases."""
OUTCOMES = ("open", "committed", "aborted", "refused", "poisoned", "observed")

# What serves after the session: the first question of whoever reads this at night.
_SERVING = {
    "open": "the session is still open",
    "committed": "the new weights serve",
    "aborted": "the old weights serve, unchanged",
    "refused": "the old weights serve; nothing was touched",
    "poisoned": "NOTHING SERVES: the weights are not usable until a complete update commits",
    "observed": "the host's own path ran; weightlife changed nothing",
}
_LAYERS_SHOWN = 12
_ITEMS_SHOWN = 20
_SLOWEST_SHOWN = 3


@dataclass
class PhaseRecord:
    """One phase: wall seconds over all its calls; ``start`` is when the first began, in seconds of the session."""

    name: str
    seconds: float = 0.0
    calls: int = 1
    start: float = 0.0


@dataclass
class LayerRecord:
    """One layer: its strategy, why, whether this session wrote it, its runtime bytes, seconds in its hooks."""

    name: str
    strategy: str = ""
    reason: str = ""
    touched: bool = False
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class Violation:
    """One thing that was not as it must be; ``code`` is an error's code (see ``weightlife.errors``)."""

    code: str
    message: str = ""
    layer: str = ""
    tensors: list[str] = field(default_factory=list)


@dataclass
class LoadReport:
    """Everything about one session on one rank.

    ``operation`` is one of ``OPERATIONS`` and ``outcome`` one of ``OUTCOMES``. ``started_at`` is ISO 8601 in UTC,
    durations are seconds, sizes bytes. ``opened_by`` names who opened the session, ``source`` where the tensors came
    from. ``contract_changes`` lists runtime storage that differs from the contract, each a plain record.

    ``attributed`` says where time went across phases, in seconds (``ATTRIBUTED`` has the keys); ``processing`` the
    seconds of the host's hooks by their class. ``peak_bytes`` is None unless this session set the process's highest
    mark: an older, higher one hides what a session used. ``trace_id`` and ``span_id`` are hexadecimal, and empty
    where no trace was recorded. ``tensors_not_sent``: of those that a complete load brings, what this one left out.
    ``update_id`` is one for all ranks of an update, the session of the lowest of them: with one rank the session's own;
    with several empty where they did not vote (first loads, loads that are only watched, a rank that failed before).
    """

    schema_version: int = SCHEMA_VERSION
    session_id: str = ""
    model: str = ""
    operation: str = "reload"
    source: str = ""
    opened_by: str = ""
    rank: int = 0
    world_size: int = 1
    generation: int = 0
    isolation: str = ""
    isolation_why: str = ""
    storage: str = ""
    storage_why: str = ""
    started_at: str = ""
    seconds: float = 0.0
    phases: list[PhaseRecord] = field(default_factory=list)
    layers_by_strategy: dict[str, int] = field(default_factory=dict)
    layers: list[LayerRecord] = field(default_factory=list)
    tensors_received: int = 0
    bytes_received: int = 0
    layers_touched: int = 0
    layers_untouched: int = 0
    contract_changes: list[dict[str, Any]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    outcome: str = "open"
    error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None
    attributed: dict[str, float] = field(default_factory=dict)
    processing: dict[str, float] = field(default_factory=dict)
    tensors_copied: int = 0
    bytes_copied: int = 0
    trace_id: str = ""
    span_id: str = ""
    tensors_not_sent: int = 0
    update_id: str = ""

    def __post_init__(self) -> None:
        if not self.update_id and self.world_size == 1:
            self.update_id = self.session_id

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what is not JSON already becomes text."""
        return {key: _plain(value) for key, value in asdict(self).items()}

    def to_json(self, *, indent: int | None = None) -> str:
        """``to_dict`` as strict JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoadReport:
        """Read what ``to_dict`` wrote. Raises ``ConfigError`` for another schema or for wrong types."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"a report is a mapping, not {type(data).__name__}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise ConfigError(
                f"this report has schema version {clean(version)}, and this weightlife reads {SCHEMA_VERSION}",
                hint="read it with the version of weightlife that wrote it",
            )
        report = _build(cls, data)
        report.phases = [_build(PhaseRecord, item) for item in report.phases]
        report.layers = [_build(LayerRecord, item) for item in report.layers]
        report.violations = [_build(Violation, item) for item in report.violations]
        for value, legal in ((report.operation, OPERATIONS), (report.outcome, OUTCOMES)):
            if value not in legal:
                raise ConfigError(f"a report says {clean(value)!r} where one of {', '.join(legal)} is legal")
        return report

    def summary_line(self) -> str:
        """The one log line of a session and rank."""
        phases = ", ".join(f"{clean(p.name)} {format_seconds(p.seconds)}" for p in self.phases)
        touched = f"layers {self.layers_touched} touched"
        if self.layers_untouched:
            touched += f" {self.layers_untouched} untouched"
        how = "/".join(clean(part) for part in (self.isolation, self.storage) if part)
        parts = [
            f"session {clean(self.session_id)}",
            *([f"of update {clean(self.update_id)}"] if self._of_others() else []),
            f"{clean(self.operation)} {clean(self.model)} rank{self.rank}:",
            f"{self.outcome.upper() if self.outcome in ('aborted', 'refused', 'poisoned') else self.outcome},",
            f"{self.tensors_received} tensors {format_bytes(self.bytes_received)}",
            *([f"({self.tensors_not_sent} not sent)"] if self.tensors_not_sent else []),
            f"in {format_seconds(self.seconds)}{f' ({phases})' if phases else ''},",
            f"{touched},{f' {how},' if how else ''} violations {len(self.violations)}",
        ]
        if self.error:
            parts.append(f"- {self._serving()}: {clean(self.error, 500)}")
        return " ".join(parts)

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._time(), *self._layers(), *self._trouble()])

    def _of_others(self) -> bool:
        """Whether the update goes by another name than this session."""
        return self.update_id not in ("", self.session_id)

    def _serving(self) -> str:
        if self.operation == "first_load" and self.outcome in ("aborted", "refused"):
            return "nothing serves: the first load failed"
        if self.outcome == "committed" and self.tensors_not_sent:
            return f"the new weights serve, beside old values of what was not sent (tensors: {self.tensors_not_sent})"
        return _SERVING.get(self.outcome, "")

    def _head(self) -> list[str]:
        rows = [
            ("result", f"{self.outcome}: {self._serving()}"),
            ("error", clean(self.error, 2000) if self.error else ""),
            ("model", clean(self.model)),
            ("source", clean(self.source)),
            ("opened by", clean(self.opened_by)),
            ("rank", f"{self.rank} of {self.world_size}"),
            ("update", clean(self.update_id) if self.world_size > 1 else ""),
            ("weights", f"generation {self.generation}"),
            ("received", f"{self.tensors_received} tensors, {format_bytes(self.bytes_received)}"),
            ("isolation", _because(self.isolation, self.isolation_why)),
            ("storage", _because(self.storage, self.storage_why)),
            ("peak memory", format_bytes(self.peak_bytes) if self.peak_bytes is not None else ""),
            ("started", clean(self.started_at)),
            ("trace", clean(self.trace_id)),
            ("versions", ", ".join(f"{clean(k)} {clean(v)}" for k, v in self.versions.items())),
        ]
        title = f"weightlife session {clean(self.session_id)}: {clean(self.operation)}"
        return [title, *(f"  {label:<12} {text}" for label, text in rows if text)]

    def _time(self) -> list[str]:
        lines = [f"  {'time':<12} {format_seconds(self.seconds)}"]
        width = max((len(clean(p.name, 40)) for p in self.phases), default=0)
        for phase in self.phases:
            share = f"{100 * phase.seconds / self.seconds:5.1f} %" if self.seconds > 0 else "      -"
            calls = f"  ({phase.calls} calls)" if phase.calls != 1 else ""
            lines.append(
                f"    {clean(phase.name, 40):<{width}}  {format_seconds(phase.seconds):>8}  {share}{calls}"
            )
        lines += _seconds("of which", self.attributed)
        lines += _seconds("hooks", self.processing)
        slow = sorted((x for x in self.layers if x.seconds > 0), key=lambda x: -x.seconds)[:_SLOWEST_SHOWN]
        return lines + _seconds("slowest", {x.name: x.seconds for x in slow})

    def _layers(self) -> list[str]:
        counts = ", ".join(
            f"{count} {clean(name)}" for name, count in sorted(self.layers_by_strategy.items())
        )
        lines = [f"  {'layers':<12} {self.layers_touched} touched, {self.layers_untouched} untouched"]
        if counts:
            lines[0] += f" ({counts})"
        # direct layers are the plain case; what is special and what was left out is worth a line
        special = [x for x in self.layers if x.strategy != "direct" or not x.touched]
        for layer in special[:_LAYERS_SHOWN]:
            state = "" if layer.touched else ", untouched"
            lines.append(f"    {clean(layer.name)}: {_because(layer.strategy, layer.reason)}{state}")
        return _and_more(lines, len(special) - _LAYERS_SHOWN)

    def _trouble(self) -> list[str]:
        lines = [f"  {'violations':<12} {len(self.violations) or 'none'}"]
        for item in self.violations[:_ITEMS_SHOWN]:
            where = f" in {clean(item.layer)}" if item.layer else ""
            which = f": {names(item.tensors)}" if item.tensors else ""
            lines.append(f"    {clean(item.code)} {clean(item.message, 500)}{where}{which}")
        lines = _and_more(lines, len(self.violations) - _ITEMS_SHOWN)
        if self.contract_changes:
            lines.append(f"  {'storage that changed':<12} {len(self.contract_changes)}")
            for change in self.contract_changes[:_ITEMS_SHOWN]:
                lines.append(
                    f"    {clean(', '.join(f'{key}={value}' for key, value in change.items()), 300)}"
                )
            lines = _and_more(lines, len(self.contract_changes) - _ITEMS_SHOWN)
        lines.extend(f"  {'note':<12} {clean(note, 500)}" for note in self.notes[:_ITEMS_SHOWN])
        return _and_more(lines, len(self.notes) - _ITEMS_SHOWN)


def format_bytes(count: int) -> str:
    """``15.2 GiB``: binary units, three significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """``1.9s``, ``9ms`` or ``3m12s``."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes}m{rest:02d}s"
    if seconds >= 1:
        return f"{seconds:.1f}s"
    return f"{seconds * 1e3:.0f}ms" if seconds >= 0.001 else f"{seconds * 1e6:.0f}us"


def _seconds(label: str, table: Mapping[str, float]) -> list[str]:
    shown = sorted((item for item in table.items() if item[1] > 0), key=lambda item: -item[1])[:_ITEMS_SHOWN]
    text = ", ".join(f"{clean(key, 120)} {format_seconds(value)}" for key, value in shown)
    return [f"  {label:<12} {text}"] if text else []


def _because(what: str, why: str) -> str:
    return f"{clean(what)} ({clean(why, 300)})" if why else clean(what)


def _and_more(lines: list[str], more: int) -> list[str]:
    return [*lines, f"    and {more} more"] if more > 0 else lines


def _plain(value: object) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return clean(value, 1000)


_Record = TypeVar("_Record")


def _build(cls: type[_Record], data: object) -> _Record:
    """A record from plain data: known keys only, each of the type that the record's field has."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"a {cls.__name__} is a mapping, not {type(data).__name__}")
    known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for item in known:
        if item.name in data:
            values[item.name] = _typed(cls.__name__, item, data[item.name])
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"a {cls.__name__} has no {item.name}")
    return cls(**values)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
}
_ITEMS: dict[str, type] = {
    "list[str]": str,
    "list[PhaseRecord]": Mapping,
    "list[LayerRecord]": Mapping,
    "list[Violation]": Mapping,
    "list[dict[str, Any]]": Mapping,
}
_VALUES: dict[str, type | tuple[type, ...]] = {
    "dict[str, int]": int,
    "dict[str, str]": str,
    "dict[str, float]": (int, float),
}


def _typed(record: str, item: Field[Any], value: object) -> object:
    # annotations are text in this module (from __future__ import annotations), which makes them a table key
    kind = str(item.type)
    if kind in _ITEMS and isinstance(value, list):
        if all(isinstance(x, _ITEMS[kind]) for x in value):
            return [dict(x) if isinstance(x, Mapping) else x for x in value]
    elif kind in _VALUES and isinstance(value, Mapping):
        if all(isinstance(k, str) and isinstance(v, _VALUES[kind]) for k, v in value.items()):
            return dict(value)
    elif (
        kind in _TYPES and isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
    ):
        return value
    raise ConfigError(f"{record}.{item.name} is {item.type}, not {clean(repr(value), 80)}")
