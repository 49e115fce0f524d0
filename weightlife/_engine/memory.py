# SPDX-License-Identifier: Apache-2.0
"""Memory round a load: its highest mark, where that can be told for nothing, and what the collector need not look at."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import torch


def high_water(model: torch.nn.Module) -> int | None:
    """The most bytes that were ever in use: of the model's device by PyTorch, or on a CPU of the process (its RSS).

    Neither is reset: other tools read the same marks. None where the platform does not tell. Some tens of us.
    """
    first = next(model.parameters(), None)
    if first is not None and first.is_cuda:
        return int(torch.cuda.max_memory_allocated(first.device))
    # Not getrusage: its mark is inherited through exec, so that a small child shows its parent's.
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - hot enough
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def peak(before: int | None, after: int | None) -> int | None:
    """What a session used at most: known only if it raised the mark. An older, higher one hides it."""
    return after if before is not None and after is not None and after > before else None


_aside = False  # by us: counting a million frozen objects takes 10 ms


@contextmanager
def set_aside() -> Iterator[None]:
    """Have the garbage collector leave alone what was there before, for the length of a first load.

    A host collects between loading and processing and after it, to be rid of what the load left. Each time the collector
    walks over all that the process has imported, too: 1.1 million objects and 0.43 s in a vLLM process. What is
    garbage before is found by one pass here: an engine or a trainer that is gone may hold memory that the load needs. Where objects are frozen already, by an outer load or by
    the program, nothing is done: to thaw them is not ours.
    """
    global _aside
    mine = not _aside and gc.get_freeze_count() == 0
    if mine:
        _aside = True
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()
            _aside = False


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    with suppress(OSError, TypeError):
        return ctypes.CDLL(None)
    return None


def trim() -> None:
    """Give what the C library's allocator keeps for later back to the system, where it can (glibc). 1 to 3 ms.

    What hooks made and dropped stays in its heap below 32 MiB, and the next layer's, aligned otherwise, may not fit
    into the hole: 16 MiB more for a layer of 24 MiB.
    """
    with suppress(AttributeError):
        if (library := _library()) is not None:
            library.malloc_trim(0)


__all__ = ["high_water", "peak", "set_aside", "trim"]
