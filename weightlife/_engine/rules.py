# SPDX-License-Identifier: Apache-2.0
"""What the first load taught about its loader: for which source names the writes are known before they happen.

A rule is no prediction. The first load saw the loader of a name make views of parameters and copy the tensor that it
was given into them, and do nothing else: nothing computed, nothing read, no value looked at. Such code has only its
arguments to go by. With the same loader, name, shape, dtype and layout it writes the same elements again, and need
not be watched while it does. `trust.py` says when a session believes that, and how it finds out that it was wrong.
"""

from __future__ import annotations

import ctypes
import types
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weightlife._engine.ledger import Region
from weightlife._engine.skeleton import Skeleton

if TYPE_CHECKING:
    from weightlife._engine.manifest import Manifest, Received

# Bytes at each end of a region that are looked at to tell whether it was written: a value that stands there by
# chance must not be met in the life of any model (one in 2**64).
PROBE_BYTES = 8
# Storages of so many regions at the most are marked word by word, 0.4 us each; an indexed write of all takes 15 us.
FEW = 16
# Of both ends of a tensor. Parts of one weight that begin and end with the same 64 bytes are constants.
SAMPLE_BYTES = 64

_ATOMS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_COPY = torch.ops.aten.copy_.default
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Kind:
    """What is loaded by the same lines: source names that differ in numbers only, with tensors of one shape and dtype."""

    __slots__ = ("call", "like", "numbers", "seen")

    def __init__(self) -> None:
        self.call = 0  # the load call that `seen` is of
        self.seen = 0  # items in it, up to two
        self.like: tuple[Any, ...] | None = (
            None  # shape, dtype and bytes of a tensor: one object, kept by all
        )
        self.numbers: dict[Any, int] = {}  # sizes of the storages that were written -> number of the kind


def kind_of(kinds: dict[Any, Kind], name: str, tensor: Any) -> Kind:
    """The kind of an item, made where it is the first of it."""
    # Through bytes, which lose their digits in a third of the time that a string takes.
    rest = name.encode("utf-8", "surrogatepass").translate(None, b"0123456789")
    key = (rest, tensor.dtype, tensor.shape) if isinstance(tensor, torch.Tensor) else rest
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = Kind()
    return kind


class _UnknownError(Exception):
    """Something whose identity can't be told later."""


def identity(call: Callable[..., Any]) -> Any:
    """What a loader is, comparable with that of a later call: code, objects that it is bound to, and arguments.

    None where that can't be told. Objects are held weakly, and by identity.
    """
    try:
        return _identity(call, 0)
    except _UnknownError:
        return None


def _identity(value: Any, depth: int) -> Any:
    if depth > 6:
        raise _UnknownError
    if isinstance(value, _ATOMS):
        return (type(value), value)
    if isinstance(value, types.MethodType):
        return ("method", _identity(value.__func__, depth + 1), _identity(value.__self__, depth + 1))
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        try:
            inside = [cell.cell_contents for cell in cells]
        except ValueError:  # a cell that was never filled
            raise _UnknownError from None
        defaults = (value.__defaults__ or (), value.__kwdefaults__ or {})
        return ("function", value.__code__, _identity([inside, *defaults], depth + 1))
    if isinstance(value, partial):
        return ("partial", _identity([value.func, value.args, value.keywords], depth + 1))
    if type(value) in (list, tuple):
        return (type(value), tuple(_identity(part, depth + 1) for part in value))
    if type(value) is dict:
        return (
            dict,
            tuple((_identity(key, depth + 1), _identity(part, depth + 1)) for key, part in value.items()),
        )
    try:
        return ("object", weakref.ref(value))
    except TypeError:
        raise _UnknownError from None


def same_loader(learned: Any, now: Any) -> bool:
    """Whether two identities are known, and of one loader. An object that is gone is the same as nothing."""
    if learned is None or now is None:
        return False
    try:
        return _same(learned, now)
    except Exception:  # noqa: BLE001 - values whose comparison raises: not known to be the same
        return False


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, weakref.ref) or isinstance(b, weakref.ref):
        return type(a) is type(b) and a() is not None and a() is b()
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, types.CodeType):
        return a is b
    return type(a) is type(b) and bool(a == b)


def copies_own(func: Any, args: tuple[Any, ...], tensor: torch.Tensor | None) -> bool:
    """Whether an operation is `copy_` from the memory of the source tensor that is being loaded."""
    if tensor is None or func is not _COPY:
        return False
    given = args[1]
    if given is tensor:
        return True
    if type(given) not in _PLAIN or type(tensor) not in _PLAIN or given.device != tensor.device:
        return False
    start = tensor.data_ptr()
    return bool(start <= given.data_ptr() < start + tensor.numel() * tensor.element_size())


