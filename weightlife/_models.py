# SPDX-License-Identifier: Apache-2.0
"""From what users hold (an `LLM`, an engine, a worker, a runner, a module) to the module, in this process."""

from __future__ import annotations

from typing import Any

from weightlife import errors

# Attribute chains from the outside in, as vLLM has had them since 0.17. The first that leads to a module wins.
_CHAINS = (
    "llm_engine",
    "engine_core",
    "engine_core.engine_core",
    "model_executor",
    "driver_worker",
    "worker",
    "model_runner",
)


def find_model(target: Any) -> Any:
    """The root module that `target` serves with.

    Raises:
        HostError: it can't be reached from here (a multi-process engine keeps it in another process).
    """
    import torch

    seen: list[Any] = []
    queue = [target]
    while queue and len(seen) < 64:
        here = queue.pop(0)
        if isinstance(here, torch.nn.Module):
            return here
        if any(here is other for other in seen):
            continue
        seen.append(here)
        getter = getattr(here, "get_model", None)
        if callable(getter):
            try:
                model = getter()
            except TypeError:
                model = None
            if isinstance(model, torch.nn.Module):
                return model
        for chain in _CHAINS:
            value = here
            for part in chain.split("."):
                value = getattr(value, part, None)
            if value is not None:
                queue.append(value)
    raise errors.HostError(
        f"no model can be reached from {type(target).__name__} in this process",
        hint="the engine runs in another process: weightlife.status(llm) and last_reports(llm) ask it, or set"
        " VLLM_ENABLE_V1_MULTIPROCESSING=0",
    )


def find_here(target: Any) -> Any:
    """The model of `target` in this process, or None where workers in other processes have to be asked.

    Raises:
        HostError: neither.
    """
    try:
        return find_model(target)
    except errors.HostError:
        from weightlife.hosts.vllm import remote

        if remote.engine_of(target) is None:
            raise
        return None
