# SPDX-License-Identifier: Apache-2.0
"""Tables of digests: what a sender had, what a receiver got, what a model holds. Needs torch and numpy alone.

The sender's side, in a trainer::

    from weightlife import digests

    table = digests.digest_table(model.state_dict())
    json.dump(table, file)                     # or send it along

and the receiver's: ``weightlife.session(model, expected=table)``, or ``weightlife.expect(llm, table)`` before any
update of vLLM's. Nothing is committed unless every tensor of the table arrived with the bytes that the sender had.

A table is plain data: ``schema_version``, ``algorithm`` (the definition is in ``weightlife.kernels.digest``) and
``tensors``, from each name to ``shape`` (a list), ``dtype`` (``"bfloat16"``) and ``digest`` (16 hexadecimal digits of
the contiguous bytes, in the machine's byte order, which has to be little-endian).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weightlife.errors import ConfigError, clean
from weightlife.kernels import digest as kernel

if TYPE_CHECKING:
    import torch

__all__ = ["SCHEMA_VERSION", "Difference", "across_ranks", "check_table", "compare", "digest_table"]

SCHEMA_VERSION = 1

Table = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One name on which two tables differ.

    ``what`` is ``missing`` (only in the first), ``unexpected`` (only in the second), ``shape``, ``dtype``, ``digest``,
    or ``ranks`` (see ``across_ranks``); ``expected`` and ``found`` are that property in the first and in the second.
    """

    name: str
    what: str
    expected: str = ""
    found: str = ""
    rank: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank} " if self.rank else ""
        if self.what in ("missing", "unexpected"):
            return f"{where}{clean(self.name)}: {self.what}"
        return f"{where}{clean(self.name)}: {self.what} {clean(self.found)}, expected {clean(self.expected)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def entry(tensor: torch.Tensor, digest: int) -> dict[str, Any]:
    """What a table says of one tensor."""
    return {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "digest": f"{digest:016x}",
    }


def digest_table(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], **more: Any
) -> Table:
    """The table of some tensors, on whatever devices they are.

    Args:
        named_tensors: a mapping or a list is digested in one launch a device. Of any other iterable each tensor is
            digested when it is pulled, in the order of the current stream: its buffer may be used again at once.
        more: further plain data for the table, ``source="step 1200"`` say.

    Raises:
        ConfigError: a name came twice, or a tensor has no bytes of its own (meta, sparse, a DTensor).
    """
    pending, order = kernel.Pending(), {}
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    batch = list(pairs) if isinstance(named_tensors, (Mapping, Sequence)) else None
    for name, tensor in pairs if batch is None else batch:
        if name in order:
            raise ConfigError("a tensor is named twice", tensors=[name], hint="give each tensor one name")
        order[name] = entry(tensor, 0)
        if batch is None:
            _add(pending, [(name, tensor)])
    if batch is not None:
        _add(pending, batch)
    for item, value in zip(order.values(), pending.values(), strict=True):
        item["digest"] = f"{value:016x}"
    return {
        "schema_version": SCHEMA_VERSION, "algorithm": kernel.ALGORITHM, **more, "tensors": dict(order),
    }  # fmt: skip


def _add(pending: kernel.Pending, named: Sequence[tuple[str, torch.Tensor]]) -> None:
    try:
        pending.add([tensor for _, tensor in named])
    except ValueError as error:
        bad = [name for name, tensor in named if not _has_bytes(tensor)]
        raise ConfigError(
            str(error), tensors=bad, hint="give whole tensors with memory of their own"
        ) from error


def _has_bytes(tensor: torch.Tensor) -> bool:
    try:
        kernel.bytes_of(tensor)
    except ValueError:
        return False
    return True


def check_table(table: Any) -> Table:
    """The table, if it is one that this version reads.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"a table of digests is a mapping, not {type(table).__name__}")
    version = table.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"this table has schema version {clean(version)}, and this weightlife reads {SCHEMA_VERSION}",
            hint="make it with the same version of weightlife",
        )
    if table.get("algorithm") != kernel.ALGORITHM:
        raise ConfigError(
            f"this table's digests are {clean(table.get('algorithm'))}, and this weightlife computes {kernel.ALGORITHM}",
            hint="make it with the same version of weightlife",
        )
    tensors = table.get("tensors")
    if not isinstance(tensors, Mapping):
        raise ConfigError("a table of digests lacks its tensors")
    for name, item in tensors.items():
        if (
            not isinstance(name, str)
            or not isinstance(item, Mapping)
            or not isinstance(item.get("shape"), (list, tuple))
            or not isinstance(item.get("dtype"), str)
            or not isinstance(item.get("digest"), str)
        ):
            raise ConfigError(
                "an entry is no {shape, dtype, digest}", tensors=[str(name)], hint="use digests.digest_table"
            )
    return dict(table)


def differences(name: str, wanted: Mapping[str, Any], got: Mapping[str, Any]) -> list[Difference]:
    """How two entries of one name differ: the first of shape, dtype, digest."""
    if list(wanted["shape"]) != list(got["shape"]):
        return [Difference(name, "shape", str(list(wanted["shape"])), str(list(got["shape"])))]
    for what in ("dtype", "digest"):
        if wanted[what] != got[what]:
            return [Difference(name, what, wanted[what], got[what])]
    return []


def compare(a: Any, b: Any) -> list[Difference]:
    """What differs, in the order of `a`; empty where nothing does.

    Args:
        a: a table, or a list of them, one a rank, as ``weightlife.digest`` returns.
        b: the same of what is compared with it.

    Raises:
        ConfigError: not tables, or not as many of them.
    """
    if isinstance(a, list) or isinstance(b, list):
        if not (isinstance(a, list) and isinstance(b, list)) or len(a) != len(b):
            raise ConfigError("lists of tables are compared rank by rank, and these are not of one length")
        return [
            Difference(d.name, d.what, d.expected, d.found, rank)
            for rank, (one, other) in enumerate(zip(a, b, strict=True))
            for d in compare(one, other)
        ]
    mine, theirs = check_table(a)["tensors"], check_table(b)["tensors"]
    out: list[Difference] = []
    for name, item in mine.items():
        out += differences(name, item, theirs[name]) if name in theirs else [Difference(name, "missing")]
    return out + [Difference(name, "unexpected") for name in theirs if name not in mine]


def across_ranks(tables: Sequence[Table], baseline: Sequence[Table]) -> list[Difference]:
    """Names whose digests agree between ranks where they did not, or no longer agree.

    A replicated tensor (a norm) is equal on all ranks, the shards of a sharded one are not. Which is which is learned
    from `baseline`, the tables of a state that is known to be good: the first load's.

    Raises:
        ConfigError: not tables.
    """
    now, then = ([check_table(table)["tensors"] for table in side] for side in (tables, baseline))
    out = []
    for name in now[0] if now else {}:
        if not all(name in side for side in (*now, *then)):
            continue
        is_equal, was_equal = (len({side[name]["digest"] for side in sides}) == 1 for sides in (now, then))
        if is_equal != was_equal:
            words = {True: "equal on all ranks", False: "different on some rank"}
            out.append(Difference(name, "ranks", words[was_equal], words[is_equal]))
    return out
