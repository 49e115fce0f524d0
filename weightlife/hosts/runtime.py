# SPDX-License-Identifier: Apache-2.0
"""What `install()` set up in this process: settings, the patcher, and the mode in force. Reached at call time."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from weightlife import errors
from weightlife.config import Settings
from weightlife.hosts.patching import Patcher


class _Runtime:
    settings: Settings | None = None
    patcher: Patcher | None = None
    unproven: str = ""
    told: bool = False  # that the host's version is not one of those that were tested


_lock = threading.Lock()
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
    if new_patcher is not _state.patcher:
        _state.unproven, _state.told = "", False
    _state.settings, _state.patcher = new_settings, new_patcher


def mode() -> str:
    """The mode in force in this process: `observe` where it is asked for, and where enforcing is `unproven`.

    Raises:
        NotInstalledError: weightlife is not installed here.
    """
    return "observe" if settings().mode == "observe" or unproven() else "enforce"


def mode_for(life: Any) -> str:
    """The mode in force for one model: what a host's version lacks is nothing to a plain module's."""
    return mode() if life.host.name == patcher().host else settings().mode


def unproven(decide: bool = False) -> str:
    """Why this process only observes whatever it was asked to do, or "". Once found it stays, and is one log line.

    Args:
        decide: look also for modules of the host that are nowhere to be imported from. Asked before a model is built,
            by when the host has imported what it needs for that.
    """
    here = _state.patcher
    if here is None or _state.unproven:
        return _state.unproven
    missing = here.missing(absent=decide)
    if not missing:
        return ""
    seams = "; ".join(f"{name} ({reason})" for name, reason in sorted(missing.items()))
    return degrade(f"{host_version()} lacks what enforcing needs: {seams}")


def degrade(why: str) -> str:
    """From here on this process changes nothing and records. Returns the reason, which the first call gives."""
    with _lock:
        if _state.unproven:
            return _state.unproven
        _state.unproven = errors.clean(why, 2000)
    if settings().mode != "observe":
        say_observing()
    return _state.unproven


def say_observing() -> None:
    """One clear line: enforcing was asked for."""
    _tell(
        f"weightlife only observes in this process: {_state.unproven}; loads run the host's own path and are recorded;"
        f" next: serve with a tested version ({_tested()}), or set mode='observe' if this is what you want"
    )


def say_untested() -> None:
    """Once a process: a version that has every seam is enforced, and nobody has tested it."""
    here = _state.patcher
    if here is None or _state.told or _state.unproven or version() is None or is_tested():
        return
    _state.told = True
    _tell(
        f"weightlife enforces on {host_version()}, which it was not tested with (tested: {_tested()}): every required"
        " seam is there; next: run an update in a test, and weightlife.verify() after it"
    )


def host_version() -> str:
    """The host's name and version, as far as it is imported."""
    name = "" if _state.patcher is None else _state.patcher.host
    return errors.clean(f"{name or 'the host'} {version() or '(unknown version)'}", 200)


def version() -> str | None:
    """The host's version, where it is imported and has one."""
    host = None if _state.patcher is None else sys.modules.get(_state.patcher.host)
    found = None if host is None else vars(host).get("__version__")
    return None if found is None else str(found)


def is_tested() -> bool:
    """Whether the host's version is one that the test-suite runs against. A local part (+cpu) does not count."""
    tested = () if _state.patcher is None else _state.patcher.tested
    return str(version()).partition("+")[0] in tested


def _tested() -> str:
    return ", ".join(() if _state.patcher is None else _state.patcher.tested) or "none"


def _tell(text: str) -> None:
    try:
        logging.getLogger("weightlife").warning("%s", text)
    except Exception:  # noqa: BLE001 - somebody's handler must not end the host's start; `status()` says it too
        return


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
