# SPDX-License-Identifier: Apache-2.0
"""Triton: one launch copies, digests and checks the bytes of many tensors. Importing this imports triton.

The launch is driven by tables (`weightlife.kernels.plan`), so that neither the number of tensors nor their types or
sizes lead to another launch or another compilation. Each program takes chunks in turn. Whole blocks of 4,096 bytes at
addresses that are multiples of 16 are moved as 128-bit vectors without masks; what is left below a block, and what
lies at odd addresses, goes by words or bytes. Offsets are 64-bit throughout.

The references beside it: `digest.numpy_total`, `plan.nonfinite_words`, `copy_reference.copy_many`.
`TRITON_INTERPRET=1`, set before triton is imported, runs the same kernel on a CPU; the tests do that.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from weightlife.kernels import digest, plan

WORDS = tl.constexpr(digest.WORDS)
BLOCK = tl.constexpr(digest.BLOCK)
GOLDEN = tl.constexpr(digest.GOLDEN)
MIX_1 = tl.constexpr(digest.MIX_1)
MIX_2 = tl.constexpr(digest.MIX_2)
FIELDS = tl.constexpr(plan.SEGMENT_FIELDS)

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
UNROLL = 2  # blocks a step: 8 KiB, four 16-byte loads in flight for each of 128 threads
NUM_WARPS = 4
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _digested(words, key, block, COUNT: tl.constexpr):
    """Sum of the mixed blocks of `words`, uint32 (COUNT, 1024), of which the first is number `block` (int64)."""
    x = words ^ (words >> 8)
    x = x ^ (x >> 16)
    sums = tl.sum(x.to(tl.uint64) * key.to(tl.uint64), axis=1)
    number = (block + 1 + tl.arange(0, COUNT)).to(tl.uint64)
    return tl.sum(_mix(sums + number * GOLDEN), axis=0)


@triton.jit
def _nonfinite(words, even, odd, want_even, want_odd, low, high):
    """Whether any of `words`, uint32 (n, 1024), holds a NaN or an infinity: int32. See `plan.kinds`."""
    upper = (tl.arange(0, WORDS) % 2 == 1)[None, :]
    x = (words & tl.where(upper, odd, even)) ^ tl.where(upper, want_odd, want_even)
    found = (x - low) & (x ^ 0xFFFFFFFF) & high
    return tl.max(tl.max((found != 0).to(tl.int32), axis=1), axis=0)


@triton.jit
def _whole_blocks(src, dst, COUNT: tl.constexpr, COPY: tl.constexpr, VECTORS: tl.constexpr):
    """Load COUNT whole blocks at the address `src` (int64), store them at `dst`: uint32 (COUNT, 1024)."""
    offsets = (tl.arange(0, COUNT) * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    source = src.to(tl.pointer_type(tl.uint32))
    target = dst.to(tl.pointer_type(tl.uint32))
    if VECTORS:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    words = tl.load(source + offsets)
    if COPY:
        tl.store(target + offsets, words)
    return words


@triton.jit
def _rest(src, dst, length, COPY: tl.constexpr, WIDE: tl.constexpr):
    """As `_whole_blocks` for one block of which `length` bytes are there: uint32 (1, 1024), the others zero."""
    lane = tl.arange(0, WORDS)
    source = src.to(tl.pointer_type(tl.uint8))
    target = dst.to(tl.pointer_type(tl.uint8))
    words = tl.zeros([WORDS], tl.uint32)
    first = length * 0  # where single bytes begin
    if WIDE:
        first = length // 4 * 4
        there = lane * 4 < first
        wide = source.to(tl.pointer_type(tl.uint32), bitcast=True)
        words = tl.load(wide + lane, mask=there, other=0)
        if COPY:
            tl.store(target.to(tl.pointer_type(tl.uint32), bitcast=True) + lane, words, mask=there)
    for part in tl.static_range(4):
        place = lane * 4 + part
        there = (place >= first) & (place < length)
        byte = tl.load(source + place, mask=there, other=0)
        if COPY:
            tl.store(target + place, byte, mask=there)
        words = words | (byte.to(tl.uint32) << (8 * part))
    return words[None, :]


@triton.jit(do_not_specialize=["n_chunks", "chunk"])
def one_pass(
    chunks, n_chunks, chunk, segments, key_table, kinds, totals, flags,
    UNROLL: tl.constexpr, COPY: tl.constexpr, DIGEST: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """The kernel: every chunk of every segment, copied, digested and checked as the flags say.

    `chunks` and `segments` are the tables of `plan.tables`, int64, `n_chunks` rows in the former; `key_table` is
    `digest.keys()`, the bits as int32, (1024,); `kinds` is `plan.kinds()` as int64, (n, 6). The digest's total is
    added to `totals[out]` (int64, modulo 2**64, in any order); `flags[out]` (int32) becomes 1 where a NaN or an
    infinity was met. `chunk` is in bytes, `UNROLL` in blocks a step. Only the flags make another compilation.
    """
    # Two-dimensional and of 32 bits, as the words are: in another layout it would pass through shared memory each time.
    key = tl.load(key_table + tl.arange(0, WORDS)[None, :]).to(tl.uint32, bitcast=True)
    for c in range(tl.program_id(0), n_chunks, tl.num_programs(0)):
        row = segments + tl.load(chunks + 2 * c) * FIELDS
        start = tl.load(chunks + 2 * c + 1)
        src = tl.load(row) + start
        dst = tl.load(row + 1) + start
        length = tl.minimum(tl.load(row + 2) - start, chunk)
        width = tl.load(row + 3)
        out = tl.load(row + 4)
        pattern = kinds + tl.load(row + 5) * 6
        even = tl.load(pattern).to(tl.uint32)
        odd = tl.load(pattern + 1).to(tl.uint32)
        want_even = tl.load(pattern + 2).to(tl.uint32)
        want_odd = tl.load(pattern + 3).to(tl.uint32)
        low = tl.load(pattern + 4).to(tl.uint32)
        high = tl.load(pattern + 5).to(tl.uint32)
        block = start // BLOCK
        total = tl.zeros([], tl.uint64)
        found = tl.zeros([], tl.int32)
        done = length * 0
        if width == 16:
            for _ in range(0, length // (BLOCK * UNROLL)):
                words = _whole_blocks(src + done, dst + done, UNROLL, COPY, True)
                if DIGEST:
                    total += _digested(words, key, block + done // BLOCK, UNROLL)
                if FINITE:
                    found |= _nonfinite(words, even, odd, want_even, want_odd, low, high)
                done += BLOCK * UNROLL
        if width >= 4:
            while length - done >= BLOCK:
                words = _whole_blocks(src + done, dst + done, 1, COPY, False)
                if DIGEST:
                    total += _digested(words, key, block + done // BLOCK, 1)
                if FINITE:
                    found |= _nonfinite(words, even, odd, want_even, want_odd, low, high)
                done += BLOCK
            if done < length:
                words = _rest(src + done, dst + done, length - done, COPY, True)
                if DIGEST:
                    total += _digested(words, key, block + done // BLOCK, 1)
                if FINITE:
                    found |= _nonfinite(words, even, odd, want_even, want_odd, low, high)
        else:
            while done < length:
                words = _rest(src + done, dst + done, tl.minimum(length - done, BLOCK), COPY, False)
                if DIGEST:
                    total += _digested(words, key, block + done // BLOCK, 1)
                if FINITE:
                    found |= _nonfinite(words, even, odd, want_even, want_odd, low, high)
                done += BLOCK
        if DIGEST:
            tl.atomic_add(totals + out, total.to(tl.int64), sem="relaxed")
        if FINITE:
            tl.store(flags + out, found, mask=found != 0)


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.from_numpy(digest.keys().view("int32")).to(device),
        torch.from_numpy(plan.kinds().astype("int64")).to(device),
    )


@functools.cache
def _programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 3  # interpreted: enough that a program takes more than one chunk
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * PROGRAMS_PER_PROCESSOR


_captured: list[Pass] = []
"""Passes that a CUDA graph has recorded. A replay reads their tables: they live as long as the process."""


class Pass:
    """A pass that may run many times: its tables are on the device, and a run is one launch.

    Args:
        tables: what to do.
        device: where the memory is.
        copy, digest, finite: what to do with it.

    Raises:
        RuntimeError: a graph is being captured. The tables are sent from ordinary memory, which a capture can't
            record: make the pass before, and run it within.
    """

    def __init__(
        self, tables: plan.Tables, device: torch.device, *, copy: bool, digest: bool, finite: bool
    ) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a pass can't be made while a graph is captured: make it before, run it within"
            )
        self.device = device
        self.flags = {"COPY": copy, "DIGEST": digest, "FINITE": finite}
        self.chunk = tables.chunk
        self.n_chunks = len(tables.chunks)
        self.nbytes = tables.nbytes
        self._segments = torch.from_numpy(tables.segments).to(device)
        self._chunks = torch.from_numpy(tables.chunks).to(device)
        self._totals = torch.zeros(tables.outs, dtype=torch.int64, device=device)
        self._found = torch.zeros(tables.outs, dtype=torch.int32, device=device)
        self._constants = _constants(device)
        self._held: Any = None

    def hold(self, tensors: Any) -> None:
        """Keep what the tables point to alive as long as the pass."""
        self._held = tensors

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch. Nothing is waited for.

        Returns:
            The totals (int64) and the flags (int32) of the results, on the device. The next run uses the same memory.
        """
        if self.flags["DIGEST"]:
            self._totals.zero_()
        if self.flags["FINITE"]:
            self._found.zero_()
        if self.n_chunks:
            with _on(self.device):
                one_pass[(min(self.n_chunks, _programs(self.device)),)](
                    self._chunks, self.n_chunks, self.chunk, self._segments, *self._constants, self._totals, self._found,
                    UNROLL=UNROLL, num_warps=NUM_WARPS, **self.flags,
                )  # fmt: skip
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                _captured.append(self)
        return self._totals, self._found


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()


