# SPDX-License-Identifier: Apache-2.0
"""What a client of test_ranks.py has in its workers: a reload loader of its own that cuts wrongly, and a library's storage.

vLLM imports it in every worker as the module of the extension class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import weightlife

TARGET = "model.layers.1.self_attn.o_proj.weight"  # square; each rank has half of its columns

WORKSPACE = {"table": torch.arange(8.0)}


class Handles:
    """A library whose tensors are reached by numbers."""

    def __init__(self) -> None:
        self._all = [torch.ones(4)]

    def get(self) -> torch.Tensor:
        return self._all[0]

    def put(self, tensor: torch.Tensor) -> None:
        self._all[0] = tensor


HANDLES = Handles()


def find(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """A finder: where the library's tensor is."""
    yield "scale", (HANDLES.get, HANDLES.put)


def find_nothing(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """A finder that raises on one rank."""
    if torch.distributed.get_rank() == 1:
        raise LookupError("the library is not on this rank")
    yield "scale", (HANDLES.get, HANDLES.put)


def cut(how: str, full: torch.Tensor, param: torch.Tensor, rank: int) -> None:
    """Put a tensor [n, n] into a shard [n, n / 2] as a loader might that knows nothing of tensor parallelism."""
    half = param.shape[1]
    if "computed" in how:
        full = (full.float() * 1.0).to(full.dtype)  # as one that quantises would
    if "whole" in how:
        param.data.copy_(full)
    elif "first shard" in how:
        param.data.copy_(full.narrow(1, 0, half))
    elif "dimension" in how:
        param.data.copy_(full.narrow(0, rank * half, half).t())
    else:
        param.data.copy_(full.narrow(1, rank * half, half))


@weightlife.wrap_loader
def reload_as_client(model: torch.nn.Module, weights: Iterable[Any], how: str, rank: int) -> None:
    """A client's loader for the target, the model's own for the rest."""
    parameters = dict(model.named_parameters())
    for name, tensor in weights:
        if name == TARGET:
            cut(how, tensor, parameters[name], rank)
        else:
            model.load_weights([(name, tensor)])  # type: ignore[operator]


class ClientExtension:
    """Worker methods."""

    def client_reload(self, folder: str, how: str) -> str:
        """Reload by the client's loader. Returns the error, or nothing."""
        from weightlife.testing.checkpoints import tensors

        try:
            reload_as_client(
                self.model_runner.get_model(), list(tensors(Path(folder)).items()), how, self.rank
            )  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - the test compares what each rank heard
            return f"{type(error).__name__}: {error}"
        return ""

    def client_replace(self, folder: str, shape: list[int]) -> dict[str, Any]:
        """Reload while the library replaces its tensors; what is there then, and what the report says."""
        from weightlife.testing.checkpoints import tensors

        before = {"table": WORKSPACE["table"].data_ptr(), "scale": HANDLES.get().data_ptr()}

        def source() -> Iterator[tuple[str, torch.Tensor]]:
            for place, item in enumerate(tensors(Path(folder)).items()):
                if place == 1:
                    WORKSPACE["table"] = torch.full(
                        shape, 2.0, dtype=torch.float32
                    )  # the default is the model's now
                    HANDLES.put(torch.full((4,), 3.0, dtype=torch.float32))
                yield item

        heard = ""
        try:
            self.model_runner.reload_weights(weights_iterator=source())  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - as above
            heard = f"{type(error).__name__}: {error}"
        return {
            "heard": heard,
            "stayed": [
                WORKSPACE["table"].data_ptr() == before["table"],
                HANDLES.get().data_ptr() == before["scale"],
            ],
            "values": [WORKSPACE["table"][0].item(), HANDLES.get()[0].item()],
        }

    def client_declared(self) -> list[str]:
        """What is declared on this rank."""
        from weightlife._engine import lifecycle

        life = lifecycle.of(self.model_runner.get_model())  # type: ignore[attr-defined]
        assert life is not None
        return sorted(life.addresses.declared)


__all__ = [
    "HANDLES",
    "TARGET",
    "WORKSPACE",
    "ClientExtension",
    "Handles",
    "find",
    "find_nothing",
    "reload_as_client",
]
