# SPDX-License-Identifier: Apache-2.0
"""What tests ask of a worker, as methods that `collective_rpc` calls by name with plain data.

Give it to an engine as `worker_extension_cls="weightlife.testing.worker_ext.TestWorkerExtension"`. vLLM
imports this module in every worker, which also registers the transfer engine of `transfer`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from weightlife.testing import transfer
from weightlife.testing._poison import POISON_VARIABLE, poison
from weightlife.testing._source import read
from weightlife.testing._walk import digests

transfer.register()
if os.environ.get(POISON_VARIABLE) == "1":
    poison()


class TestWorkerExtension:
    """Mixed into the worker class. Every name is prefixed: vLLM refuses one that `Worker` has."""

    __test__ = False  # not a test case, whatever pytest thinks of the name
    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: torch.device

    def weightlife_test_fingerprint(self) -> dict[str, Any]:
        """Digests of every tensor that this rank's model reaches (see `_walk.digests`)."""
        return digests(self.model_runner.get_model())

    def weightlife_test_load(self, folder: str, names: list[str], scribble: bool = False) -> None:
        """A bare `model.load_weights` of `names`, as most RL frameworks call it.

        With `scribble` the tensors are overwritten when the call is over: a sender's buffer is its own.
        """
        weights = [(n, t.clone() if scribble else t) for n, t in read(Path(folder), names)]
        self.model_runner.get_model().load_weights(weights=weights)
        if scribble:
            for _, tensor in weights:
                spoil(tensor)

    def weightlife_test_reload_iterator(self, folder: str, names: list[str], scribble: bool = False) -> None:
        """`model_runner.reload_weights` from an iterator; with `scribble` each tensor dies at the next step."""
        self.model_runner.reload_weights(
            weights_iterator=self._weightlife_test_stream(folder, names, scribble)
        )

    @staticmethod
    def _weightlife_test_stream(
        folder: str, names: list[str], scribble: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(Path(folder), names):
            sent = tensor.clone() if scribble else tensor
            yield name, sent
            if scribble:
                spoil(sent)

    def weightlife_test_layerwise_start(self) -> None:
        """Call vLLM's own `initialize_layerwise_reload`, as some clients do."""
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.model_runner.get_model())

    def weightlife_test_layerwise_finish(self) -> None:
        """Call vLLM's own `finalize_layerwise_reload`."""
        from vllm.model_executor.model_loader import reload

        reload.finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)

    def weightlife_test_zero_kv_cache(self) -> None:
        """Forget what NaN weights left in the KV cache, so that the next verdict stands for itself."""
        for entry in self.model_runner.kv_caches:
            for tensor in entry if isinstance(entry, list | tuple) else (entry,):
                tensor.zero_()

    def weightlife_test_process(self) -> None:
        """The end mark of verl and NeMo-RL: module-level processing of the whole, processed model."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        with set_current_vllm_config(self.vllm_config):
            process_weights_after_loading(self.model_runner.get_model(), self.model_config, self.device)


def spoil(tensor: torch.Tensor) -> None:
    """Overwrite every element with what no checkpoint holds: NaN, or the largest integer."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