def copy_pass(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, digest: bool = False, finite: bool = False
) -> Pass:
    """A pass that copies (destination, source) pairs. `backends.copy_pairs` checks what is assumed here.

    Args:
        pairs: on one device; each of equal dtype, shape and strides, both dense; nothing that is written overlaps
            anything else.
        digest: of each source, in the same pass.
        finite: look for NaN and infinity in each source, in the same pass.
    """
    dst = [to.data_ptr() for to, _ in pairs]
    src = [of.data_ptr() for _, of in pairs]
    sizes = [of.numel() * of.element_size() for _, of in pairs]
    kinds = [plan.kind_of(of.dtype) for _, of in pairs] if finite else None
    made = Pass(
        plan.tables(src, dst, sizes, kinds, peel=not (digest or finite)), pairs[0][0].device,
        copy=True, digest=digest, finite=finite,
    )  # fmt: skip
    made.hold([(to.untyped_storage(), of.untyped_storage()) for to, of in pairs])
    return made


def read_pass(tensors: Sequence[torch.Tensor], *, digest: bool = True, finite: bool = False) -> Pass:
    """A pass that only reads contiguous tensors of one device."""
    kinds = [plan.kind_of(item.dtype) for item in tensors] if finite else None
    sizes = [item.numel() * item.element_size() for item in tensors]
    made = Pass(
        plan.tables([item.data_ptr() for item in tensors], None, sizes, kinds), tensors[0].device,
        copy=False, digest=digest, finite=finite,
    )  # fmt: skip
    made.hold([item.untyped_storage() for item in tensors])
    return made


def totals(data: Sequence[torch.Tensor]) -> torch.Tensor:
    """As `digest.device_totals`: one launch."""
    return read_pass(data).run()[0]
