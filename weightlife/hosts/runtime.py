# SPDX-License-Identifier: Apache-2.0
"""What `install()` set up in this process: settings and the patcher. Reached by wrappers at call time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from weightlife import errors
from weightlife.config import Settings
from weightlife.hosts.patching import Patcher


class _Runtime:
    settings: Settings | None = None
    patcher: Patcher | None = None


_state = _Runtime()

# Tests set it so that memory which nobody wrote cannot pass by luck: every fresh byte becomes 0xFF (NaN in floats).
POISON_VARIABLE = "WEIGHTLIFE_POISON"


def settings() -> Settings:
    """The settings in force."""
    if _state.settings is None:
        raise errors.NotInstalledError("weightlife is not installed in this process")
    return _state.settings


def patcher() -> Patcher:
    """The patcher in force."""
    if _state.patcher is None:
        raise errors.NotInstalledError("weightlife is not installed in this process")
    return _state.patcher


def installed() -> bool:
    """Whether `install()` is in force here."""
    return _state.patcher is not None and _state.patcher.active


def set_runtime(new_settings: Settings | None, new_patcher: Patcher | None) -> None:
    """Set by `install()` and `uninstall()` only."""
    _state.settings, _state.patcher = new_settings, new_patcher


def fill() -> Callable[[Any], None] | None:
    """The poison of fresh memory, in tests."""
    if os.environ.get(POISON_VARIABLE) != "1":
        return None

    def poison(tensor: Any) -> None:
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        storage = tensor.untyped_storage()
        whole.set_(storage, 0, (storage.nbytes(),), (1,))
        whole.fill_(0xFF)

    return poison
