# SPDX-License-Identifier: Apache-2.0
"""What an operator does to its arguments, read from its schema: what it writes, and whether it reads that first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

COPY_OPERATORS = frozenset({"aten::copy_", "aten::_foreach_copy_"})
# With a true `accumulate`, their fourth argument, these add.
_ADDS_BY_FLAG = frozenset({"aten::index_put_", "aten::_index_put_impl_", "aten::put_"})
# In-place operations that do not read what they write. Everything else accumulates.
OVERWRITING = COPY_OPERATORS | {
    "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::index_put_",
    "aten::_index_put_impl_", "aten::index_copy_", "aten::scatter_", "aten::masked_fill_", "aten::index_fill_",
    "aten::exponential_", "aten::masked_scatter_", "aten::put_",
}  # fmt: skip


@dataclass(eq=False, repr=False)
class Signature:
    """Which arguments of an operator are written, and whether it only makes views."""

    writes: frozenset[int]
    keyword_writes: frozenset[str]
    passive: bool
    copies: bool  # `copy_`
    name: str
    out: bool  # of an `out=` overload
    replaces: bool  # `set_`


# By identity: hashing an operator is a Python call of a microsecond. The operator itself is kept alive beside it.
SIGNATURES: dict[int, tuple[Signature, Any]] = {}


def signature_of(func: Any) -> Signature:
    known = SIGNATURES.get(id(func))
    if known is not None:
        return known[0]
    arguments = func._schema.arguments
    writes = {i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write}
    aliasing = any(a.alias_info is not None for a in arguments)
    names = frozenset(arguments[i].name for i in writes)
    # `set_` writes no memory: it gives the tensor another storage, which is noticed by comparing storages.
    name = func._schema.name
    replaces = name == "aten::set_"
    made = Signature(
        writes=frozenset(writes),
        keyword_writes=names,
        passive=(aliasing and not writes) or replaces,
        copies=name == "aten::copy_",
        replaces=replaces,
        name=name,
        out="out" in func._schema.overload_name,
    )
    SIGNATURES[id(func)] = (made, func)
    return made


def accumulates(func: Any, args: tuple[Any, ...], storage: int) -> bool:
    """Whether a writing operation also reads what it writes.

    An `out=` operation does so only if its destination is among its inputs (`where(mask, dst, src, out=dst)`).
    """
    if func is None:
        return False
    signature = signature_of(func)
    if signature.out:
        return any(
            isinstance(value, torch.Tensor)
            and not value.is_meta
            and value.untyped_storage()._cdata == storage
            for value in args
        )
    if signature.name in _ADDS_BY_FLAG and len(args) > 3 and args[3]:
        return True
    return signature.name not in OVERWRITING or "reduce" in func._schema.overload_name


def spreads(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a copy would repeat its source to fill its destination (shapes that don't fit at all are torch's)."""
    if source.numel() == destination.numel() or source.ndim > destination.ndim:
        return False
    sizes = destination.shape[destination.ndim - source.ndim :]
    return all(have in (1, want) for have, want in zip(source.shape, sizes, strict=True))


__all__ = ["COPY_OPERATORS", "SIGNATURES", "Signature", "accumulates", "signature_of", "spreads"]
