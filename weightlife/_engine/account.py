# SPDX-License-Identifier: Apache-2.0
"""The account that a load keeps of itself: phases, where the time went, layers, violations. First loads keep it too."""

from __future__ import annotations

import time
from collections.abc import Collection

import torch

from weightlife import errors
from weightlife._engine import memory
from weightlife._engine.events import (
    LAYER_PROCESSED,
    PHASE_END,
    PHASE_START,
    SESSION_END,
    SESSION_START,
    VIOLATION,
    bus,
)
from weightlife._engine.footprint import Plan
from weightlife.report import LayerRecord, LoadReport, PhaseRecord, Violation


class Account:
    """Fills one report, and tells listeners as it goes. Times are in seconds.

    Args:
        report: the report of a load that begins now.
        model: whose device's high-water mark is read.
        told: whether listeners hear of it.
    """

    def __init__(self, report: LoadReport, model: torch.nn.Module, told: bool = True) -> None:
        self.report = report
        self.model = model
        self.load_seconds = 0.0  # inside load calls, the source included
        self.source_seconds = 0.0  # in the source
        self.copy_seconds = 0.0  # in copies from the host to a device
        self.early: list[float] = []  # of hooks that ran while receiving
        self.layer_seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._running: tuple[str, float] | None = None
        self._high_water = memory.high_water(model)
        self._told = told
        self._emit(SESSION_START, report=report)

    def _emit(self, event: str, **content: object) -> None:
        if self._told:
            bus.emit(event, self.report.session_id, **content)

    @property
    def running(self) -> str | None:
        """The phase that runs."""
        return None if self._running is None else self._running[0]

    def phase(self, name: str | None, tensors: int = 0, size: int = 0) -> None:
        """End the running phase and begin another.

        Args:
            name: of the one that begins; None: only end.
            tensors: how many the running phase moved.
            size: and how many bytes.
        """
        now = time.perf_counter()
        if self._running is not None:
            old, started = self._running
            self._add(old, started, now - started)
            self._emit(PHASE_END, phase=old, tensors=tensors, bytes=size)
        self._running = None if name is None else (name, now)
        if name is not None:
            self._emit(PHASE_START, phase=name)

    def _add(self, name: str, started: float, seconds: float) -> None:
        for record in self.report.phases:
            if record.name == name:
                record.seconds += seconds
                record.calls += 1
                return
        self.report.phases.append(PhaseRecord(name, seconds, 1, started - self._started))

    def layer(self, path: str, hook: str, seconds: float) -> None:
        """A layer's hook ran."""
        spent = self.report.processing
        spent[hook] = spent.get(hook, 0.0) + seconds
        self.layer_seconds[path] = self.layer_seconds.get(path, 0.0) + seconds
        self._emit(LAYER_PROCESSED, layer=path, hook=hook, seconds=seconds)

    def violation(self, error: errors.WeightlifeError) -> None:
        """Something was not as it must be."""
        tensors = list(error.tensors)[:32]
        self.report.violations.append(Violation(error.code, error.message, error.layer, tensors))
        self._emit(
            VIOLATION, code=error.code, layer=error.layer, message=error.message,
            tensors=tensors,
        )  # fmt: skip

    def total(self, outcome: str, tensors: int, nbytes: int) -> None:
        """Nothing more is timed."""
        report, early = self.report, sum(self.early)
        report.outcome = outcome
        receiving = sum(record.seconds for record in report.phases if record.name == "receive")
        if self.early:  # a phase of its own in the report
            for record in report.phases:
                if record.name == "receive":
                    record.seconds -= early
                    report.phases.append(PhaseRecord("process_early", early, len(self.early)))
                    break
        report.seconds = time.perf_counter() - self._started
        report.tensors_received, report.bytes_received = tensors, nbytes
        spent = report.attributed
        spent["source"] = self.source_seconds
        spent["host_to_device"] = self.copy_seconds
        spent["loaders"] = max(0.0, self.load_seconds - self.source_seconds - self.copy_seconds - early)
        spent["between_calls"] = max(0.0, receiving - self.load_seconds)
        spent.setdefault("ranks", 0.0)
        report.peak_bytes = memory.peak(self._high_water, memory.high_water(self.model))

    def layers(self, plan: Plan, touched: Collection[int]) -> None:
        """The table of layers.

        Args:
            plan: how each layer is treated.
            touched: ids of the modules that this load wrote.
        """
        report = self.report
        for ident, layer in plan.layers.items():
            report.layers_by_strategy[layer.strategy] = report.layers_by_strategy.get(layer.strategy, 0) + 1
            seconds = self.layer_seconds.get(layer.path, 0.0)
            report.layers.append(
                LayerRecord(layer.path, layer.strategy, layer.reason, ident in touched, seconds=seconds)
            )
        report.layers_touched = sum(1 for record in report.layers if record.touched)
        report.layers_untouched = len(report.layers) - report.layers_touched

    def closed(self, error: BaseException | str = "") -> None:
        """The report is complete."""
        self._emit(SESSION_END, report=self.report, outcome=self.report.outcome, error=error)


__all__ = ["Account"]
