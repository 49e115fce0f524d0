# SPDX-License-Identifier: Apache-2.0
"""The manifest for users: what a complete load of a model brings and writes, as plain data. JSON in, JSON out.

`weightlife.manifest(llm)` makes one of a model that was loaded. A trainer, a build step or a test can keep it, compare
two, and hold a checkpoint against it without the model. An imported manifest is untrusted input: sizes, counts and
numbers are bounded, nothing in it is a path that is opened. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightlife._declared import Known, as_headers, problems
from weightlife._manifest_rows import (
    MAX_BYTES,
    STRATEGIES,
    LayerEntry,
    LeftOut,
    StorageEntry,
    TensorEntry,
    Write,
    natural_of,
    plain_file,
    rows_of,
    storage_of,
    tensor_of,
    text_of,
    texts_of,
)  # fmt: skip
from weightlife.errors import CompletenessError, ConfigError, clean

__all__ = [
    "SCHEMA_VERSION", "LayerEntry", "LeftOut", "Manifest", "ManifestDiff", "StorageEntry", "TensorEntry", "Write",
]  # fmt: skip

SCHEMA_VERSION = 1
KIND = "weightlife.manifest"


@dataclass(frozen=True)
class ManifestDiff:
    """How one manifest differs from another: names, and (name, before, after)."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    shapes: tuple[tuple[str, str, str], ...] = ()
    dtypes: tuple[tuple[str, str, str], ...] = ()
    moved: tuple[str, ...] = ()  # written to other elements
    layers: tuple[tuple[str, str, str], ...] = ()  # path, strategy before, after

    def __bool__(self) -> bool:
        """Whether there is a difference."""
        return any((self.added, self.removed, self.shapes, self.dtypes, self.moved, self.layers))

    def __str__(self) -> str:
        if not self:
            return "no difference"
        out = [f"only after: {clean(name)}" for name in self.added]
        out += [f"only before: {clean(name)}" for name in self.removed]
        for what, rows in (("shape", self.shapes), ("dtype", self.dtypes), ("strategy", self.layers)):
            out += [f"{what} of {clean(name)}: {old}, now {new}" for name, old, new in rows]
        out += [f"writes other elements: {clean(name)}" for name in self.moved]
        return "\n".join(out)


