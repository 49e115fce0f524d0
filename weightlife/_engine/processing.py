# SPDX-License-Identifier: Apache-2.0
"""The order of processing, once, for every reload: quant hooks, deferred hooks, the model's hook."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from weightlife.hosts.protocol import Host


def run(
    model: torch.nn.Module,
    host: Host,
    wanted: Callable[[torch.nn.Module], bool],
    late: Callable[[torch.nn.Module], bool],
    phase: Callable[[str], object],
    on_layer: Callable[[str, str, float], object],
    before: bool = True,
    last: bool = True,
    modules: Sequence[tuple[str, torch.nn.Module]] | None = None,
) -> None:
    """Process the `wanted` layers, and the deferred ones that are `late`, in the host's order.

    Deferred layers (attention and the like) read what other layers' hooks made, so all of them come after every
    quant hook; the model's own hook comes last. `phase` is told what begins, `on_layer` the path, hook and seconds
    of each layer. Without `before` and `last` what the host does to the whole model is left out. `modules`: those that
    may be wanted or late, in the model's order, where the caller knows; else all are asked.

    Raises:
        Whatever a hook raises, unchanged.
    """

    def timed(path: str, hook: str, call: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
        started = time.perf_counter()
        call(layer)
        on_layer(path, hook, time.perf_counter() - started)

    phase("process_quant")
    if before:
        host.before_processing()
    for path, layer in list(model.named_modules()) if modules is None else modules:
        hook = host.layer_hook(layer)
        if hook is not None and wanted(layer):
            timed(path, hook, host.process_layer, layer)
    phase("process_attention")
    for path, layer in list(model.named_modules()) if modules is None else modules:
        if host.is_deferred(layer) and late(layer):
            timed(path, type(layer).__name__, host.process_deferred, layer)
    if last:
        phase("process_model")
        host.process_model()
