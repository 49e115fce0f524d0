# SPDX-License-Identifier: Apache-2.0
"""A 64-bit digest of bytes that depends on where each byte stands: its definition, and four ways to compute it.

**Definition** (``ALGORITHM``, ``weightlife-64-1``). The bytes are read as little-endian 32-bit words ``w``, the last
one filled up with zeros, and the words as blocks of 1,024 (4,096 bytes), the last one likewise. All arithmetic is that
of unsigned integers, modulo 2**64 unless another width is named::

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    k[j]   = (mix((j + 1) * 0x9E3779B97F4A7C15) >> 32) | 1          for j in 0..1023: odd, 32 bits, all different
    g(w)   : w ^= w >> 8;  w ^= w >> 16                             32 bits; every input has its own output
    s[b]   = sum over j of g(w[1024 * b + j]) * k[j]
    total  = sum over b of mix(s[b] + (b + 1) * 0x9E3779B97F4A7C15)
    digest = mix(total + (nbytes + 1) * 0xD1B54A32D192ED03)

``mix`` is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014); it
is a bijection of 64-bit numbers.

**What it finds.** *Always*: a change within one aligned 32-bit word, so every flipped bit; two different words of one
block exchanged (the difference is a product of two non-zero numbers below 2**32, so it is no multiple of 2**64); bytes
added or removed at the end, zeros too (``nbytes`` enters last, through a bijection, and a block of zeros adds a term
of its own). *But for one case in about 2**60*: anything else that happens by accident: blocks exchanged, data shifted,
a part of another tensor, rows for columns. The worst pattern that is known is a change of nothing but the highest bits
of many words, where 2**57 takes that place. It is no protection against somebody who *wants* two tensors to agree.

**How it may be computed.** ``total`` is a sum over blocks, and integer sums have no order: any split at multiples of
4,096 bytes, on any number of threads or programs, gives the same value (``total_of(part, first_block)``; add, then
``finish``). ``Digester`` takes pieces of any length, in order. Data types and shapes do not enter: a tensor counts as
the bytes of its contiguous form.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALGORITHM = "weightlife-64-1"
BLOCK = 4096  # bytes
WORDS = BLOCK // 4
GOLDEN = 0x9E3779B97F4A7C15
LENGTH = 0xD1B54A32D192ED03
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1

Words = Callable[["NDArray[np.uint32]", int], int]
"""Sum of mixed blocks of whole blocks of words, (words, number of the first block) -> total."""


def mix(value: int) -> int:
    """The bijection of the definition, on a Python integer."""
    value = (value ^ (value >> 30)) * MIX_1 & MASK
    value = (value ^ (value >> 27)) * MIX_2 & MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The 64-bit pattern as the signed integer that torch stores."""
    return value - (1 << 64) if value >> 63 else value


def finish(total: int, nbytes: int) -> int:
    """The digest of `nbytes` bytes whose blocks sum up to `total` (any multiple of 2**64 may be added to it)."""
    return mix((total + (nbytes + 1) * LENGTH) & MASK)


@functools.cache
def keys() -> NDArray[np.uint32]:
    """``k`` of the definition, shape (1024,)."""
    return np.array([(mix((j + 1) * GOLDEN & MASK) >> 32) | 1 for j in range(WORDS)], dtype=np.uint32)


# -- numpy: the reference ---------------------------------------------------------------------------------------


