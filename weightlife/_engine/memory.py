# SPDX-License-Identifier: Apache-2.0
"""The highest mark of memory, where it can be told for nothing."""

from __future__ import annotations

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


__all__ = ["high_water", "peak"]
