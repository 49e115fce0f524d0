# SPDX-License-Identifier: Apache-2.0
"""Do addresses hold? Two oracles that share no code with the engine that they judge.

`Captured` stands in for a captured graph: while passes run it notes, by weak references, which memory they read that
outlives them. That memory must be there after an update, and passes must read no other. `Addresses` notes where every
tensor is that `testing._walk` reaches, by path.

Both work on a CPU. What native code reads through a pointer of its own is seen by neither; a comparison of outputs with
a cold load is what tells there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightlife.testing._walk import walk

__all__ = ["Address", "Addresses", "Captured"]


@dataclass(frozen=True)
class Address:
    """Where a tensor is: bytes for pointer and size, elements for the rest."""

    pointer: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    memory: StorageWeakRef

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Address | None:
        """The address of a tensor, or None where it has no memory of its own."""
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
            return None
        storage = tensor.untyped_storage()
        return cls(
            storage.data_ptr(), storage.nbytes(), int(tensor.storage_offset()), tuple(tensor.shape),
            tensor.stride(), tensor.dtype, tensor.device, StorageWeakRef(storage),
        )  # fmt: skip

    def differs(self, other: Address | None) -> str:
        """What of `other` is not as it is here, in words; empty where all is."""
        if other is None:
            return "there is no memory any more"
        names = ("pointer", "nbytes", "offset", "shape", "stride", "dtype", "device")
        return ", ".join(
            f"{name} {getattr(other, name)}, was {getattr(self, name)}"
            for name in names
            if getattr(other, name) != getattr(self, name)
        )


class Addresses:
    """Where every tensor of a model is now.

    before = Addresses(model)
    update(model)
    assert before.moved(model) == []

    Args:
        model: the model.
        skip: paths to leave out (caches of requests).
    """

    def __init__(self, model: nn.Module, skip: Callable[[str], bool] = lambda _: False) -> None:
        self._skip = skip
        self.seen = self._look(model)

    def _look(self, model: nn.Module) -> dict[str, Address]:
        return {
            path: address
            for path, tensor in walk(model)
            if not self._skip(path) and (address := Address.of(tensor)) is not None
        }

    def moved(self, model: nn.Module) -> list[str]:
        """Paths that are elsewhere now, or gone, each with what differs. New paths are no difference."""
        now = self._look(model)
        out = []
        for path, address in self.seen.items():
            what = address.differs(now.get(path)) if path in now else "gone"
            if not what and address.memory.expired():
                what = "its memory was freed"  # and another one lies where it was
            if what:
                out.append(f"{path}: {what}")
        return out


class _Reads(TorchDispatchMode):
    """Storages that operators were given and did not make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, torch.UntypedStorage] = {}  # kept: a temporary's identity must not be used again
        self.made: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        for tensor in given:
            if tensor.layout is torch.strided and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.read.setdefault(int(storage._cdata), storage)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and not tensor.is_meta:
                key = int(tensor.untyped_storage()._cdata)
                if key not in self.read:
                    self.made.add(key)
        return out

    def lasting(self) -> dict[int, torch.UntypedStorage]:
        return {key: storage for key, storage in self.read.items() if key not in self.made}


class Captured:
    """The memory that passes read and that outlives them: what a graph, captured now, would read for ever.

    graph = Captured(lambda: model(x))
    update(model)
    assert graph.problems() == []

    Args:
        run: one pass. It runs twice here and once in `problems`: what only one of the passes read is no weight.
        model: names the memory, by path, where it is given.
    """

    def __init__(self, run: Callable[[], object], model: nn.Module | None = None) -> None:
        self._run = run
        first, second = self._reads(), self._reads()
        self._names: dict[int, str] = {}
        for path, tensor in walk(model) if model is not None else ():
            if tensor.layout is torch.strided and not tensor.is_meta:
                self._names.setdefault(int(tensor.untyped_storage()._cdata), path)
        self.memory = {
            key: (storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage))
            for key, storage in second.items()
            if key in first and storage.nbytes()
        }

    def _reads(self) -> dict[int, torch.UntypedStorage]:
        mode = _Reads()
        with torch.no_grad(), mode:
            self._run()
        return mode.lasting()

    def problems(self) -> list[str]:
        """What would be wrong with a graph that was captured then, in words."""
        out = []
        for key, (pointer, nbytes, memory) in self.memory.items():
            if memory.expired():
                out.append(f"{self._name(key)}: {nbytes} bytes that a graph reads were freed ({pointer:#x})")
        now = {storage.data_ptr() for storage in self._reads().values()}
        out += [
            f"{self._name(key)}: {nbytes} bytes that a graph reads ({pointer:#x}) are read no more"
            for key, (pointer, nbytes, memory) in self.memory.items()
            if not memory.expired() and pointer not in now
        ]
        return out

    def _name(self, key: int) -> str:
        return self._names.get(key, "memory that no path leads to")
