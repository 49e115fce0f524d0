# SPDX-License-Identifier: Apache-2.0
"""Whether the loader that an engine was started with can read a checkpoint again. Said at the start, asked at a reload."""

from __future__ import annotations

import logging
from typing import Any

from weightlife import errors
from weightlife._engine.lifecycle import Lifecycle


def no_path(load_config: Any) -> str:
    """Why vLLM can't reload a path or the configured checkpoint: a loader without `get_all_weights`; "" where it can."""
    from vllm.model_executor import model_loader

    load_format = getattr(load_config, "load_format", None)
    loader = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(load_format)
    if loader is None or hasattr(loader, "get_all_weights"):
        return ""
    return f"the loader of load_format={errors.clean(load_format)} ({loader.__name__}) can't read a checkpoint again"


def require_path(life: Lifecycle) -> None:
    """Before a reload from disk.

    Raises:
        ReloadUnsupportedError: the configured loader can't do that.
    """
    load_config = getattr(getattr(life.host, "vllm_config", None), "load_config", None)
    if not (why := no_path(load_config)):
        return
    from vllm.model_executor.model_loader import get_model_loader

    if not hasattr(
        get_model_loader(load_config), "get_all_weights"
    ):  # an object may have what its class has not
        raise errors.ReloadUnsupportedError(why, model=life.name)


def say_no_path(life: Lifecycle, load_config: Any) -> None:
    """A loader that can't reload is heard of at the start, not when the weights are gone."""
    if why := no_path(load_config):
        told = f"a reload by path is not possible: {why}; next: {errors.ReloadUnsupportedError.default_hint}"
        life.tell(logging.INFO, f"{life.name}: {told}")
        if life.first is not None:
            life.first.report.notes.append(told)


__all__ = ["no_path", "require_path", "say_no_path"]
