# SPDX-License-Identifier: Apache-2.0
"""What the constructor made, remembered without keeping its memory alive.

A skeleton is taken once, right after construction (generation S0), and holds for every tensor its geometry, class
and attributes, and which storage it is a view of. Two tensors on one storage share a storage number: ties, alias
buffers and views survive as such when placeholders are made. Values are kept only where a load does not write them
(padding, sentinels, computed constants): they are what a cold load would find there.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightlife._engine import slots

# Below this size a clone costs less than thinking about it: 64 KiB x 800 tensors is 50 MiB at the very most, and
# norms, scales, zero points and sentinels are all smaller than it.
SMALL_BYTES = 64 * 1024


DTYPE_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
"""Dtypes as manifests write them. Asked for every tensor of a load: one string for each, made once."""

INFERENCE = "made under torch.inference_mode(), and can't be written outside of it: use torch.no_grad()"


@dataclass(frozen=True)
class Token:
    """Stands in a remembered state for a tensor: its number in the skeleton."""

    index: int


@dataclass(eq=False, repr=False)
class Composite:
    """Stands for an immutable container that holds tensors: it is made anew, with placeholders in it."""

    make: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]
    kind: type

    @staticmethod
    def split(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
        """The parts of an immutable container, and how to make another of it; None for anything else."""
        if isinstance(value, tuple):
            cls = type(value)
            return list(value), (lambda parts: cls(*parts)) if hasattr(cls, "_fields") else cls
        if isinstance(value, types.MethodType) and isinstance(value.__self__, torch.Tensor):
            function = value.__func__
            return [value.__self__], lambda parts: types.MethodType(function, parts[0])
        if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, torch.Tensor):
            name = value.__name__
            return [value.__self__], lambda parts: getattr(parts[0], name)
        if isinstance(value, functools.partial):
            names, count = list(value.keywords), len(value.args)
            parts = [value.func, *value.args, *value.keywords.values()]
            return parts, lambda new: functools.partial(
                new[0], *new[1 : 1 + count], **dict(zip(names, new[1 + count :], strict=True))
            )
        return None


@dataclass(eq=False, repr=False)
class TensorSkeleton:
    """One tensor as the constructor made it. Shape, stride and offset in elements of its dtype."""

    ref: weakref.ref[torch.Tensor]
    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cls: type
    attributes: dict[str, Any]
    requires_grad: bool
    path: str


@dataclass(eq=False, repr=False)
class StorageSkeleton:
    """One storage as the constructor made it: size in bytes, device, and where views of it sit."""

    nbytes: int
    device: torch.device
    dtype: torch.dtype  # of the first tensor seen on it; regions count elements of this type
    weak: StorageWeakRef | None
    tensors: tuple[int, ...] = ()
    layers: frozenset[int] = frozenset()  # ids of the modules with a slot on it
    # Values that a load never writes: (flat element index, values) or the whole storage.
    kept_index: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    constant: float | int | None = None  # every element equal at construction (large storages, dummy loads)

    @property
    def numel(self) -> int:
        """Elements of `dtype`."""
        return self.nbytes // self.dtype.itemsize


# Values of exactly these types neither are tensors nor immutable containers of them. A built-in method may be a tensor's.
_PLAIN_VALUES = (slots.LEAVES - {types.BuiltinMethodType}) | {dict, list, set, frozenset, types.FunctionType}

_wraps: Callable[[object], bool] = is_traceable_wrapper_subclass
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def storage_key(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's storage while it lives, or None where there is none to speak of."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    # Of a class that wraps, the outer storage has no memory.
    if type(tensor) not in _PLAIN and (is_uninitialized(tensor) or _wraps(tensor)):
        return None
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Lazy parameters have neither shape nor storage yet."""
    return isinstance(tensor, UninitializedTensorMixin)


def dtype_name(tensor: torch.Tensor) -> str:
    """A dtype as manifests write it: "bfloat16"."""
    known = DTYPE_NAMES.get(tensor.dtype)
    return str(tensor.dtype).removeprefix("torch.") if known is None else known


def own_memory(tensor: torch.Tensor, sources: set[int]) -> None:
    """Copy what a loader took from its sender as it is: the sender may reuse it, and a commit must not write into it.

    Without `sources` nobody knows what is the sender's: the loader was given no stream, but a state dict, say.
    """
    if not is_inference(tensor) and (not sources or storage_key(tensor) in sources):
        with torch.inference_mode(False):
            tensor.data = tensor.detach().clone()