@dataclass(frozen=True)
class Manifest:
    """What a complete load brings, writes and leaves alone, as one rank saw it.

    `provisional`: no load was seen that could say it. After a dummy first load, and of a checkpoint that was only
    routed, names and writes are what headers tell; there are none where headers could not be had.
    """

    model: str
    tensors: Mapping[str, TensorEntry]
    storages: tuple[StorageEntry, ...] = ()
    layers: tuple[LayerEntry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)  # held a second time -> first
    provisional: bool = False
    rank: int = 0
    world_size: int = 1
    generation: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    # -- questions ---------------------------------------------------------------------------------------------

    def atomic_groups(self) -> list[frozenset[str]]:
        """The smallest legal partial updates: sets of names that must be sent together, or not at all.

        A layer whose weights are processed is covered whole, and with it every layer that shares a storage. A name
        that is alone in its set may be sent alone. Names that write nothing are in none. Any union of sets is a legal
        update with `partial_update="by_layer"`.
        """
        rebuilt = {i for i, layer in enumerate(self.layers) if layer.strategy == "rebuild"}
        parent: dict[Any, Any] = {}

        def root(item: Any) -> Any:
            while parent.setdefault(item, item) != item:
                parent[item] = parent[parent[item]]
                item = parent[item]
            return item

        for name, entry in self.tensors.items():
            for number in {write.storage for write in entry.writes}:
                for layer in self.storages[number].layers:
                    if layer in rebuilt:
                        parent[root(name)] = root(layer)
        groups: dict[Any, set[str]] = {}
        for name, entry in self.tensors.items():
            if entry.writes:
                groups.setdefault(root(name), set()).add(name)
        return [frozenset(group) for group in groups.values()]

    def diff(self, other: Manifest) -> ManifestDiff:
        """What is different in `other`, taken as the later one. Regions are compared by the names of what is there."""
        mine, theirs = self.tensors, other.tensors
        both = [name for name in mine if name in theirs]
        before = {layer.path: layer.strategy for layer in self.layers}
        after = {layer.path: layer.strategy for layer in other.layers}
        strategies = [
            (path, before.get(path, "absent"), after.get(path, "absent")) for path in {**before, **after}
        ]
        return ManifestDiff(
            tuple(name for name in theirs if name not in mine),
            tuple(name for name in mine if name not in theirs),
            tuple(
                (n, str(list(mine[n].shape)), str(list(theirs[n].shape)))
                for n in both
                if mine[n].shape != theirs[n].shape
            ),
            tuple((n, mine[n].dtype, theirs[n].dtype) for n in both if mine[n].dtype != theirs[n].dtype),
            tuple(n for n in both if self._places(n) != other._places(n)),
            tuple(row for row in strategies if row[1] != row[2]),
        )

    def _places(self, name: str) -> list[Any]:
        return sorted((self.storages[w.storage].tensors[:1], w[1:]) for w in self.tensors[name].writes)

    def known(self) -> dict[str, Known]:
        """Names as `_declared.problems` takes them."""
        return {
            name: Known(
                entry.dtype, entry.shape, entry.writes,
                frozenset(d for w in entry.writes for d in self.storages[w.storage].takes),
                frozenset(self.storages[w.storage].dtype for w in entry.writes),
            )
            for name, entry in self.tensors.items()
        }  # fmt: skip

    def check(
        self, headers: Any, *, partial: str = "forbid", unexpected: str = "ignore"
    ) -> list[CompletenessError]:
        """Hold what a source says of itself against this manifest, before anything is sent.

        Args:
            headers: names -> (dtype, shape) or tensors (`source_checks.read(folder).headers`, a state dict), names
                alone, or another manifest.
            partial: forbid, by_layer or allow: what may be left out.
            unexpected: refuse or ignore names that a complete load does not have.

        Returns:
            errors (not raised): shapes, dtypes that must not be cast, missing tensors. Empty: nothing speaks against
            it. A source with names that are not known here may hold the same elements otherwise cut: then what is
            missing is not judged.

        Raises:
            ConfigError: `headers` declares no tensors, or a policy is none.
        """
        if partial not in ("forbid", "by_layer", "allow") or unexpected not in ("refuse", "ignore"):
            raise ConfigError(f"partial={clean(partial)!r}, unexpected={clean(unexpected)!r} is not legal")
        if self.provisional and not self.tensors:
            return []
        groups = self.atomic_groups() if partial == "by_layer" else []
        found = problems(
            as_headers(headers), self.known(), partial=partial, groups=groups, unexpected=unexpected, model=self.model
        )  # fmt: skip
        return [error for _, error in found]

    def __str__(self) -> str:
        strategies = [layer.strategy for layer in self.layers]
        counts = ", ".join(f"{strategies.count(s)} {s}" for s in STRATEGIES if s in strategies)
        taken = sum(bool(entry.writes) for entry in self.tensors.values())
        lines = [
            f"manifest of {clean(self.model)}, rank {self.rank} of {self.world_size}"
            + (": provisional, no real load was seen" if self.provisional else ""),
            f"  tensors      {len(self.tensors)}, of which {taken} are taken",
            f"  layers       {len(self.layers)} ({counts})",
        ]
        lines += [
            f"  not loaded   {clean(item.name)}"
            + (f" ({item.elements} of {item.of} elements)" if item.what == "tensor" else "")
            + f": {clean(item.why)}"
            for item in self.left_out
        ]
        return "\n".join(lines)

    # -- JSON --------------------------------------------------------------------------------------------------

    def to_json(self, indent: int | None = None) -> str:
        """As JSON text, which `from_json` reads."""
        return json.dumps(self.to_dict(), indent=indent, separators=None if indent else (",", ":"))

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema_version": SCHEMA_VERSION, "kind": KIND, "model": self.model, "provisional": self.provisional,
            "rank": self.rank, "world_size": self.world_size, "generation": self.generation,
            "versions": dict(self.versions), "ties": dict(self.ties),
            "layers": [[e.path, e.strategy, e.reason] for e in self.layers],
            "storages": [
                [e.dtype, e.elements, list(e.tensors), list(e.layers), list(e.takes)] for e in self.storages
            ],
            "tensors": [
                [e.name, e.dtype, list(e.shape), [[w[0], w[1], list(w[2]), list(w[3])] for w in e.writes]]
                for e in self.tensors.values()
            ],
            "left_out": [[e.what, e.name, e.why, e.elements, e.of] for e in self.left_out],
        }  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is whole or is not there.

        Raises:
            OSError: it can't be written.
        """
        target = Path(path)
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            scratch.write_text(self.to_json(), encoding="utf-8")
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read what `save` wrote.

        Raises:
            ConfigError: it is no manifest, or no file of at most 256 MiB. OSError: it can't be read.
        """
        with open(path, "rb", opener=plain_file) as file:
            text = file.read(MAX_BYTES + 1)
        return cls.from_json(text)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is no manifest, too large, inconsistent, or of a later schema.
        """
        if len(text) > MAX_BYTES:
            raise ConfigError(f"a manifest of {len(text)} bytes; at most {MAX_BYTES} are read")
        try:
            content = json.loads(text)
        except RecursionError:
            raise ConfigError("the manifest is nested too deeply") from None
        except ValueError as error:
            raise ConfigError(f"the manifest is no JSON ({type(error).__name__})") from None
        return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: Any) -> Manifest:
        """Read what `to_dict` made. Keys that are not known are ignored: a later minor version may have added them.

        Raises:
            ConfigError: as `from_json`.
        """
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise ConfigError("not a manifest of weightlife")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"schema version {clean(content.get('schema_version'))} of a manifest; {SCHEMA_VERSION} is read",
                hint="read it with the version of weightlife that wrote it",
            )
        layers = rows_of(
            content, "layers", lambda r: LayerEntry(text_of(r[0]), text_of(r[1]), text_of(r[2])), 3
        )
        storages = rows_of(content, "storages", lambda r: storage_of(r, len(layers)), 5)
        tensors = rows_of(content, "tensors", lambda r: tensor_of(r, storages), 4)
        left_out = rows_of(
            content, "left_out",
            lambda r: LeftOut(text_of(r[0]), text_of(r[1]), text_of(r[2]), natural_of(r[3]), natural_of(r[4])), 5,
        )  # fmt: skip
        if any(layer.strategy not in STRATEGIES for layer in layers):
            raise ConfigError("a manifest with a strategy that there is not")
        by_name = {entry.name: entry for entry in tensors}
        if len(by_name) != len(tensors):
            raise ConfigError("a manifest with two tensors of one name")
        return cls(
            text_of(content.get("model")), by_name, storages, layers, left_out, texts_of(content.get("ties", {})),
            content.get("provisional") is True, natural_of(content.get("rank", 0)),
            natural_of(content.get("world_size", 1)), natural_of(content.get("generation", 0)),
            texts_of(content.get("versions", {})),
        )  # fmt: skip
