# SPDX-License-Identifier: Apache-2.0
"""A vLLM model is met: it gets a lifecycle, or one that is only observed where this vLLM can't be enforced."""

from __future__ import annotations

from typing import Any

import torch

from weightlife import errors
from weightlife._engine import lifecycle
from weightlife._engine.lifecycle import Lifecycle
from weightlife.hosts import runtime
from weightlife.hosts.patching import Wrapper
from weightlife.hosts.vllm import reloadable
from weightlife.hosts.vllm.adapter import VllmHost


def watch(model: Any, vllm_config: Any, model_config: Any, load: Wrapper, process: Wrapper) -> None:
    """A model that was just constructed gets its lifecycle.

    A version of vLLM that nobody has tested may lack what the adapter reads of it: such a process observes.

    Args:
        model: the root module.
        vllm_config: the engine's configuration.
        model_config: this model's.
        load: the wrapper of its `load_weights`.
        process: the wrapper of its layers' quant hooks.

    Raises:
        AttributeError, ImportError: the same in a version that is tested, where it is a fault of weightlife's.
    """
    try:
        take(model, vllm_config, model_config, load, process)
        if lifecycle.of(model).host.rank()[0] == 0:  # type: ignore[union-attr]
            runtime.say_untested()
    except (AttributeError, ImportError) as error:
        if runtime.is_tested():
            raise
        why = f"{type(error).__name__}: {errors.safe_text(error)}"
        runtime.degrade(f"weightlife can't read a model of {runtime.host_version()} ({why})")
        take(model, vllm_config, model_config, load, process)


def take(model: Any, vllm_config: Any, model_config: Any, load: Wrapper, process: Wrapper) -> None:
    """Make the lifecycle of a model; where this process only observes, one that reads nothing else of the host."""
    for child in model.modules():
        if child is not model or runtime.unproven():
            lifecycle.forget(child)  # a model inside a model has no life of its own
    patcher = runtime.patcher()
    if runtime.unproven():  # nothing more is read of a version that is not known
        host = VllmHost(model, vllm_config, model_config, torch.device("cpu"))
        Lifecycle(model, host, runtime.settings())
    else:
        load_config = vllm_config.load_config
        device = torch.device(load_config.device or vllm_config.device_config.device)
        host = VllmHost(model, vllm_config, model_config, device)
        provisional = str(load_config.load_format) in ("dummy", "LoadFormat.DUMMY")
        life = Lifecycle(model, host, runtime.settings(), provisional, runtime.fill())
        reloadable.say_no_path(life, load_config)
        for layer in model.modules():
            if host.layer_hook(layer) is not None:
                patcher.wrap_class(type(layer.quant_method), "process_weights_after_loading", process)
    patcher.wrap_class(type(model), "load_weights", load)


__all__ = ["take", "watch"]
