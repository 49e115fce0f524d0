# SPDX-License-Identifier: Apache-2.0
"""The host protocol for a plain `torch.nn.Module`: no framework, the owner's own loader and hooks.

A layer's hook is a callable method `process_weights_after_loading` on the module, or on its `quant_method`, which gets
the layer as its argument and runs first. The model's own hook is the same method on the root, run last. Of a layer with
a true attribute `deferred` the module's own hook runs after those of all others.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weightlife import source_checks
from weightlife._version import __version__
from weightlife.source_checks import Source

HOOK = "process_weights_after_loading"


class TorchHost:
    """The protocol for one plain module.

    Args:
        model: the root module.
        deferred: which layers run after all others; by default those with a true attribute `deferred`.
        contexts: contexts in which loading and processing run.
    """

    name = "torch"

    def __init__(
        self,
        model: torch.nn.Module,
        deferred: Callable[[torch.nn.Module], bool] | None = None,
        contexts: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._model = weakref.ref(model)
        self._deferred = deferred or (lambda layer: bool(getattr(layer, "deferred", False)))
        self._contexts = contexts

    def _hook(self, layer: torch.nn.Module) -> Callable[[], None] | None:
        """The module's own hook."""
        hook = getattr(layer, HOOK, None)
        return hook if callable(hook) else None

    def _quant_hook(self, layer: torch.nn.Module) -> Callable[[torch.nn.Module], None] | None:
        """That of the layer's quant method."""
        hook = getattr(getattr(layer, "quant_method", None), HOOK, None)
        return hook if callable(hook) else None

    def _own_hook(self, layer: torch.nn.Module) -> Callable[[], None] | None:
        """The module's own hook, if it runs with the layer."""
        return None if layer is self._model() or self._deferred(layer) else self._hook(layer)

    def skip(self, obj: Any) -> bool:
        """Nothing is process-wide here."""
        return False

    def transient(self, path: str) -> bool:
        """Nothing that the engine could know of."""
        return False

    def layer_hook(self, layer: torch.nn.Module) -> str | None:
        """The class of a layer's quant method if that has a hook; else of a layer with one that runs with the layer."""
        if self._quant_hook(layer) is not None:
            return type(layer.quant_method).__name__
        return None if self._own_hook(layer) is None else type(layer).__name__

    def process_layer(self, layer: torch.nn.Module) -> None:
        """Run the quant method's hook, then the layer's own unless that is a late one."""
        quant, own = self._quant_hook(layer), self._own_hook(layer)
        if quant is not None:
            quant(layer)
        if own is not None:
            own()

    def is_deferred(self, layer: torch.nn.Module) -> bool:
        """Whether the layer has a hook and runs late."""
        return layer is not self._model() and self._hook(layer) is not None and self._deferred(layer)

    def process_deferred(self, layer: torch.nn.Module) -> None:
        """Run a late hook."""
        hook = self._hook(layer)
        assert hook is not None
        hook()

    def rerun_deferred(self) -> bool:
        """A foreign hook may consume what it processes."""
        return False

    def may_process_early(self, layer: torch.nn.Module) -> bool:
        """Nothing comes before any hook."""
        return True

    def before_processing(self) -> None:
        """Nothing comes before."""

    def process_model(self) -> None:
        """The root's own hook, last."""
        model = self._model()
        hook = None if model is None else self._hook(model)
        if hook is not None:
            hook()

    def ties_late(self) -> bool:
        """Nothing does."""
        return False

    def has_model_hook(self) -> bool:
        """Whether the root has a hook."""
        model = self._model()
        return model is not None and self._hook(model) is not None

    def probe(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """Nothing is known of a foreign layer's inputs."""
        return None

    def contexts(self) -> AbstractContextManager[Any]:
        """The owner's contexts."""
        return self._contexts()

    def loader(self) -> Callable[[Any], Any] | None:
        """The model's own `load_weights`, if it has one."""
        found = getattr(self._model(), "load_weights", None)
        return found if callable(found) else None

    def headers(self, path: Any) -> Source | None:
        """Of a folder of safetensors files, one such file, or an index."""
        from pathlib import Path

        if not isinstance(path, (str, os.PathLike)) or not (Path(path).is_dir() or Path(path).is_file()):
            return None
        found = source_checks.read(path)
        return found if found.files or found.problems else None

    def observe_reason(self) -> str | None:
        """Always managed."""
        return None

    def refuse_reason(self, operation: str) -> str | None:
        """Never refused."""
        return None

    def adoptable(self) -> str | None:
        """The engine can't know who holds an address of a foreign module: on a CPU nothing captures one."""
        model = self._model()
        devices = {tensor.device.type for tensor in model.parameters()} if model is not None else set()
        return None if devices <= {"cpu"} else "a captured graph may hold the present addresses"

    def rank(self) -> tuple[int, int]:
        """One process."""
        return 0, 1

    def exchange(self, words: list[int]) -> list[list[int]]:
        """One process."""
        return [words]

    def commit_notes(self) -> list[str]:
        """Nothing is cached here."""
        return []

    def versions(self) -> dict[str, str]:
        """Weightlife and torch."""
        return {"weightlife": __version__, "torch": str(torch.__version__)}
