# SPDX-License-Identifier: Apache-2.0
"""Uninitialised memory becomes NaN, so that nobody passes by luck.

Without it a layer that was re-created and never filled often still holds the old, right values: half of
the ways in which a reload goes wrong would go unnoticed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.utils.deterministic

_DETERMINISTIC: Final[Any] = torch.utils.deterministic  # its attribute is a property that stubs do not know

POISON_VARIABLE: Final = "WEIGHTLIFE_TEST_POISON"
"""Set to "1", workers that load `worker_ext` poison themselves at start-up."""


def poison(on: bool = True) -> None:
    """From here on `torch.empty` and its kin are filled with NaN (the largest value for integers)."""
    # warn_only: kernels without a deterministic variant run as before, and say so once too often.
    warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
    torch.use_deterministic_algorithms(on, warn_only=True)
    _DETERMINISTIC.fill_uninitialized_memory = on


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """`poison` for the length of a block; what was set before is set again."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = bool(_DETERMINISTIC.fill_uninitialized_memory)
    poison()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        _DETERMINISTIC.fill_uninitialized_memory = fill
