# SPDX-License-Identifier: Apache-2.0
"""Read named tensors of a safetensors folder, in the order asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def names(folder: Path) -> list[str]:
    """Names of all tensors of a checkpoint, in file order.

    Raises:
        FileNotFoundError: the folder holds no safetensors file.
    """
    return list(_where(folder))


def read(folder: Path, wanted: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for `wanted`, in that order; a name may come twice.

    Raises:
        KeyError: the checkpoint has no such tensor.
    """
    places = _where(folder)
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name in wanted:
            path = places[name]
            if path not in files:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            yield name, files[path].get_tensor(name)


def _where(folder: Path) -> dict[str, Path]:
    out: dict[str, Path] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            out.update(dict.fromkeys(file.keys(), shard))
    if not out:
        raise FileNotFoundError(f"no safetensors in {folder.name!r}")
    return out
