# SPDX-License-Identifier: Apache-2.0
"""Settings: one frozen record, checked when it is made, that travels to workers as environment variables.

Each field's metadata holds its documentation and its legal values, so that the reference in the
documentation and the messages of ``ConfigError`` come from one place. Standard library only: the vLLM plugin
reads settings in processes that never load a weight.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import Field, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from weightlife.errors import ConfigError, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["ENABLE_VARIABLE", "PREFIX", "Settings", "enabled_from_env", "reference", "unknown_variables"]

PREFIX = "WEIGHTLIFE_"
ENABLE_VARIABLE = "WEIGHTLIFE"

Mode = Literal["enforce", "observe"]
Isolation = Literal["staged", "in_place"]
Storage = Literal["auto", "pinned", "adopted"]
Partial = Literal["forbid", "by_layer", "allow"]
Unexpected = Literal["refuse", "ignore"]
Check = Literal["strict", "warn", "off"]
Processing = Literal["as_complete", "at_finish"]
WatchWrites = Literal["sampled", "all"]
Layers = Literal["off", "slow", "all"]
CopyBackend = Literal["auto", "triton", "foreach", "copy"]
Digests = Literal["off", "commit"]
LogLevel = Literal["debug", "info", "warning", "error"]

_SIZE = r"(?i)(\d+)\s*(|B|K|KB|KiB|M|MB|MiB|G|GB|GiB|T|TB|TiB)"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _choice(values: object, doc: str) -> dict[str, object]:
    return {"doc": doc, "choices": get_args(values)}


def _path(doc: str) -> dict[str, object]:
    return {"doc": doc, "path": True, "optional": True}


def _integer(doc: str, *, minimum: int, size: bool, optional: bool) -> dict[str, object]:
    return {"doc": doc, "minimum": minimum, "size": size, "optional": optional}


@dataclass(frozen=True)
class Settings:
    """What ``install()`` takes. Raises ``ConfigError`` for a value that is not legal."""

    mode: Mode = field(
        default="enforce",
        metadata=_choice(
            Mode, "'enforce' puts a session round every load; 'observe' changes nothing, records and warns."
        ),
    )
    isolation: Isolation = field(
        default="staged",
        metadata=_choice(
            Isolation,
            "'staged' assembles the new weights beside the old ones and swaps at commit; 'in_place' writes over "
            "them, for a paused engine.",
        ),
    )
    storage: Storage = field(
        default="auto",
        metadata=_choice(
            Storage,
            "'pinned' keeps every piece of runtime storage; 'adopted' replaces it where the host proves that "
            "nothing holds an address; 'auto' pins.",
        ),
    )
    partial_disk: Partial = field(
        default="forbid",
        metadata=_choice(
            Partial,
            "A load from disk that leaves something untouched: 'forbid', 'by_layer' (whole layers may be left "
            "out) or 'allow'.",
        ),
    )
    partial_update: Partial = field(
        default="by_layer",
        metadata=_choice(
            Partial, "The same for start/finish updates without announced names and for implicit sessions."
        ),
    )
    unexpected: Unexpected = field(
        default="ignore",
        metadata=_choice(
            Unexpected,
            "Tensors that no parameter takes: 'refuse', or 'ignore' (counted and reported), since checkpoints "
            "often hold more than one model needs.",
        ),
    )
    surplus: Check = field(
        default="strict",
        metadata=_choice(Check, "Regions that one session writes more often than a complete load does."),
    )
    shapes: Check = field(
        default="strict",
        metadata=_choice(
            Check,
            "Tensors with another number of elements than in the last complete load (loaders that narrow would cut "
            "them in silence), copies that would repeat a tensor to fill a weight, and loaders that take another part of a "
            "tensor.",
        ),
    )
    casts: Check = field(
        default="strict",
        metadata=_choice(
            Check,
            "Casts that change the kind of a value (integer or 8-bit float into a wider float, or back). Casts "
            "between 16-, 32- and 64-bit floats, which a cold load does as well, are always legal.",
        ),
    )
    empty: Check = field(
        default="strict", metadata=_choice(Check, "A session that ends without having received a tensor.")
    )
    announced: Check = field(
        default="strict",
        metadata=_choice(
            Check,
            "Names, shapes and dtypes that a sender announces ('expected', a transfer's update info), held against "
            "a complete load before the first write, and against what then arrives.",
        ),
    )
    source: Check = field(
        default="strict",
        metadata=_choice(
            Check,
            "Headers of a safetensors folder, held against its index and a complete load before a reload by path, and"
            " whether its files changed during it.",
        ),
    )
    nonfinite: Check = field(
        default="off",
        metadata=_choice(
            Check,
            "NaN or infinity in what is received. Off by default: some clients mark unchanged elements with NaN.",
        ),
    )
    contract: Check = field(
        default="strict",
        metadata=_choice(
            Check, "Runtime storage that differs after a commit from the contract of the first load."
        ),
    )
    processing: Processing = field(
        default="as_complete",
        metadata=_choice(
            Processing,
            "In place and pinned: 'as_complete' processes and commits a layer as soon as all of its tensors have "
            "come, so that raw weights need not wait in memory; 'at_finish' processes all layers together.",
        ),
    )
    watch_writes: WatchWrites = field(
        default="sampled",
        metadata=_choice(
            WatchWrites,
            "Writes of later loads: 'sampled' lets loaders that only copied in the first load run without being "
            "observed, checks that they wrote, and observes one tensor in 256; 'all' observes each, and first loads under a dispatch mode "
            "throughout.",
        ),
    )
    copy_backend: CopyBackend = field(
        default="auto",
        metadata=_choice(
            CopyBackend,
            "How 'pinned' copies at commit: 'triton' (one launch, on a GPU), 'foreach' or 'copy'; 'auto' takes the "
            "first that works there. All give the same bytes.",
        ),
    )
    digests: Digests = field(
        default="off",
        metadata=_choice(
            Digests,
            "'commit' keeps a digest of all runtime storage after the first load and each commit, which "
            "weightlife.check_digests compares with what is there later.",
        ),
    )
    rank_values: Check = field(
        default="strict",
        metadata=_choice(
            Check,
            "With several ranks: tensors that every rank gets whole and that differ between ranks before the commit, and "
            "shards that are equal on all ranks where the last update's were not.",
        ),
    )
    undo_budget_bytes: int | None = field(
        default=None,
        metadata=_integer(
            "Memory that 'in_place' may spend on an undo log, in bytes or as '8GiB'; empty: no limit; 0: no undo, "
            "so that a failed update poisons the model.",
            minimum=0,
            size=True,
            optional=True,
        ),
    )
    implicit_patience: int = field(
        default=64,
        metadata=_integer(
            "Batches that run on the old weights while an implicit session has a half-touched layer; after that "
            "it is aborted.",
            minimum=0,
            size=False,
            optional=False,
        ),
    )
    handshake: Check = field(
        default="warn",
        metadata=_choice(
            Check, "Workers that run without weightlife, with another version or with other settings."
        ),
    )
    trace_layers: Layers = field(
        default="slow",
        metadata=_choice(
            Layers,
            "Layers that get spans of their own: those whose processing took trace_layer_ms ('slow', at most 20 spans "
            "a session in all), every one ('all', at most 512) or none.",
        ),
    )
    trace_layer_ms: int = field(
        default=100,
        metadata=_integer(
            "Milliseconds of processing from which a layer is slow.", minimum=0, size=False, optional=False
        ),
    )
    log_level: LogLevel = field(
        default="info", metadata=_choice(LogLevel, "Level of the logger 'weightlife'.")
    )
    runs_dir: str | None = field(
        default=None,
        metadata=_path(
            "A directory in which every process keeps the reports and spans of its sessions, for `weightlife report` "
            "and `weightlife trace tail`; empty: nothing is kept."
        ),
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            _check(item, getattr(self, item.name))

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Settings:
        """Settings from keyword arguments; an unknown name raises ``ConfigError`` with the nearest valid one."""
        _check_names(kwargs)
        return cls(**kwargs)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Settings:
        """Settings from ``WEIGHTLIFE_*`` variables; absent and empty ones keep their default.

        Variables with the prefix that are no setting are left alone: see ``unknown_variables``.
        """
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = environ.get(_variable(item.name), "").strip()
            if text:
                values[item.name] = _from_text(item, text)
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """Every setting as an environment variable; ``from_env(to_env())`` gives an equal record."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {_variable(name): "" if value is None else str(value) for name, value in values}

    def replace(self, **kwargs: Any) -> Settings:
        """A copy with some settings changed, checked like ``from_kwargs``."""
        _check_names(kwargs)
        return replace(self, **kwargs)

    def digest(self) -> str:
        """Twelve hexadecimal digits that are equal where all settings are, in any process."""
        text = "\n".join(f"{key}={value}" for key, value in sorted(self.to_env().items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def enabled_from_env(environ: Mapping[str, str]) -> bool | None:
    """What ``WEIGHTLIFE`` says: True, False (which always wins), or None where it is absent or empty."""
    text = environ.get(ENABLE_VARIABLE, "").strip().lower()
    if not text:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(
        f"{ENABLE_VARIABLE}={clean(text)!r} is neither on nor off", hint=f"set {ENABLE_VARIABLE} to 0 or 1"
    )


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """``WEIGHTLIFE_*`` variables that are no setting, each with the nearest valid variable or ''.

    A misspelt variable would otherwise be silent; it is not an error, since other tools may share the prefix.
    """
    known = [item.name for item in fields(Settings)]
    strange = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name = variable.removeprefix(PREFIX).lower()
        if name not in known or variable != _variable(name):
            nearest = _nearest(name, known)
            strange[variable] = _variable(nearest) if nearest else ""
    return strange


def reference() -> Iterator[dict[str, str]]:
    """One record a setting (name, variable, default, values, doc) for the generated reference."""
    for item in fields(Settings):
        yield {
            "name": item.name,
            "variable": _variable(item.name),
            "default": "" if item.default is None else str(item.default),
            "values": _legal(item),
            "doc": str(item.metadata["doc"]),
        }


def _variable(name: str) -> str:
    return PREFIX + name.upper()


def _nearest(name: str, known: list[str]) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), "")


