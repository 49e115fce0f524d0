# SPDX-License-Identifier: Apache-2.0
"""The contract of addresses, for users: `weightlife.declare`, `weightlife.seal`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._models import find_here

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle


def declare(target: Any, path: str) -> list[list[str]]:
    """Take storage of your own into the contract: it keeps its address, is undone, and has digests, as a weight does.

    For what a model uses and does not reach: a workspace or table in a Python module. What a model reaches by
    attributes, containers, closures and kernel objects is found without being declared. Declare it after the first load.
    A path that is declared already stays.

    Args:
        target: a module that is watched, or an `LLM`, engine, worker or runner.
        path: `package.module:NAME` of a module that is imported, with attributes and items after it
            (`my.kernels:TABLES['gate'].packed`); without a colon, below the model.

    Returns:
        The paths of the tensors there, one list a rank.

    Raises:
        ConfigError: there is no tensor there. NotInstalledError: the model was built without weightlife.
        SessionStateError: an update is open, or the model has not had its first load.
        HandshakeError: a worker runs without weightlife.
    """
    from weightlife.hosts.vllm import remote

    model = find_here(target)
    if model is None:
        return remote.ask(target, "declare", {"text": path})
    return [local_declare(model, path)]


def seal(target: Any, by: str = "captured by the caller") -> list[int]:
    """Say that you captured addresses of a model (a CUDA graph of your own): from here on they are the contract.

    vLLM's own captures are seen. The storages are kept alive from here on, and an update that can't keep an address is
    refused, also where it could adopt before.

    Args:
        target: as for `declare`.
        by: who captured, for messages.

    Returns:
        How many tensors are sealed, one number a rank.

    Raises:
        as `declare`.
    """
    from weightlife.hosts.vllm import remote

    model = find_here(target)
    if model is None:
        return remote.ask(target, "seal", {"text": by})
    return [local_seal(model, by)]


# -- in the process of the model -----------------------------------------------------------------------------------


def _ready(model: Any, what: str) -> Lifecycle:
    from weightlife._engine import lifecycle

    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    if life.observed is not None or life.first is not None:
        why = f"it is only observed ({life.observed})" if life.observed else "it has not had its first load"
        raise errors.SessionStateError(f"{what}: {why}", model=life.name)
    if life.session is not None:
        raise errors.SessionStateError(
            f"{what} while an update is open", model=life.name, session=life.session.id,
            hint="finish or abort it first",
        )  # fmt: skip
    return life


def local_declare(model: Any, path: str) -> list[str]:
    """`declare` of a model in this process."""
    life = _ready(model, "declare")
    with life.owned("declare"):
        return life.addresses.declare(path)


def local_seal(model: Any, by: str) -> int:
    """`seal` of a model in this process."""
    life = _ready(model, "seal")
    with life.owned("seal"):
        life.addresses.capture(by)
        return len(life.addresses.entries)