def is_inference(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made under inference mode: nothing outside of it may write it."""
    return not is_uninitialized(tensor) and tensor.is_inference()


def _has_memory(storage: torch.UntypedStorage) -> bool:
    try:
        return storage.nbytes() == 0 or storage.data_ptr() != 0
    except RuntimeError:  # "invalid python storage"
        return False


def flat(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of a tensor as one flat tensor of `dtype` (a view, no copy)."""
    storage = tensor.untyped_storage()
    out = torch.empty(0, dtype=dtype, device=tensor.device)
    out.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
    return out


def view_on(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any
) -> torch.Tensor:
    """A plain tensor with the given geometry on a storage."""
    out = torch.empty(0, dtype=dtype, device=storage.device)
    out.set_(storage, offset, tuple(shape), tuple(stride))
    return out


def copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A tensor's attributes, its containers copied one level: loaders append to lists that hang on a parameter."""
    return {
        name: type(value)(value) if type(value) in (list, dict, set) else value
        for name, value in attributes.items()
    }


def tokens(value: Any) -> Iterator[Token]:
    """The tokens in a remembered slot value."""
    if isinstance(value, Token):
        yield value
    elif isinstance(value, Composite):
        for part in value.parts:
            yield from tokens(part)


class Skeleton:
    """The constructor's state of a model: holders, slots (tensors as tokens), tensors, storages."""

    def __init__(self, model: torch.nn.Module, skip: Any, provisional: bool) -> None:
        self.tensors: list[TensorSkeleton] = []
        self.storages: list[StorageSkeleton] = []
        self._by_tensor: dict[int, int] = {}
        self._by_storage: dict[int, int] = {}
        self.unsupported: dict[str, str] = {}
        # Constructors run under `with device:`, a mode that is asked for every `tensor.shape`: 8 of 15 ms for 340 tensors.
        with torch._C.DisableTorchFunction():
            self._take(model, skip, provisional)

    def _take(self, model: torch.nn.Module, skip: Any, provisional: bool) -> None:
        holders, states = slots.walk(model, skip)
        self.holders = holders
        self.states: dict[int, slots.State] = {
            ident: {
                key: value if type(value) in _PLAIN_VALUES else self._tokenise(value, holders[ident], key)
                for key, value in state.items()
            }
            for ident, state in states.items()
        }
        # An immutable container is part of the slot that holds it; kept as a holder it would keep its tensors.
        for ident in [i for i, h in holders.items() if Composite.split(h.obj) is not None]:
            if any(isinstance(value, (Token, Composite)) for value in self.states[ident].values()):
                del self.holders[ident], self.states[ident]
        self._keep_constructor_values(provisional)

    def _tokenise(self, value: Any, holder: slots.Holder, key: slots.Key, depth: int = 0) -> Any:
        if not isinstance(value, torch.Tensor):
            split = Composite.split(value) if depth < slots.MAX_DEPTH else None
            if split is not None:
                parts = tuple(self._tokenise(part, holder, key, depth + 1) for part in split[0])
                if any(isinstance(part, (Token, Composite)) for part in parts):
                    return Composite(split[1], parts, type(value))
            return value
        if key[0] not in ("param", "buffer") and value.is_meta:
            return value  # a plain attribute that holds nothing: a traced graph's constants are such
        path = slots.step(holder.path, key)
        index = self._by_tensor.get(id(value))
        if index is None:
            index = self._add(value, path)
            if index is None:
                self.unsupported[path] = (
                    INFERENCE if is_inference(value) else "a lazily shaped, meta or sparse tensor"
                )
                return value
        storage = self.storages[self.tensors[index].storage]
        if not storage.layers:
            storage.layers = frozenset(holder.owners)  # the holder's own, where that is one
        elif not storage.layers >= holder.owners:
            storage.layers = storage.layers | holder.owners
        return Token(index)

    def _add(self, tensor: torch.Tensor, path: str) -> int | None:
        key = None if is_inference(tensor) else storage_key(tensor)
        if key is None:
            return None
        number = self._by_storage.get(key)
        if number is None:
            storage = tensor.untyped_storage()
            if not _has_memory(storage):
                return None  # a wrapper subclass: what it holds is elsewhere
            number = self._by_storage[key] = len(self.storages)
            self.storages.append(
                StorageSkeleton(storage.nbytes(), tensor.device, tensor.dtype, StorageWeakRef(storage))
            )
        index = self._by_tensor[id(tensor)] = len(self.tensors)
        self.tensors.append(
            TensorSkeleton(
                weakref.ref(tensor), number, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(),
                tensor.dtype, type(tensor), copied(getattr(tensor, "__dict__", {})), tensor.requires_grad, path,
            )
        )  # fmt: skip
        self.storages[number].tensors += (index,)
        return index

    def _keep_constructor_values(self, provisional: bool) -> None:
        """Clone small storages now; of large ones note whether they are constant.

        The second matters only where the first load is a dummy, which writes everything: elements that a real
        load leaves alone are then known only if they were all one value.
        """
        for storage in self.storages:
            if storage.nbytes == 0 or (storage.nbytes > SMALL_BYTES and not provisional):
                continue
            tensor = self.tensors[storage.tensors[0]].ref()
            if tensor is None:
                continue
            content = flat(tensor.detach(), storage.dtype)
            if storage.nbytes <= SMALL_BYTES:
                storage.kept = content.clone()
            else:
                first = content[:1]
                if bool((content == first).all()):
                    storage.constant = first.item()

    def named(self, path: str) -> int:
        """The number of the parameter or buffer at a path.

        Raises:
            KeyError: there is none.
        """
        for index, made in enumerate(self.tensors):
            if made.path == path:
                return index
        raise KeyError(path)

    def module_slots(self) -> Iterator[tuple[slots.Holder, slots.Key, int]]:
        """Every parameter and buffer slot that the constructor filled: its module, its key, its tensor's number."""
        for ident, state in self.states.items():
            for key, value in state.items():
                if key[0] not in ("param", "buffer"):
                    break  # these come first, in modules, and nothing else has any
                if isinstance(value, Token):
                    yield self.holders[ident], key, value.index

    @property
    def inference(self) -> bool:
        """Whether the model was built under inference mode."""
        return INFERENCE in self.unsupported.values()

    def aliases(self) -> dict[str, str]:
        """Names under which a parameter is held a second time, and the first: ties."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for holder, key, index in self.module_slots():
            if key[0] == "param":
                path = slots.step(holder.path, key)
                if first.setdefault(index, path) != path:
                    found[path] = first[index]
        return found

    def storage_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a live tensor's storage, if the constructor made it."""
        key = storage_key(tensor)
        return None if key is None else self._by_storage.get(key)

    def table(self) -> dict[int, int]:
        """Live storage identity -> storage number, for those storages that still exist."""
        return {
            key: number
            for key, number in self._by_storage.items()
            if (weak := self.storages[number].weak) is not None and not weak.expired()
        }

    def keep_unwritten(self, number: int, mask: np.ndarray[Any, Any] | None) -> None:
        """Keep the present values of the elements that a load did not write (`mask` False; None: nothing was).

        Called between loading and processing, when they still are the constructor's.
        """
        storage = self.storages[number]
        if storage.kept is not None:
            return
        tensor = next((t for i in storage.tensors if (t := self.tensors[i].ref()) is not None), None)
        if tensor is None or self.storage_of(tensor) != number:
            return
        content = flat(tensor.detach(), storage.dtype)
        if mask is None:
            storage.kept = content.clone()
        else:
            index = torch.from_numpy(np.flatnonzero(~mask)).to(content.device)
            storage.kept_index, storage.kept = index, content[index].clone()

    def drop_kept(self, number: int) -> None:
        """Forget kept values of a storage that is never rebuilt."""
        self.storages[number].kept_index = self.storages[number].kept = None

    def forget_identities(self) -> None:
        """Drop weak storage references once the first load has been learned."""
        for storage in self.storages:
            storage.weak = None
        self._by_storage.clear()
        self._by_tensor.clear()

    def fill_kept(self, number: int, target: torch.Tensor, unwritten: np.ndarray[Any, Any] | None) -> bool:
        """Write the constructor's values into unwritten elements of `target`, a flat tensor on a storage.

        `unwritten` is a mask of shape (numel,), or None for all. False if some wanted value is not known.
        """
        storage = self.storages[number]
        if storage.kept is None and storage.constant is None:
            return unwritten is not None and not bool(unwritten.any())
        if unwritten is None:
            wanted = None
        else:
            wanted = torch.from_numpy(np.flatnonzero(unwritten)).to(target.device)
        if storage.constant is not None and storage.kept is None:
            if wanted is None:
                target.fill_(storage.constant)
            else:
                target[wanted] = storage.constant
            return True
        assert storage.kept is not None
        if storage.kept_index is None:
            if wanted is None:
                target.copy_(storage.kept)
            else:
                target[wanted] = storage.kept[wanted]
            return True
        # Known only where the first load did not write: put those back first; what else is unwritten is unknown.
        known = np.zeros(storage.numel, dtype=bool)
        known[storage.kept_index.cpu().numpy()] = True
        need = np.ones(storage.numel, dtype=bool) if unwritten is None else unwritten
        chosen = torch.from_numpy(need[storage.kept_index.cpu().numpy()]).to(target.device)
        target[storage.kept_index[chosen]] = storage.kept[chosen]
        return not bool((need & ~known).any())
