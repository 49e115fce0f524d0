# SPDX-License-Identifier: Apache-2.0
"""From what events carry to attributes of the registry's types. What does not fit is left out, never coerced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weightlife import errors
from weightlife.otel import names

if TYPE_CHECKING:
    from opentelemetry.util.types import AttributeValue

__all__ = [
    "END",
    "FAILED",
    "START",
    "collect",
    "count",
    "error_type",
    "failure",
    "of_report",
    "operation",
    "outcome_of",
    "text",
    "value",
]

_TEXT = 1000
_SLOWEST = 5
_KEYS = 64  # keys of one template at most: classes of hooks are few, but they are the host's

FAILED = frozenset({"aborted", "refused", "poisoned"})
START = {
    names.SESSION_OPERATION: "operation",
    names.SESSION_SOURCE: "source",
    names.SESSION_OPENED_BY: "opened_by",
    names.SESSION_ISOLATION: "isolation",
    names.SESSION_STORAGE: "storage",
    names.MODEL_CLASS: "model",
    names.WEIGHT_GENERATION: "generation",
    names.RANK: "rank",
    names.WORLD_SIZE: "world_size",
}
END = {
    **START,
    names.SESSION_OUTCOME: "outcome",
    names.TENSOR_COUNT: "tensors_received",
    names.TENSOR_SIZE: "bytes_received",
    names.COPY_TENSOR_COUNT: "tensors_copied",
    names.COPY_SIZE: "bytes_copied",
    names.LAYER_TOUCHED: "layers_touched",
    names.LAYER_UNTOUCHED: "layers_untouched",
    names.TENSOR_NOT_SENT: "tensors_not_sent",
    names.UPDATE_ID: "update_id",
    names.MEMORY_PEAK: "peak_bytes",
}
_TEMPLATES = {
    names.LAYER_STRATEGY: "layers_by_strategy",
    names.ACTIVITY_DURATION: "attributed",
    names.PROCESSING_DURATION: "processing",
    names.VERSION: "versions",
}


def value(data: Mapping[str, object], key: str) -> object:
    """A fact of an event: by its own name, or as a field of the report that the event carries."""
    if key in data:
        return data[key]
    return getattr(data.get("report"), key, None)


def text(given: object) -> str:
    """Text for people, without control characters, of bounded length."""
    return "" if given is None else errors.clean(given, _TEXT)


def count(given: object) -> int:
    """A number of things, 0 for what is none."""
    return given if isinstance(given, int) and not isinstance(given, bool) else 0


def operation(data: Mapping[str, object]) -> str:
    """The session's operation."""
    return text(value(data, "operation"))


def outcome_of(data: Mapping[str, object]) -> tuple[str, object, bool]:
    """(outcome, error or None, whether the session failed)."""
    outcome = text(value(data, "outcome"))
    error = value(data, "error") or None
    return outcome, error, error is not None or outcome in FAILED


def collect(table: Mapping[str, str], data: Mapping[str, object]) -> dict[str, AttributeValue]:
    """Attributes that `data` has a value for, each in the registry's type."""
    found: dict[str, AttributeValue] = {}
    for name, key in table.items():
        given = value(data, key)
        if names.TYPES[name] == "int":
            if isinstance(given, int) and not isinstance(given, bool):
                found[name] = given
        elif given is not None and given != "":
            found[name] = text(given)
    return found


def of_report(data: Mapping[str, object]) -> dict[str, AttributeValue]:
    """All that a session's end adds to its root span."""
    found = collect(END, data)
    for name, key in _TEMPLATES.items():
        table = value(data, key)
        if isinstance(table, Mapping):
            for part, given in list(table.items())[:_KEYS]:
                fitting = _fitting(names.TYPES[name], given)
                if fitting is not None:
                    found[f"{name}.{text(part)}"] = fitting
    found.update(_rates(data))
    found.update(_slowest(data))
    return found


def _fitting(declared: str, given: object) -> AttributeValue | None:
    kind = declared.removeprefix("template[").removesuffix("]")
    if kind == "string":
        return text(given)
    if isinstance(given, bool) or not isinstance(given, int | float):
        return 0 if kind == "int" else None
    return int(given) if kind == "int" else float(given)


def _rates(data: Mapping[str, object]) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {}
    attributed = value(data, "attributed")
    if isinstance(attributed, Mapping):
        spent = sum(float(attributed.get(key, 0.0)) for key in ("source", "host_to_device", "loaders"))
        received = count(value(data, "bytes_received"))
        if spent > 0 and received:
            found[names.RECEIVE_RATE] = received / spent / 1e9
    copied = count(value(data, "bytes_copied"))
    phases = value(data, "phases")
    if copied and isinstance(phases, list):
        spent = sum(phase.seconds for phase in phases if phase.name == "copy_back")
        if spent > 0:
            found[names.COPY_RATE] = copied / spent / 1e9
    return found


def _slowest(data: Mapping[str, object]) -> dict[str, AttributeValue]:
    layers = value(data, "layers")
    if not isinstance(layers, list):
        return {}
    slow = sorted((x for x in layers if getattr(x, "seconds", 0.0) > 0), key=lambda x: -x.seconds)[:_SLOWEST]
    if not slow:
        return {}
    return {
        names.LAYER_SLOWEST_NAMES: [text(x.name) for x in slow],
        names.LAYER_SLOWEST_DURATIONS: [float(x.seconds) for x in slow],
    }


def error_type(error: object) -> str:
    """Qualified class name; of an error that came as text, the class that its code tells."""
    if isinstance(error, str):
        error = errors.from_message(error)
    if not isinstance(error, BaseException):
        return "_OTHER"
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def failure(error: object, fallback: str = "") -> tuple[str, str]:
    """(error.type, description). An exception itself is not kept: its frames hold tensors."""
    if error is None:
        return error_type(None), fallback
    try:
        said = text(error)
    except Exception:  # noqa: BLE001 - an exception whose own __str__ raises
        said = type(error).__name__
    return error_type(error), said
