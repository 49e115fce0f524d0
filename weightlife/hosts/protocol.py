# SPDX-License-Identifier: Apache-2.0
"""The host protocol: all that the engine asks of the framework around a model.

The engine knows tensors, modules and slots. Everything else, which hooks there are, in which contexts they run,
whether memory may be replaced, comes through this interface. One instance serves one model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from weightlife.source_checks import Source


class Host(Protocol):
    """What a framework must answer for one model."""

    name: str

    def skip(self, obj: Any) -> bool:
        """Whether an object reached from the model is process-wide (configuration, groups) and not entered."""

    def transient(self, path: str) -> bool:
        """Whether an attribute path leads to what requests leave behind (caches of keys and values), not to weights."""

    def layer_hook(self, layer: torch.nn.Module) -> str | None:
        """Name of the layer's own processing (for reports), or None where it has none."""

    def process_layer(self, layer: torch.nn.Module) -> None:
        """Run the layer's quant processing once, in kernel-producing form."""

    def is_deferred(self, layer: torch.nn.Module) -> bool:
        """Whether the layer's hook runs after every quant hook (attention and what looks like it)."""

    def process_deferred(self, layer: torch.nn.Module) -> None:
        """Run a deferred hook."""

    def rerun_deferred(self) -> bool:
        """Whether deferred hooks may run again on a layer in processed state (they read other layers' new values)."""

    def may_process_early(self, layer: torch.nn.Module) -> bool:
        """Whether a layer's hook may run before `before_processing`, as soon as all of its tensors are there."""

    def before_processing(self) -> None:
        """What the host does to the whole model before any hook (re-tying embeddings)."""

    def process_model(self) -> None:
        """The model's own hook, after everything else."""

    def ties_late(self) -> bool:
        """Whether `before_processing` may tie layers that the constructor made apart."""

    def has_model_hook(self) -> bool:
        """Whether `process_model` does anything. It may look at every layer."""

    def probe(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """What the layer's kernel answers to a fixed input, for weights in memory that no tensor owns.

        The same bits for the same weights. None where that is not known how.
        """

    def contexts(self) -> AbstractContextManager[Any]:
        """The contexts in which loading and processing run (current configuration)."""

    def loader(self) -> Callable[[Any], Any] | None:
        """What loads (name, tensor) pairs into the model, as a reload would call it; None where that is not known."""

    def headers(self, path: Any) -> Source | None:
        """What the files that a reload of `path` would read say of themselves; None where that can't be told.

        `path` None: the configured checkpoint.
        """

    def observe_reason(self) -> str | None:
        """Why this model is left to the host's own lifecycle and only observed, or None."""

    def refuse_reason(self, operation: str) -> str | None:
        """Why an update must not begin now (asleep, experts moved), or None."""

    def adoptable(self) -> str | None:
        """Why new storage must not replace old, or None where nothing outside can hold an address."""

    def rank(self) -> tuple[int, int]:
        """(rank, world size) of this process within the group that must agree."""

    def exchange(self, words: list[int]) -> list[list[int]]:
        """Every rank's words (64-bit integers, same length on all), in rank order. Blocks until all arrive."""

    def commit_notes(self) -> list[str]:
        """What a caller still has to do after a commit (caches that the engine can't reach), for the report."""

    def versions(self) -> dict[str, str]:
        """Versions for the report."""