def numpy_total(words: NDArray[np.uint32], first_block: int) -> int:
    """The reference: `words` holds whole blocks, of which the first has the number `first_block`."""
    step, total = 64 * WORDS, 0  # 256 KiB at a time stay in the cache
    for start in range(0, len(words), step):
        x = words[start : start + step].reshape(-1, WORDS)
        x = x ^ (x >> np.uint32(8))
        x ^= x >> np.uint32(16)
        sums = np.sum(x.astype(np.uint64) * keys(), axis=1, dtype=np.uint64)
        number = np.arange(1, len(x) + 1, dtype=np.uint64) + np.uint64(first_block + start // WORDS)
        z = sums + number * np.uint64(GOLDEN)
        z ^= z >> np.uint64(30)
        z *= np.uint64(MIX_1)
        z ^= z >> np.uint64(27)
        z *= np.uint64(MIX_2)
        z ^= z >> np.uint64(31)
        total += int(np.sum(z, dtype=np.uint64))
    return total & MASK


# -- torch: any device, no kernel --------------------------------------------------------------------------------


@functools.cache
def _torch_keys(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(keys().astype(np.int64)).to(device)


def torch_total(data: torch.Tensor, first_block: int = 0) -> torch.Tensor:
    """The total in plain torch operations, without waiting for the device.

    Args:
        data: bytes, shape (n,), uint8, contiguous, at any address; a rest below a block is filled up with zeros.
        first_block: the number of the first block.

    Returns:
        int64, shape (), on the device of `data`: the bit pattern of the total.
    """
    # Temporaries are 64-bit, twice the data. 1 MiB stays in a CPU's cache; a device wants fewer launches.
    step = (1 << 20) if data.device.type == "cpu" else (64 << 20)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), step):
        part = data[start : start + step]
        if part.numel() % BLOCK or part.data_ptr() % 4:
            whole = torch.zeros(-(-part.numel() // BLOCK) * BLOCK, dtype=torch.uint8, device=data.device)
            whole[: part.numel()] = part
            part = whole
        x = part.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF).view(-1, WORDS)
        x ^= x >> 8
        x ^= x >> 16
        sums = (x * _torch_keys(data.device)).sum(dim=1)  # int64 wraps round as uint64 does
        number = torch.arange(sums.numel(), device=data.device) + (first_block + start // BLOCK + 1)
        z = sums + number * signed(GOLDEN)
        z = (z ^ ((z >> 30) & (MASK >> 30))) * signed(MIX_1)
        z = (z ^ ((z >> 27) & (MASK >> 27))) * signed(MIX_2)
        total += (z ^ ((z >> 31) & (MASK >> 31))).sum()
    return total


# -- choosing ------------------------------------------------------------------------------------------------------


@functools.cache
def words_total() -> Words:
    """The fastest implementation for the memory of a CPU: numba's where that is installed, else numpy's."""
    try:
        compiled: Words = importlib.import_module("weightlife.kernels.digest_numba").total
    except ImportError:
        return numpy_total
    return compiled


def total_of(data: Any, first_block: int = 0) -> int:
    """The sum of mixed blocks of some bytes on a CPU.

    Args:
        data: anything with the buffer protocol (bytes, a contiguous array); a rest below a block is filled up with
            zeros, so all parts but the last must be multiples of `BLOCK` bytes long.
        first_block: the number of its first block.
    """
    flat = np.frombuffer(data, dtype=np.uint8)
    whole = flat.size // BLOCK * BLOCK
    compute = words_total()
    total = compute(flat[:whole].view("<u4"), first_block) if whole else 0
    if whole < flat.size:
        rest = np.zeros(BLOCK, dtype=np.uint8)
        rest[: flat.size - whole] = flat[whole:]
        total += compute(rest.view("<u4"), first_block + whole // BLOCK)
    return total & MASK


def digest_bytes(data: Any) -> int:
    """The digest of a buffer (bytes, memoryview, a contiguous array)."""
    return finish(total_of(data), np.frombuffer(data, dtype=np.uint8).size)


class Digester:
    """The digest of a stream: pieces of any length, in order.

    Keeps less than a block of what came.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._total = 0
        self._blocks = 0
        self.nbytes = 0

    def update(self, piece: Any) -> None:
        """The next bytes: a buffer, or a tensor on any device (which is waited for)."""
        if isinstance(piece, torch.Tensor):
            piece = bytes_of(piece).cpu().numpy()
        flat = np.frombuffer(piece, dtype=np.uint8)
        self.nbytes += flat.size
        if self._rest:
            missing = BLOCK - len(self._rest)
            self._rest += flat[:missing].tobytes()
            flat = flat[missing:]
            if len(self._rest) < BLOCK:
                return
            self._take(self._rest)
            self._rest = bytearray()
        whole = flat.size // BLOCK * BLOCK
        if whole:
            self._take(flat[:whole])
        self._rest += flat[whole:].tobytes()

    def _take(self, data: Any) -> None:
        self._total += total_of(data, self._blocks)
        self._blocks += len(data) // BLOCK

    def value(self) -> int:
        """The digest of what came so far; more may follow."""
        total = self._total + (total_of(self._rest, self._blocks) if self._rest else 0)
        return finish(total, self.nbytes)


# -- tensors -------------------------------------------------------------------------------------------------------


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's contiguous form as bytes, shape (n,), uint8; a copy only where it is not contiguous.

    Raises:
        ValueError: it has no bytes of its own to look at: meta, sparse, quantised by torch, or a wrapper.
    """
    if type(tensor) is not torch.Tensor and not isinstance(tensor, torch.nn.Parameter):
        if hasattr(type(tensor), "__tensor_flatten__"):
            raise ValueError(
                f"a {type(tensor).__name__} wraps other tensors: take the digest of each of them"
            )
        tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(f"a tensor on {tensor.device} with layout {tensor.layout} has no bytes to look at")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():  # lazily negated: the bytes in memory are not its values
        plain = plain.resolve_conj().resolve_neg()
    if plain.element_size() == 1:  # 4-bit floats can't be copied as what they are
        plain = plain.view(torch.uint8)
    # Not `view(-1)`: the stride of a dimension of size 1 may be anything, and a view of bytes wants it to be 1.
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)


class Pending:
    """Digests of tensors that may still be computed on a device. Use `pending(...)`.

    Nothing is waited for until `values()`, so that a stream of tensors is not stopped at each of them.
    """

    def __init__(self) -> None:
        self._nbytes: list[int] = []
        self._totals: list[int | tuple[torch.Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._nbytes)

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the digests of some tensors. Their memory is read in the order of the device's current stream."""
        start = len(self._nbytes)
        by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            data = bytes_of(tensor)
            self._nbytes.append(data.numel())
            self._totals.append(0)
            if data.device.type == "cpu":
                self._totals[start + index] = total_of(data.numpy()) if data.numel() else 0
            else:
                by_device.setdefault(data.device, []).append((start + index, data))
        for device, items in by_device.items():
            totals = device_totals([data for _, data in items], device)
            for place, (index, _) in enumerate(items):
                self._totals[index] = (totals, place)

    def values(self) -> list[int]:
        """The digests, in the order in which the tensors were added."""
        fetched: dict[int, list[int]] = {}
        out = []
        for total, nbytes in zip(self._totals, self._nbytes, strict=True):
            if isinstance(total, int):
                out.append(finish(total, nbytes))
                continue
            tensor, place = total
            if id(tensor) not in fetched:
                fetched[id(tensor)] = tensor.tolist()
            out.append(finish(fetched[id(tensor)][place], nbytes))
        return out


def device_totals(data: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Totals of tensors of bytes on a device that is no CPU: one launch with Triton, else torch operations.

    Returns:
        int64, shape (len(data),), on the device.
    """
    from weightlife.kernels import backends

    if backends.triton_works(device):
        from weightlife.kernels import fused

        return fused.totals(data)
    return torch.stack([torch_total(item) for item in data])


def digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The digest of each tensor's contiguous bytes, on whatever device it lives.

    Raises:
        ValueError: a tensor has no bytes (meta, sparse).
    """
    pending = Pending()
    pending.add(tensors)
    return pending.values()
