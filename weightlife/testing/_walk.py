# SPDX-License-Identifier: Apache-2.0
"""Digests of every tensor that a model can reach, by attribute path.

The forward pass reads more than parameters: plain attributes, tensors in lists and dictionaries, kernel
objects below a quant method, cells of closures. The walk is breadth first over sorted names, so that a
path depends on the shape of the object graph alone, never on the order in which attributes were set.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any, Final

import torch
from torch import nn

SKIPPED_NAMES: Final = frozenset({"kv_cache", "punica_wrapper", "punica_wrapper_mapping"})
"""Attributes that hold what requests left behind, not weights."""

_LEAVES: Final = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    logging.Logger,
    threading.Thread,
    PurePath,
)

# Objects of these packages hold no weights, and some of them reach half of the interpreter.
_FOREIGN: Final = (
    "torch._dynamo",
    "torch._inductor",
    "torch.fx",
    "torch.distributed",
    "weightlife",
    "logging",
)

_MAX_DEPTH: Final = 40


def digests(model: nn.Module) -> dict[str, Any]:
    """Hash what `model` reaches.

    Returns plain data:
        tensors: path -> "dtype|shape|stride|hash", one entry for every path to a tensor.
        aliases: path -> the first path (in walk order) whose tensor shares the same storage, for paths
            that are not the first themselves.
        nan: paths of floating tensors that hold a NaN.
    """
    tensors: dict[str, str] = {}
    aliases: dict[str, str] = {}
    nan: list[str] = []
    first_of: dict[int, str] = {}
    known: dict[tuple[Any, ...], tuple[str, bool]] = {}
    alive: list[torch.Tensor] = []  # temporaries must not die: their memory would be used again
    for path, tensor in walk(model):
        key = _identity(tensor)
        if key not in known:
            alive.append(tensor)
            known[key] = _digest(tensor)
        tensors[path], has_nan = known[key]
        if has_nan:
            nan.append(path)
        pointer = _storage_pointer(tensor)
        if pointer:
            first = first_of.setdefault(pointer, path)
            if first != path:
                aliases[path] = first
    return {"tensors": tensors, "aliases": aliases, "nan": nan}


def walk(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor reachable from `root`; every object is entered once."""
    queue: deque[tuple[str, Any, int]] = deque([("", root, 0)])
    entered: set[int] = set()
    keep: list[Any] = []  # bound methods and dictionary views are made afresh by each access
    while queue:
        path, owner, depth = queue.popleft()
        if id(owner) in entered or depth > _MAX_DEPTH:
            continue
        entered.add(id(owner))
        keep.append(owner)
        native = hasattr(type(owner), "__del__")
        for step, value in _children(owner):
            where = f"{path}{step}" if path else step.removeprefix(".")
            if isinstance(value, torch.Tensor):
                # An owner with a destructor frees what its integer tensors point to: they hold
                # addresses, which differ from process to process.
                if not (native and value.dtype == torch.int64):
                    yield where, value
                if vars(value):
                    queue.append((f"{where}~", _Attributes(value), depth + 1))
            elif not isinstance(value, _LEAVES) and not _foreign(value):
                queue.append((where, value, depth + 1))


class _Attributes:
    """Stands for the attributes of a tensor, which is itself a leaf (`weight~.scale`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dict__.update({k: v for k, v in vars(tensor).items() if not k.startswith("_")})


def _foreign(value: Any) -> bool:
    module = getattr(type(value), "__module__", None)
    return isinstance(module, str) and module.startswith(_FOREIGN)


def _children(owner: Any) -> Iterator[tuple[str, Any]]:
    """The parts of `owner` with the text that follows its path, in an order fixed by names."""
    if isinstance(owner, nn.Module):
        state = dict(vars(owner))
        for group in ("_parameters", "_buffers", "_modules"):
            yield from _named(state.pop(group, {}))
        yield from _named({k: v for k, v in state.items() if not k.endswith("_hooks")})
    elif isinstance(owner, Mapping):
        for key in sorted(owner, key=repr):
            yield (
                f"[{key!r}]" if isinstance(key, str | int | tuple) else f"[{type(key).__name__}]",
                owner[key],
            )
    elif isinstance(owner, list | tuple | deque):
        for index, item in enumerate(owner):
            yield f"[{index}]", item
    elif isinstance(owner, AbstractSet):
        return  # unordered: no path of a member would be stable
    elif isinstance(owner, types.MethodType):
        yield ".__self__", owner.__self__
        yield ".__func__", owner.__func__
    elif isinstance(owner, functools.partial):
        yield ".func", owner.func
        yield ".args", owner.args
        yield ".keywords", owner.keywords
    elif isinstance(owner, types.FunctionType):
        yield from _function(owner)
    else:
        yield from _named(getattr(owner, "__dict__", {}))
        yield from _slots(owner)


def _named(items: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in sorted(items):
        if name not in SKIPPED_NAMES:
            yield f".{name}", items[name]


def _function(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    assert isinstance(function, types.FunctionType)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"<{name}>", cell.cell_contents
        except ValueError:  # an empty cell: the name is not bound yet
            continue
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from _named(vars(function))


def _slots(owner: Any) -> Iterator[tuple[str, Any]]:
    for kind in type(owner).__mro__:
        for name, member in sorted(vars(kind).items()):
            if inspect.ismemberdescriptor(member) and name not in SKIPPED_NAMES:
                try:
                    yield f".{name}", member.__get__(owner)
                except AttributeError:
                    continue  # a slot that was never set


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same view of the same memory."""
    pointer = _storage_pointer(tensor)
    if not pointer:
        return (id(tensor),)
    return (pointer, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _storage_pointer(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    return tensor.untyped_storage().data_ptr()


def _digest(tensor: torch.Tensor) -> tuple[str, bool]:
    """`dtype|shape|stride|hash` of one tensor, and whether it holds a NaN."""
    data = tensor.detach()
    if data.layout is torch.strided:
        layout = str(tuple(data.stride()))
    else:  # an opaque layout (oneDNN): compare what it stands for
        layout = str(data.layout)
        data = data.to_dense()
    head = f"{data.dtype}|{tuple(data.shape)}|{layout}"
    if data.is_meta:
        return f"{head}|meta", False
    data = data.cpu().contiguous()
    # By way of numpy the bytes are read in place, not copied.
    raw = memoryview(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else b""
    value = hashlib.blake2b(raw, digest_size=12).hexdigest()
    has_nan = data.is_floating_point() and bool(data.isnan().any())
    return f"{head}|{value}", has_nan
