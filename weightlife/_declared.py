# SPDX-License-Identifier: Apache-2.0
"""Names, shapes and dtypes that a source declares, against what a complete load is known to write. Pure.

Used for the headers of files, for what a sender announces, and for an exported manifest: before a byte moves. It
refuses only what the ledger would refuse later. A source may legally hold the same elements under other names (fused
or not, an expert a tensor or all in one): where it has names that are not known, what is missing is left to the
ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from weightlife import _casts, errors
from weightlife._names import nearest, prefix_clause

__all__ = ["Header", "Known", "as_headers", "problems"]


class Header(NamedTuple):
    """What is said of a tensor before it comes: dtype name (without `torch.`, '' if not said) and shape (or None)."""

    dtype: str = ""
    shape: tuple[int, ...] | None = None


class Known(NamedTuple):
    """A tensor of the last complete load: its dtype and shape at the sender, and what it wrote.

    `writes` are regions, equal where two tensors wrote the same elements; none: the model left it out by design.
    `takes` are dtypes that its weights are known to have taken, besides its own; `into` are those of the weights.
    """

    dtype: str
    shape: tuple[int, ...]
    writes: tuple[Hashable, ...]
    takes: frozenset[str] = frozenset()
    into: frozenset[str] = frozenset()


def as_headers(given: Any) -> dict[str, Header]:
    """Headers of whatever a caller calls "what I am going to send".

    Args:
        given: a mapping of names to tensors, to (dtype, shape) or to None; an exported manifest; what
            `read_safetensors` returned; or names.

    Raises:
        ConfigError: it is none of these.
    """
    headers = getattr(given, "headers", None)
    if isinstance(headers, Mapping) and not isinstance(given, Mapping):
        return {str(name): _header(value) for name, value in headers.items()}
    tensors = getattr(given, "tensors", None)
    if isinstance(tensors, Mapping) and not isinstance(given, Mapping):
        return {str(name): Header(record.dtype, tuple(record.shape)) for name, record in tensors.items()}
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise errors.ConfigError(f"{type(given).__name__} does not declare tensors")
    if not isinstance(given, Mapping):
        return {str(name): Header() for name in given}
    return {str(name): _header(value) for name, value in given.items()}


def _header(value: Any) -> Header:
    if value is None:
        return Header()
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        pair = (value.dtype, value.shape)
    elif isinstance(value, (tuple, list)) and len(value) >= 2:
        pair = (value[0], value[1])
    else:
        raise errors.ConfigError(f"{type(value).__name__} is no (dtype, shape)")
    if pair[1] is None:
        return Header(str(pair[0] or "").removeprefix("torch."))
    try:
        shape = tuple(int(size) for size in pair[1])
    except (TypeError, ValueError) as error:
        raise errors.ConfigError(f"{type(pair[1]).__name__} is no shape") from error
    return Header(str(pair[0] or "").removeprefix("torch."), shape)


def problems(
    declared: Mapping[str, Header],
    known: Mapping[str, Known],
    *,
    partial: str,
    groups: Collection[frozenset[str]] = (),
    unexpected: str = "ignore",
    model: str = "",
    session: str = "",
) -> list[tuple[str, errors.CompletenessError]]:
    """Everything that is wrong with a declaration, each with the name of the setting that judges it.

    Args:
        declared: what is going to come, all of it.
        known: what a complete load brings.
        partial: forbid, by_layer or allow: what may be left out.
        groups: for by_layer, names of layers that must come together or not at all.
        unexpected: refuse or ignore names that a complete load does not have.
        model: for the errors.
        session: for the errors.

    Returns:
        pairs of ("announced" or "casts") and an error that is not raised. Empty: nothing speaks against it.
    """
    context = {"model": model, "session": session}
    out: list[tuple[str, errors.CompletenessError]] = []
    strange = [name for name in declared if name not in known]
    for name in [n for n in declared if n in known and known[n].writes]:
        out += _unlike(name, declared[name], known[name], context)
    if strange and unexpected == "refuse":
        close = nearest(strange[0], known)
        message = f"{len(strange)} of {len(declared)} names are not among those of a complete load"
        message += f"; the nearest known name is {close!r}" if close else ""
        message += prefix_clause(declared, known)
        out.append(("announced", errors.UnexpectedTensorError(message, tensors=strange, **context)))
    if not strange:
        out += _left_out(declared, known, partial, groups, context)
    return out


def _unlike(
    name: str, declared: Header, known: Known, context: Mapping[str, str]
) -> list[tuple[str, errors.CompletenessError]]:
    out: list[tuple[str, errors.CompletenessError]] = []
    # Sizes of one come and go between writers of checkpoints (a scale as [] or [1]); loaders don't mind.
    if declared.shape is not None and plain(declared.shape) != plain(known.shape):
        message = f"shape {list(declared.shape)}, the last complete load had {list(known.shape)}"
        out.append(("announced", errors.ShapeMismatchError(message, tensors=[name], **context)))
    taken = declared.dtype in known.takes or any(
        _casts.allowed(declared.dtype, dtype) for dtype in (known.dtype, *known.into)
    )
    if declared.dtype and not taken:
        message = f"dtype {declared.dtype}, the last complete load had {known.dtype}: data of another kind"
        out.append(("casts", errors.DtypeMismatchError(message, tensors=[name], **context)))
    return out


def plain(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without its sizes of one."""
    return tuple(size for size in shape if size != 1)


def _left_out(
    declared: Mapping[str, Header],
    known: Mapping[str, Known],
    partial: str,
    groups: Collection[frozenset[str]],
    context: Mapping[str, str],
) -> list[tuple[str, errors.CompletenessError]]:
    if partial == "allow":
        return []
    # A tied tensor may come under either of its names.
    reached = {region for name in declared for region in known[name].writes}
    missing = [n for n, k in known.items() if n not in declared and not reached.issuperset(k.writes)]
    if partial == "forbid":
        if not missing:
            return []
        message = f"{len(missing)} of {len(known)} tensors of a complete load are not there"
        return [("announced", errors.MissingTensorError(message, tensors=missing, **context))]
    absent = set(missing)
    for group in groups:
        short = sorted(group & absent)
        if short and any(name in declared for name in group):
            message = f"a layer whose weights are processed must come whole, {len(short)} of {len(group)} are not there"
            return [("announced", errors.HalfTouchedLayerError(message, tensors=short, **context))]
    return []
