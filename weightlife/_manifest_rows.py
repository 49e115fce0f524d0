# SPDX-License-Identifier: Apache-2.0
"""The rows of a manifest, and how they are read from anybody's file: bounded sizes, counts and numbers.

Standard library only.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weightlife.errors import ConfigError, clean

# DeepSeek-V3 has 94,000 tensors and 11 MB of manifest; a hundred times its count is no model.
MAX_BYTES = 256 * 1024 * 1024
MAX_ITEMS = 2_000_000
MAX_WRITES = 65_536
MAX_NAME = 4096
MAX_DIMENSIONS = 32
MAX_NUMBER = 1 << 62


class Write(NamedTuple):
    """Elements of one storage that a tensor wrote: `offset + sum(i_k * strides[k])` for each index within `shape`."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a complete load: dtype and shape at the sender, and where it went (nowhere: left out by design)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    writes: tuple[Write, ...] = ()


@dataclass(frozen=True)
class StorageEntry:
    """One piece of memory: elements, their dtype, what is held on it (attribute paths), whose it is, dtypes it took."""

    dtype: str
    elements: int
    tensors: tuple[str, ...]
    layers: tuple[int, ...]
    takes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerEntry:
    """One module with tensors: how it is reloaded (direct, rebuild, refuse), and why."""

    path: str
    strategy: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """What a complete load leaves alone by design.

    `what` is "name" (a tensor of the checkpoint that nothing takes) or "tensor" (of the model, of which `elements` of
    `of` elements are not loaded).
    """

    what: str
    name: str
    why: str
    elements: int = 0
    of: int = 0


def plain_file(path: str, flags: int) -> int:
    """Opens a file without waiting for what may be no file: a pipe would hold its reader for ever."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{clean(Path(path).name)} is no file")
    return descriptor


STRATEGIES = ("direct", "rebuild", "refuse")


def rows_of(
    content: Mapping[str, Any], key: str, make: Callable[[list[Any]], Any], width: int
) -> tuple[Any, ...]:
    rows = content.get(key)
    if not isinstance(rows, list) or len(rows) > MAX_ITEMS:
        raise ConfigError(f"a manifest whose {key} are no list of at most {MAX_ITEMS}")
    if not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ConfigError(f"a manifest whose {key} are no lists of {width}")
    return tuple(make(row) for row in rows)


def text_of(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise ConfigError(f"a manifest with {clean(repr(value)[:80])} in place of a text")
    return value


def texts_of(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_ITEMS:
        raise ConfigError("a manifest with no mapping of texts where one belongs")
    return {text_of(key): text_of(item) for key, item in value.items()}


def natural_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_NUMBER:
        raise ConfigError(f"a manifest with {clean(repr(value)[:80])} in place of a natural number")
    return value


def naturals_of(value: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise ConfigError(f"a manifest with no list of at most {limit} numbers where one belongs")
    return tuple(natural_of(item) for item in value)


def names_of(value: Any, limit: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise ConfigError(f"a manifest with no list of at most {limit} texts where one belongs")
    return tuple(text_of(item) for item in value)


def storage_of(row: list[Any], layers: int) -> StorageEntry:
    owners = naturals_of(row[3], MAX_ITEMS)
    if any(owner >= layers for owner in owners):
        raise ConfigError("a manifest with a storage of a layer that there is not")
    return StorageEntry(
        text_of(row[0]), natural_of(row[1]), names_of(row[2], MAX_ITEMS), owners, names_of(row[4], 64)
    )


def tensor_of(row: list[Any], storages: tuple[StorageEntry, ...]) -> TensorEntry:
    if not isinstance(row[3], list) or len(row[3]) > MAX_WRITES:
        raise ConfigError(f"a manifest with a tensor of more than {MAX_WRITES} writes")
    writes = tuple(write_of(item, storages) for item in row[3])
    return TensorEntry(text_of(row[0]), text_of(row[1]), naturals_of(row[2], MAX_DIMENSIONS), writes)


def write_of(row: Any, storages: tuple[StorageEntry, ...]) -> Write:
    if not isinstance(row, list) or len(row) != 4:
        raise ConfigError("a manifest with a write that is no list of 4")
    made = Write(
        natural_of(row[0]), natural_of(row[1]), naturals_of(row[2], MAX_DIMENSIONS), naturals_of(row[3], MAX_DIMENSIONS)
    )  # fmt: skip
    if made.storage >= len(storages) or len(made.shape) != len(made.strides):
        raise ConfigError("a manifest with a write to a storage that there is not")
    reach = made.offset + sum((s - 1) * st for s, st in zip(made.shape, made.strides, strict=True))
    if math.prod(made.shape) and reach >= storages[made.storage].elements:
        raise ConfigError("a manifest with a write outside of its storage")
    return made