class Learner:
    """Watches the items of a first load, and marks the names whose writes need not be watched again."""

    def __init__(self, skeleton: Skeleton, ranks: int = 1) -> None:
        self.storages = skeleton.storages
        self.ranks = ranks
        self.samples: dict[int, int] = {}  # storage -> of what came for it, where several ranks get something
        self.kinds: dict[Any, Kind] = {}
        self._numbers = 0
        self.odd: set[int] = set()  # kinds of which some item did more than copy
        self.loader: Any = None
        self.calls = 0
        self.whole = True  # every call read its source to the end

    def call(self, load: Callable[..., Any]) -> None:
        """A load call begins."""
        now = identity(load)
        if self.calls and not same_loader(self.loader, now):
            now = None  # two loaders: which of them loads a name is not known
        self.loader = now
        self.calls += 1

    def end(self, entry: Received, kind: Kind, tensor: Any, plain: bool) -> None:
        """An item is done. `plain`: only views were made, and all that was written was copied from its tensor."""
        # Names that differ in numbers only may lead to other parameters (w1 and w2 of an expert): by their sizes.
        if entry.part is not None:
            sizes: Any = self.storages[entry.number].nbytes
        else:
            sizes = tuple([self.storages[storage].nbytes for storage, _ in entry.writes])
        number = kind.numbers.get(sizes)
        if number is None:
            number = kind.numbers[sizes] = self._numbers
            self._numbers += 1
        entry.kind = number
        if not plain or not entry.writes or type(tensor) is not torch.Tensor or not tensor.is_contiguous():
            self.odd.add(number)
        elif self.ranks > 1:
            found = _sample(tensor)
            for storage, _ in entry.writes:
                before = self.samples.get(storage, 0)
                self.samples[storage] = -1 if found < 0 or before < 0 else (before + found) & 0xFFFFFFFF

    def again(self, entry: Received | None) -> None:
        """A name came a second time: which of its writes are whose is not known."""
        if entry is not None:
            self.odd.add(entry.kind)


def _sample(tensor: torch.Tensor) -> int:
    """A few bytes of what came, as a number; -1 where looking would wait for a device.

    Some sources bring each rank its own part under one name and shape. Their ends show that, for nearly nothing.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or not size:
        return -1
    start, length = tensor.data_ptr(), min(size, SAMPLE_BYTES)
    return zlib.crc32(ctypes.string_at(start, length) + ctypes.string_at(start + size - length, length))


@dataclass
class Rules:
    """The names of one manifest whose writes are known, by storage, and what invalidates them."""

    loader: Any
    regions: dict[int, list[Region]] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    off: str = ""  # why they are no longer believed
    # Storage -> how many names write to it, where each has a rule and one region, and nothing else is written there.
    alone: dict[int, int] = field(default_factory=dict)
    _probes: dict[int, torch.Tensor] = field(default_factory=dict)
    _ends: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def ends(self, number: int, itemsize: int) -> tuple[int, ...]:
        """Byte offsets of the words at both ends of each region, on a storage of few regions; () on others."""
        known = self._ends.get(number)
        if known is None:
            regions = self.regions[number]
            ends: list[int] = []
            if len(regions) <= FEW:
                index = probe_index(regions, itemsize)
                ends = (index.view(2 * len(index), -1)[:, 0] * itemsize).tolist()
            known = self._ends[number] = tuple(ends)
        return known

    def probes(self, number: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Element indices of both ends of each region on a storage, shape (regions, elements looked at)."""
        known = self._probes.get(number)
        if known is None:
            known = self._probes[number] = probe_index(self.regions[number], dtype.itemsize).to(device)
        return known


def probe_index(regions: list[Region], itemsize: int) -> torch.Tensor:
    """The elements at both ends of each region that make up `PROBE_BYTES`; shape (regions, 2 x elements), int64."""
    width = PROBE_BYTES // itemsize
    first = np.fromiter((part.offset for part in regions), np.int64, len(regions))
    span = np.fromiter(
        (sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True)) for part in regions),
        np.int64,
        len(regions),
    )
    steps = np.arange(width, dtype=np.int64)
    ends = np.stack([first, first + span - (width - 1)], axis=1)
    return torch.from_numpy((ends[:, :, None] + steps).reshape(len(regions), -1))


def can_probe(part: Region, itemsize: int) -> bool:
    """Whether both ends of a region are runs of neighbouring elements that are long enough to be looked at."""
    return (
        itemsize in (1, 2, 4, 8)
        and bool(part.shape)
        and part.strides[-1] == 1
        and part.shape[-1] * itemsize >= PROBE_BYTES
    )


def rules_of(
    manifest: Manifest, skeleton: Skeleton, learner: Learner, untrusted: Iterable[int]
) -> Rules | None:
    """The rules of a first load, or None where it taught none. Marks the names of the manifest.

    Left out: kinds of which some item did anything but copy, elements that several names write, storages that are
    filled by repetition, read first or touched out of turn, and regions too small to tell whether they were written.

    Args:
        manifest: complete, not provisional.
        skeleton: the constructor's storages.
        learner: what the load did.
        untrusted: storages that the ledger can't follow.
    """
    if manifest.provisional or manifest.custom or manifest.late is None or not learner.whole:
        return None
    if learner.loader is None:
        return None
    closed = manifest.late | manifest.spread | manifest.reads_first | set(untrusted)
    out = Rules(learner.loader, samples=learner.samples)
    none: Counter[Region] = Counter()
    for entry in manifest.names.values():
        if entry.kind in learner.odd:
            entry.kind = -1
        if entry.kind < 0:
            continue
        for number, part in entry.writes:
            once = manifest.expected.get(number, none).get(part) == 1
            if number in closed or not once or not can_probe(part, skeleton.storages[number].dtype.itemsize):
                entry.kind = -1
                break
        else:
            for number, part in entry.writes:
                out.regions.setdefault(number, []).append(part)
    single = Counter(
        [entry.number for entry in manifest.names.values() if entry.kind >= 0 and entry.part is not None]
    )
    out.alone = {n: count for n, count in single.items() if count == len(manifest.expected[n])}
    return out if out.regions else None


__all__ = [
    "Kind", "Learner", "Rules", "can_probe", "copies_own", "identity", "kind_of", "probe_index", "rules_of", "same_loader",
]  # fmt: skip
