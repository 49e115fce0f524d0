# SPDX-License-Identifier: Apache-2.0
"""``weightlife demo``: what an installed package can show without vLLM, in two seconds on a CPU.

A small module with layers that are quantised after a load is swapped, gets an update that lacks a tensor and one whose
source breaks off, and is compared with a cold load after each step. Every answer is computed here; the sessions are
stored and become a report. The demo on the real engine is in the repository (``examples/demo.py``); ``find_engine_demo``
looks for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weightlife
from weightlife import errors
from weightlife.config import Settings

__all__ = ["Step", "find_engine_demo", "play", "run_engine_demo"]

Weights = list[tuple[str, torch.Tensor]]
_WIDTH = 64


@dataclass
class Step:
    """One step: what was asked, what was raised, and whether the outputs equal a cold load of what should serve."""

    title: str
    serving: str
    raised: str
    equal: bool
    expected: bool


class SourceError(RuntimeError):
    """What the demo's failing sender raises in the middle of an update."""


class Int8Linear(nn.Module):
    """A linear layer whose weight, shape (width, width), becomes int8 rows and a scale after a load."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(_WIDTH, _WIDTH), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(_WIDTH), requires_grad=False)

    def process_weights_after_loading(self) -> None:
        """Quantise, and drop the float weight: what most quantised layers do."""
        self.scale = self.weight.abs().amax(dim=1).clamp(min=1e-8) / 127
        quantised = (self.weight / self.scale[:, None]).round().to(torch.int8)
        self.quantised = nn.Parameter(quantised, requires_grad=False)
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, width) to (n, width)."""
        return x @ (self.quantised.float() * self.scale[:, None]).t() + self.bias


class DemoModel(nn.Module):
    """Four quantised layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Int8Linear() for _ in range(4)])
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, width) to (n, width)."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        out: torch.Tensor = self.norm(x)
        return out


def _load(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        parameters[name].data.copy_(tensor)


def _checkpoint(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(p.shape, generator=generator)) for name, p in DemoModel().named_parameters()]


def play(runs_dir: Path) -> list[Step]:
    """Play it, and keep the sessions in ``runs_dir``."""
    # defaults by name: what is set in this environment is for the user's models, not for the demo
    settings = {**asdict(Settings()), "runs_dir": str(runs_dir), "partial_update": "forbid"}
    load = weightlife.wrap_loader(**settings)(_load)
    checkpoints = {"A": _checkpoint(1), "B": _checkpoint(2)}
    x = torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(3))
    want = {}
    for name, weights in checkpoints.items():
        cold = DemoModel()
        _load(cold, weights)
        for layer in cold.layers:
            layer.process_weights_after_loading()  # type: ignore[operator]
        want[name] = cold(x)
    model = DemoModel()

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        yield from checkpoints["A"][:5]
        raise SourceError("the trainer went away")

    def step(
        title: str, serving: str, act: Callable[[], Any], wanted: type[BaseException] | None = None
    ) -> Step:
        raised: BaseException | None = None
        try:
            act()
        except Exception as error:  # noqa: BLE001 - what is raised is what the table shows
            raised = error
        equal = torch.equal(model(x), want[serving])
        right = raised is None if wanted is None else isinstance(raised, wanted)
        return Step(
            title,
            serving,
            "" if raised is None else f"{type(raised).__name__}: {raised}",
            equal,
            equal and right,
        )

    return [
        step("load A", "A", lambda: load(model, checkpoints["A"])),
        step("swap A -> B", "B", lambda: load(model, checkpoints["B"])),
        step("A without one tensor", "B", lambda: load(model, checkpoints["A"][:-1]), errors.MissingTensorError),
        step("A from a source that breaks off", "B", lambda: load(model, breaks_off()), SourceError),
        step("swap B -> A", "A", lambda: load(model, checkpoints["A"])),
    ]  # fmt: skip


def find_engine_demo() -> Path | None:
    """The repository's demo on the real engine, if this package runs from a checkout."""
    path = Path(weightlife.__file__).resolve().parent.parent / "examples" / "demo.py"
    return path if path.is_file() else None


def run_engine_demo(path: Path, *, as_json: bool) -> int:
    """Run it as it is; its exit status."""
    command = [sys.executable, str(path), *(["--json"] if as_json else [])]
    return subprocess.run(command, check=False).returncode
