# SPDX-License-Identifier: Apache-2.0
"""The order of processing, once, for every reload: quant hooks, deferred hooks, the model's hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from weightlife.hosts.protocol import Host


@dataclass
class Processed:
    """What a pass over the hooks did: seconds by phase, and calls by hook and layer path."""

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    layers: list[tuple[str, str, float]] = field(default_factory=list)  # path, hook, seconds


def run(
    model: torch.nn.Module,
    host: Host,
    wanted: Callable[[torch.nn.Module], bool],
    before_layer: Callable[[torch.nn.Module], None],
    phase: Callable[[str], object],
    on_layer: Callable[[str, str, float], object],
) -> Processed:
    """Process the `wanted` layers in the host's order.

    Deferred layers (attention and the like) read what other layers' hooks made, so all of them come after every
    quant hook; the model's own hook comes last. `before_layer` gives a layer the values that no load writes.

    Raises:
        Whatever a hook raises, unchanged.
    """
    done = Processed()

    def timed(kind: str, path: str, hook: str, call: Callable[[], None]) -> None:
        started = time.perf_counter()
        call()
        spent = time.perf_counter() - started
        done.seconds[kind] = done.seconds.get(kind, 0.0) + spent
        done.calls[kind] = done.calls.get(kind, 0) + 1
        if path:
            done.layers.append((path, hook, spent))
            on_layer(path, hook, spent)

    phase("process_quant")
    host.before_processing()
    for path, layer in list(model.named_modules()):
        hook = host.layer_hook(layer)
        if wanted(layer):
            before_layer(layer)
            if hook is not None:
                timed("process_quant", path, hook, lambda layer=layer: host.process_layer(layer))  # type: ignore[misc]
    phase("process_attention")
    for path, layer in list(model.named_modules()):
        if host.is_deferred(layer):
            hook = type(layer).__name__
            timed("process_attention", path, hook, lambda layer=layer: host.process_deferred(layer))  # type: ignore[misc]
    phase("process_model")
    timed("process_model", "", type(model).__name__, host.process_model)
    return done
