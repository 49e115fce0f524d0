# SPDX-License-Identifier: Apache-2.0
"""Which memory the first processing computed from loaded weights. What it made of nothing of theirs is a constant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightlife._engine.skeleton import storage_key

# These take a shape and a kind from a tensor, and no values.
_SHAPE_ONLY = ("new_", "empty", "zeros", "ones", "full", "rand")


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    yield item


class Flow:
    """Follows values from storage to storage, operation by operation.

    What goes through numbers of Python (`item`), through raw memory or through compiled code is not followed: such a
    result counts as a constant.

    Args:
        loaded: identities of the storages that a load writes, all of them alive or held by a weak reference.
    """

    def __init__(self, loaded: Iterable[int]) -> None:
        self._loaded = set(loaded)
        # A weak reference keeps an identity from being used again.
        self._made: dict[int, StorageWeakRef] = {}

    def saw(self, name: str, inputs: list[Any], written: Iterable[Any], out: Any) -> None:
        """An operation ran. `inputs`: all arguments; `written`: those that it writes."""
        if name.rpartition("::")[2].startswith(_SHAPE_ONLY):
            return
        loaded, made = self._loaded, self._made
        for tensor in _tensors(inputs):
            key = storage_key(tensor)
            if key in loaded or key in made:
                break
        else:
            return
        for tensor in (*_tensors(written), *_tensors(out if isinstance(out, (list, tuple)) else (out,))):
            key = storage_key(tensor)
            if key is not None and key not in loaded and key not in made:
                made[key] = StorageWeakRef(tensor.untyped_storage())

    def derived(self, constructed: Iterable[int]) -> dict[int, StorageWeakRef]:
        """Identities of storages that still exist and hold what was computed, without those of the constructor."""
        known = set(constructed)
        return {key: weak for key, weak in self._made.items() if key not in known and not weak.expired()}


__all__ = ["Flow"]
