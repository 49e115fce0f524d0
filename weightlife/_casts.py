# SPDX-License-Identifier: Apache-2.0
"""Which casts a load may do on the way from a sender's tensor to a weight. Pure; dtype names without `torch.`.

What the first load did for a region is legal for that region ever after: a cold load does the same. For everything
else, and after a dummy start, this table decides. Its idea: a float may become another float, since that is what a
cold load of the same values does and every trainer with 32-bit masters relies on it; data whose meaning is not its
value (packed integers, 8-bit float storage, scales as bytes) may not become anything else, since `copy_` converts it
in silence into numbers that mean something different.
"""

from __future__ import annotations

__all__ = ["EIGHT_BIT_FLOATS", "FLOATS", "INTEGERS", "allowed"]

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
EIGHT_BIT_FLOATS = frozenset({
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
})  # fmt: skip
# Bytes of an element. Equal widths keep their bits (`copy_` wraps), so packed data survives a change of sign.
INTEGERS = {
    "bool": 0, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
}  # fmt: skip


def allowed(source: str, destination: str) -> bool:
    r"""Whether a copy may convert `source` into `destination` though the first load did not do so.

    | from \ into           | same  | wider float | narrower float | 8-bit float | integer      |
    |-----------------------|-------|-------------|----------------|-------------|--------------|
    | float (16 to 64 bits) | yes   | yes         | yes            | no          | no           |
    | 8-bit float           | yes   | no          | no             | no          | no           |
    | integer, bool         | yes   | no          | no             | no          | not narrower |
    """
    if source == destination:
        return True
    if source in FLOATS and destination in FLOATS:
        return True
    if source in INTEGERS and destination in INTEGERS:
        return INTEGERS[source] <= INTEGERS[destination]
    return False