def _check_names(kwargs: Mapping[str, object]) -> None:
    known = [item.name for item in fields(Settings)]
    for name in kwargs:
        if name not in known:
            nearest = _nearest(name, known)
            raise ConfigError(
                f"unknown setting {clean(name)!r}",
                hint=f"did you mean {nearest!r}?" if nearest else f"settings are {', '.join(known)}",
            )


def _legal(item: Field[Any]) -> str:
    choices = item.metadata.get("choices")
    if choices:
        return " | ".join(choices)
    if item.metadata.get("path"):
        return "a directory, or None"
    least = f"integer >= {item.metadata['minimum']}"
    return f"{least}, or None" if item.metadata["optional"] else least


def _refuse(item: Field[Any], value: object) -> ConfigError:
    return ConfigError(
        f"{item.name}={clean(repr(value))} is not legal",
        hint=f"{item.name} (environment: {_variable(item.name)}) takes {_legal(item)}",
    )


def _check(item: Field[Any], value: object) -> None:
    choices = item.metadata.get("choices")
    if choices:
        if not isinstance(value, str) or value not in choices:
            raise _refuse(item, value)
        return
    if value is None and item.metadata["optional"]:
        return
    if item.metadata.get("path"):
        # what can't be a path anywhere, or would not survive being a variable
        if (
            not isinstance(value, str)
            or not value.strip()
            or not value.isprintable()
            or value != value.strip()
        ):
            raise _refuse(item, value)
        return
    # bool is an int to Python, but True is nobody's budget
    if isinstance(value, bool) or not isinstance(value, int) or value < item.metadata["minimum"]:
        raise _refuse(item, value)


def _from_text(item: Field[Any], text: str) -> str | int | None:
    if item.metadata.get("choices"):
        return text.lower()
    if item.metadata.get("path"):
        return text
    if item.metadata["optional"] and text.lower() in ("none", "auto"):
        return None
    parse: Callable[[str], int | None] = _parse_size if item.metadata["size"] else _parse_int
    value = parse(text)
    if value is None:
        raise _refuse(item, text)
    return value


def _parse_int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def _parse_size(text: str) -> int | None:
    """Bytes of '123', '8GiB' (1024) or '8GB' (1000); a lone letter counts as binary, as in most tools."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        return None
    unit = match[2].lower()
    base = 1000 if len(unit) == 2 and unit.endswith("b") else 1024
    return int(match[1]) * int(base ** _POWERS[unit.rstrip("b").removesuffix("i")])
