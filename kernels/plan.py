# SPDX-License-Identifier: Apache-2.0
"""Tables that describe one pass over the bytes of many tensors, made with numpy; nothing here needs Triton.

A *segment* is a range of bytes that is read and, if the pass copies, written: ``(src, dst, nbytes, width, out, kind)``,
addresses as integers. `width` tells how it may be accessed: 16 (both addresses are multiples of 16), 4, or 1. A
*chunk* is the part of a segment that one program works on at a time: ``(segment, first byte)``; chunks begin at
multiples of 4,096 bytes, which is what the digest wants.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from weightlife.kernels.digest import BLOCK

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEGMENT_FIELDS = 6
# A program's share at a time. 64 KiB keep 132 multiprocessors evenly busy down to some 100 MB in all; beyond 4 GiB
# larger ones keep the table of chunks (16 bytes each, sent to the device with each new plan) below 1 MiB for 16 GiB.
SMALL_CHUNK = 16 * BLOCK
LARGE_CHUNK = 64 * BLOCK
LARGE_TOTAL = 4 << 30

# How to find NaN and infinity in 32-bit words: fields of `low`'s width are masked, compared with `want` by exclusive
# or, and a field that became zero is found by borrowing: ((x - low) & ~x & high) != 0 exactly if some field is zero.
# Even and odd words differ where a value has two words: the exponent of a 64-bit float is in the upper one.
_NEVER = (0, 0, 1, 1, 1, 1 << 31)
_HALF, _BYTE = (0x00010001, 0x80008000), (0x01010101, 0x80808080)
_KINDS: dict[str, tuple[int, int, int, int, int, int]] = {
    # mask and wanted value of even and odd words, low, high
    "float32": (0x7F800000, 0x7F800000, 0x7F800000, 0x7F800000, 1, 1 << 31),
    "complex64": (0x7F800000, 0x7F800000, 0x7F800000, 0x7F800000, 1, 1 << 31),
    "float64": (0, 0x7FF00000, 1, 0x7FF00000, 1, 1 << 31),
    "complex128": (0, 0x7FF00000, 1, 0x7FF00000, 1, 1 << 31),
    "bfloat16": (0x7F807F80, 0x7F807F80, 0x7F807F80, 0x7F807F80, *_HALF),
    "float16": (0x7C007C00, 0x7C007C00, 0x7C007C00, 0x7C007C00, *_HALF),
    "complex32": (0x7C007C00, 0x7C007C00, 0x7C007C00, 0x7C007C00, *_HALF),
    # OCP 8-bit formats (specification of 2023, table 1): e5m2 as half precision; e4m3 has NaN alone, all ones.
    "float8_e5m2": (0x7C7C7C7C, 0x7C7C7C7C, 0x7C7C7C7C, 0x7C7C7C7C, *_BYTE),
    "float8_e4m3fn": (0x7F7F7F7F, 0x7F7F7F7F, 0x7F7F7F7F, 0x7F7F7F7F, *_BYTE),
    # The "fnuz" variants have no infinity, and one NaN: the code of minus zero.
    "float8_e4m3fnuz": (0xFFFFFFFF, 0xFFFFFFFF, 0x80808080, 0x80808080, *_BYTE),
    "float8_e5m2fnuz": (0xFFFFFFFF, 0xFFFFFFFF, 0x80808080, 0x80808080, *_BYTE),
    # Scales of microscaling formats: an exponent alone, all ones is NaN.
    "float8_e8m0fnu": (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, *_BYTE),
}


@functools.cache
def _kind_numbers() -> dict[torch.dtype, int]:
    names = enumerate(_KINDS, start=1)
    return {getattr(torch, name): number for number, name in names if hasattr(torch, name)}


def kind_of(dtype: torch.dtype) -> int:
    """The row of `kinds()` for a dtype; 0, which finds nothing, for types without NaN."""
    return _kind_numbers().get(dtype, 0)


@functools.cache
def kinds() -> NDArray[np.uint32]:
    """The table of patterns, shape (kinds, 6)."""
    return np.array([_NEVER, *_KINDS.values()], dtype=np.uint32)


def nonfinite_words(words: NDArray[np.uint32], dtype: torch.dtype) -> NDArray[np.bool_]:
    """The reference of the check: which words (of memory that begins with an element) hold a NaN or an infinity."""
    even, odd, want_even, want_odd, low, high = kinds()[kind_of(dtype)]
    parity = np.arange(words.size) % 2 == 1
    x = (words & np.where(parity, odd, even)) ^ np.where(parity, want_odd, want_even)
    return ((x - low) & ~x & high) != 0


@dataclass(frozen=True)
class Tables:
    """What a launch needs, as int64: `segments` (n, 6), `chunks` (m, 2); `chunk` in bytes; `outs` results."""

    segments: NDArray[np.int64]
    chunks: NDArray[np.int64]
    chunk: int
    outs: int

    @property
    def nbytes(self) -> int:
        """Bytes that the pass reads."""
        return int(self.segments[:, 2].sum())


def tables(
    src: Sequence[int],
    dst: Sequence[int] | None,
    nbytes: Sequence[int],
    kinds_of: Sequence[int] | None = None,
    peel: bool = False,
    chunk: int | None = None,
) -> Tables:
    """Lay out a pass.

    Args:
        src: addresses to read.
        dst: addresses to write, or None where nothing is written.
        nbytes: as many lengths; 0 is legal and costs nothing.
        kinds_of: `kind_of` of each, for the check of finiteness.
        peel: cut what lies equally far from a 16-byte boundary on both sides into a head of single bytes and a body
            of whole vectors. Only for a plain copy: digest and check count words from the start of the tensor.
        chunk: bytes a chunk, a multiple of 4,096; by default chosen by the total.
    """
    source = np.asarray(src, dtype=np.int64)
    target = source if dst is None else np.asarray(dst, dtype=np.int64)
    length = np.asarray(nbytes, dtype=np.int64)
    out = np.arange(len(source), dtype=np.int64)
    kind = np.zeros_like(out) if kinds_of is None else np.asarray(kinds_of, dtype=np.int64)
    if peel:
        head = np.where((source - target) % 16 == 0, np.minimum(-source % 16, length), 0)
        cut = head > 0
        source, target = (np.concatenate([a + head, a[cut]]) for a in (source, target))
        length = np.concatenate([length - head, head[cut]])
        out, kind = (np.concatenate([a, a[cut]]) for a in (out, kind))
    both = source | target
    width = np.where(both % 16 == 0, 16, np.where(both % 4 == 0, 4, 1))
    segments = np.stack([source, target, length, width, out, kind], axis=1)
    if chunk is None:
        chunk = LARGE_CHUNK if int(length.sum()) >= LARGE_TOTAL else SMALL_CHUNK
    count = -(-length // chunk)
    number = np.repeat(np.arange(len(segments)), count)
    within = np.arange(len(number)) - np.repeat(np.cumsum(count) - count, count)
    chunks = np.stack([number, within * chunk], axis=1)
    return Tables(segments, chunks, chunk, len(src))
