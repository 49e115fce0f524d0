# SPDX-License-Identifier: Apache-2.0
"""Storages on a CPU that are put together of pages of files: the pieces of a tensor stand in it without being copied.

The experts of a layer, or the parts of a fused matrix, are tensors of their own in a checkpoint. Where a piece has the
same place within a page in its file and in the storage, its whole pages are mapped there, privately; its ends, and
pieces that lie otherwise, are copied. What nobody writes then costs no memory: 24 MiB of experts in 192 pieces 0.7 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch

from weightlife._declared import Header
from weightlife.source_checks import Stamp, stamp_of

PAGE = mmap.PAGESIZE
# Bytes of a piece below which a mapping of its own (10 us, and a kernel's record of it) is no better than a copy.
LEAST = 16 * PAGE
_FIXED = 0x10  # MAP_FIXED: the same on all architectures of Linux that PyTorch runs on


class Place(NamedTuple):
    """Where the elements of a source tensor are: file, which one that was, byte, and what its header says."""

    path: str
    stamp: Stamp
    offset: int
    header: Header


@lru_cache(maxsize=1)
def _mmap() -> ctypes._NamedFuncPointer | None:
    """The C library's `mmap`, which alone can put pages at a given address (Linux)."""
    if not os.path.isdir("/proc/self/fd"):  # noqa: PTH112 - as cheap as it gets
        return None
    try:
        found = ctypes.CDLL(None, use_errno=True).mmap
    except (AttributeError, OSError):
        return None
    found.restype = ctypes.c_void_p
    found.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    return found


def residue(places: Iterable[tuple[int, int, Place]], nbytes: int, itemsize: int) -> int | None:
    """Where in a page a storage has to begin so that most of it can be mapped; None where that is less than half.

    Args:
        places: of each piece: its byte in the storage, its bytes, and where they are.
        nbytes: of the storage.
        itemsize: bytes of an element.
    """
    if _mmap() is None:
        return None
    sizes: Counter[int] = Counter()
    for at, size, place in places:
        if size >= LEAST:
            sizes[(place.offset - at) % PAGE] += size
    for found, size in sizes.most_common():
        if found % max(itemsize, 8) == 0:
            return found if size * 2 >= nbytes else None
    return None


class Files:
    """Files that pages are taken of, open until `close`."""

    def __init__(self) -> None:
        self._open: dict[str, int | None] = {}

    def descriptor(self, place: Place) -> int | None:
        """An open file; None where it is not the one any more of which the place was said, or can't be opened."""
        if place.path not in self._open:
            self._open[place.path] = None
            with suppress(OSError):
                opened = os.open(place.path, os.O_RDONLY)
                if stamp_of(opened) == place.stamp:
                    self._open[place.path] = opened
                else:
                    os.close(opened)
        return self._open[place.path]

    def close(self) -> None:
        """Mappings stay."""
        for opened in self._open.values():
            if opened is not None:
                os.close(opened)
        self._open.clear()


class Assembled:
    """One storage, filled piece by piece.

    Args:
        nbytes: its size.
        begin: its first byte's place in a page.
        files: to take pages of.
    """

    def __init__(self, nbytes: int, begin: int, files: Files) -> None:
        self._map = mmap.mmap(-1, nbytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The storage keeps the map alive. When that goes, the range is unmapped whole, whatever lies in it.
        made = torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=begin)
        self.storage = made.untyped_storage()
        self._view = memoryview(self._map)
        self._begin, self._base, self._nbytes = begin, made.data_ptr(), nbytes
        self._files = files

    def put(self, at: int, size: int, place: Place) -> int:
        """A piece from byte `at` on, `size` bytes. No operator runs: the storage may be watched. Returns its address.

        Raises:
            OSError: the file can't be read, or lacks a part.
        """
        assert at >= 0 and at + size <= self._nbytes
        begin = self._base + at
        first, last = -(-begin // PAGE) * PAGE, (begin + size) // PAGE * PAGE
        opened = self._files.descriptor(place)
        if opened is None:
            raise OSError("a file of the source was exchanged while it was read")
        if last - first < LEAST - PAGE or not self._mapped(first, last, opened, place.offset + first - begin):
            self._read(opened, at, size, place.offset)
            return begin
        head, tail = first - begin, begin + size - last
        if head:
            self._read(opened, at, head, place.offset)
        if tail:
            self._read(opened, at + size - tail, tail, place.offset + size - tail)
        return begin

    def _read(self, opened: int, at: int, size: int, offset: int) -> None:
        into = self._view[self._begin + at : self._begin + at + size]
        while into:
            count = os.preadv(opened, [into], offset)
            if not count:
                raise OSError("a file of the source ends early")
            into, offset = into[count:], offset + count

    @staticmethod
    def _mapped(first: int, last: int, opened: int, offset: int) -> bool:
        call = _mmap()
        if call is None or offset % PAGE:
            return False
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        got = call(first, last - first, protection, mmap.MAP_PRIVATE | _FIXED, opened, offset)
        return bool(got == first)  # else (too many mappings) everything is as it was


__all__ = ["Assembled", "Files", "Place", "residue"]
