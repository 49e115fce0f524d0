# SPDX-License-Identifier: Apache-2.0
"""Which way many tensors are copied: `triton` (one launch), `foreach` (torch's fused list copy) or `copy` (a loop).

`copy_pairs` gives each pair the fastest way that is exact for it, whatever was chosen: a kernel sees nothing but
dense ranges of one device that overlap with nothing. On a CPU `foreach` took 0.10 ms for 400 small tensors and
`copy` 0.26; from 64 KiB a tensor on both are the memory's speed. The checks take 2 us a pair.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

BACKENDS = ("auto", "triton", "foreach", "copy")

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Copied:
    """How many pairs went which way. `same`: nothing to do (empty, the same memory, a copy of an earlier pair)."""

    triton: int = 0
    foreach: int = 0
    copy: int = 0
    same: int = 0
    nbytes: int = 0


def triton_works(device: torch.device) -> bool:
    """Whether the kernels run on a device and give what the reference gives: tried once a process and device.

    False while a graph is captured: neither a trial nor a new table can be recorded. On a CPU the kernels run where
    Triton's interpreter was asked for (`TRITON_INTERPRET=1`), which is for tests.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    return find_spec("triton") is not None and _trial(device)


@functools.cache
def _trial(device: torch.device) -> bool:
    try:
        from weightlife.kernels import digest, fused

        if device.type != "cuda" and not (device.type == "cpu" and fused.INTERPRETED):
            return False
        source = torch.arange(3 * digest.BLOCK + 7, device=device).to(torch.uint8)
        want = digest.digest_bytes(source.cpu().numpy())
        # All compilations that an update may need: a compiler that fails in the middle of a commit comes too late.
        works = digest.finish(int(fused.totals([source])[0]), source.numel()) == want
        for digested in (False, True):
            target = torch.zeros_like(source)
            total = int(fused.copy_pass([(target, source)], digest=digested).run()[0][0])
            works &= bool(torch.equal(source, target))
            works &= not digested or digest.finish(total, source.numel()) == want
        why = "" if works else "wrong results"
    except Exception as error:  # noqa: BLE001 - whatever stops a compiler here, the other backends are exact too
        works, why = False, f"{type(error).__name__}: {error}"
    if not works:
        logging.getLogger("weightlife").warning("Triton kernels are not used on %s: %.300s", device, why)
    return works


def chosen(wanted: str, device: torch.device) -> str:
    """The backend for a device.

    Raises:
        ValueError: an unknown name, or `triton` where it does not work.
    """
    if wanted not in BACKENDS:
        raise ValueError(f"no backend {wanted!r}: {', '.join(BACKENDS)}")
    if wanted == "triton" and not triton_works(device):
        raise ValueError(f"the Triton kernels don't work on {device}")
    if wanted != "auto":
        return wanted
    return "triton" if device.type == "cuda" and triton_works(device) else "foreach"


class _Facts:
    """What is asked of each pair, once: such questions are most of the host's time.

    Lists of numbers, not one object a pair: many small objects wake the garbage collector, which in a process with
    torch loaded took ten times as long as the questions.

    Raises:
        ValueError: a copy would broadcast or convert, or a tensor has no memory.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.to_start: list[int] = []
        self.to_end: list[int] = []
        self.of_start: list[int] = []
        self.of_end: list[int] = []
        self.flat: list[bool] = []  # both contiguous, and equal bytes mean equal values
        self.to_device: list[int] = []  # -1 is the CPU; numbers compare four times as fast as devices
        self.of_device: list[int] = []
        self.nbytes = 0
        for index, (to, of) in enumerate(pairs):
            if (
                to.shape != of.shape or to.dtype is not of.dtype or to.is_meta or of.is_meta
                or to.layout is not torch.strided or of.layout is not torch.strided
            ):  # fmt: skip
                raise ValueError(f"pair {index}: {_why_not(to, of)}")
            nbytes, start, begin = to.nbytes, to.data_ptr(), of.data_ptr()
            contiguous = to.is_contiguous() and of.is_contiguous()
            self.nbytes += nbytes
            self.to_start.append(start)
            self.of_start.append(begin)
            self.to_end.append(start + nbytes if contiguous else start + _reach(to))
            self.of_end.append(begin + nbytes if contiguous else begin + _reach(of))
            self.flat.append(contiguous and _same_bits(to, of))
            self.to_device.append(to.get_device())
            self.of_device.append(of.get_device())

    def overlap(self, wanted: list[int]) -> bool:
        """Whether anything that is written overlaps anything else among the pairs `wanted`.

        Spans are compared, so interleaved views count as overlapping: they are merely copied one by one. Devices
        share no addresses, but may share numbers.
        """
        where, whence = np.array(self.to_device)[wanted], np.array(self.of_device)[wanted]
        to_start, to_end = np.array(self.to_start)[wanted], np.array(self.to_end)[wanted]
        of_start, of_end = np.array(self.of_start)[wanted], np.array(self.of_end)[wanted]
        for device in {*where.tolist()}:
            starts, ends = to_start[where == device], to_end[where == device]
            order = np.argsort(starts, kind="stable")
            starts, ends = starts[order], ends[order]
            if (starts[1:] < ends[:-1]).any():
                return True
            begins, stops = of_start[whence == device], of_end[whence == device]
            # Targets are apart: only the last one that begins before a source ends can touch it.
            place = np.searchsorted(starts, stops) - 1
            if ((place >= 0) & (ends[np.maximum(place, 0)] > begins)).any():
                return True
        return False

    def apart(self, index: int) -> bool:
        """Whether a pair's own source and destination share no byte."""
        return (
            self.to_end[index] <= self.of_start[index]
            or self.of_end[index] <= self.to_start[index]
            or self.to_device[index] != self.of_device[index]
        )


def _why_not(to: torch.Tensor, of: torch.Tensor) -> str:
    if to.shape != of.shape:
        return f"destination shape {tuple(to.shape)}, source {tuple(of.shape)}"
    if to.dtype is not of.dtype:
        return f"destination dtype {to.dtype}, source {of.dtype}"
    bad = to if to.is_meta or to.layout is not torch.strided else of
    return f"a tensor on {bad.device}, layout {bad.layout}, has no bytes"


def _same_bits(to: torch.Tensor, of: torch.Tensor) -> bool:
    """Whether neither or both are lazily negated or conjugated: else a copy of bytes is not a copy of values."""
    return to.is_neg() is of.is_neg() and (not to.is_complex() or to.is_conj() is of.is_conj())


def copy_pairs(pairs: Sequence[Pair], backend: str = "auto") -> Copied:
    """Copy each (destination, source). All checks come before the first byte is written.

    Args:
        pairs: of equal shape and dtype, any strides and devices. The result is that of copying one after the other,
            each source taken whole before its destination is written, also where memory overlaps.
        backend: one of `BACKENDS`.

    Raises:
        ValueError: a pair's shapes or dtypes differ, a tensor has no memory, no such backend. Nothing was written.
    """
    if backend not in BACKENDS:
        raise ValueError(f"no backend {backend!r}: {', '.join(BACKENDS)}")
    facts = _Facts(pairs)
    done = Copied(nbytes=facts.nbytes)
    wanted: list[int] = []
    seen: set[tuple[int, int, int]] = set()
    for index, flat in enumerate(facts.flat):
        if facts.to_start[index] == facts.to_end[index]:
            continue
        if flat:
            key = (facts.to_start[index], facts.of_start[index], facts.to_end[index])
            if key in seen or key[0] == key[1]:
                continue
            seen.add(key)
        wanted.append(index)
    with torch.no_grad():
        if wanted and facts.overlap(wanted):
            # In order, and all of them: what was taken for a repeat may have been written in between.
            for index, (to, of) in enumerate(pairs):
                to.copy_(of if facts.apart(index) else of.clone())
            done.copy = len(pairs)
            return done
        done.same = len(pairs) - len(wanted)
        by_device: dict[int, list[int]] = {}
        for index in wanted:
            device = facts.to_device[index]
            if device == facts.of_device[index] and (facts.flat[index] or _same_bits(*pairs[index])):
                by_device.setdefault(device, []).append(index)
            else:
                to, of = pairs[index]
                to.copy_(of)
                done.copy += 1
        for indices in by_device.values():
            way = _within(backend, pairs[indices[0]][0].device)
            _copy_group(pairs, indices, facts.flat, way, done)
    return done


def _within(backend: str, device: torch.device) -> str:
    """The backend for one device's pairs: a model on a GPU keeps tensors on the CPU too, whatever was asked for."""
    if backend == "triton":
        return "triton" if triton_works(device) else "foreach"
    return chosen(backend, device)


def _copy_group(
    pairs: Sequence[Pair], indices: list[int], flat: list[bool], backend: str, done: Copied
) -> None:
    """Copy some of the pairs, all of one device, none of which overlap."""
    if backend == "triton":
        ranges: list[Pair] = []
        others: list[int] = []
        for index in indices:
            to, of = pairs[index]
            if flat[index] or (to.stride() == of.stride() and _dense(to)):
                ranges.append(pairs[index])
            else:
                others.append(index)
        if ranges:
            from weightlife.kernels import fused

            fused.copy_pass(ranges).run()
            done.triton += len(ranges)
        indices = others
    if backend == "foreach":
        # Grouped by dtype: one odd tensor in a list sends all of it down the slow path.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in indices:
            by_dtype.setdefault(pairs[index][0].dtype, []).append(index)
        for items in by_dtype.values():
            torch._foreach_copy_([pairs[i][0] for i in items], [pairs[i][1] for i in items])
        done.foreach += len(indices)
        return
    for index in indices:
        to, of = pairs[index]
        to.copy_(of)
    done.copy += len(indices)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill one range of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != reach:
                return False
            reach *= size
    return True


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()
