# SPDX-License-Identifier: Apache-2.0
"""The contract of addresses, for users: `weightlife.declare`, `weightlife.seal`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from weightlife import _finders, errors
from weightlife._models import find_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlife._engine.lifecycle import Lifecycle


def declare(target: Any, path: str | Callable[[Any], Any]) -> list[list[str]]:
    """Take storage of your own into the contract: it keeps its address, is undone, and has digests, as a weight does.

    For what a model uses and does not reach: a workspace or table in a Python module. What a model reaches by
    attributes, containers, closures and kernel objects is found without being declared. Declare it after the first load.
    A path that is declared already stays. What no path leads to is told by a finder: a function that is called with the
    model, at each look, and gives names and places (`register_finder` describes them, and is for all models of a class).

    Args:
        target: a module that is watched, or an `LLM`, engine, worker or runner.
        path: `package.module:NAME` of a module that is imported, with attributes and items after it
            (`my.kernels:TABLES['gate'].packed`); without a colon, below the model. Or a finder; where workers in other
            processes are asked, one that can be imported there by its name.

    Returns:
        The paths of the tensors there, one list a rank. Those of a finder begin with its name and a colon.

    Raises:
        ConfigError: there is no tensor there, or the finder raises or gives nonsense. NotInstalledError: the model was built without weightlife.
        SessionStateError: an update is open, or the model has not had its first load.
        HandshakeError: a worker runs without weightlife.
    """
    model = find_here(target)
    if model is None:
        finder = callable(path)
        return _declare_everywhere(target, {"text": _importable(path) if finder else path, "finder": finder})
    return [local_declare(model, path)]


def _declare_everywhere(target: Any, payload: dict[str, Any]) -> list[list[str]]:
    """Every worker declares, or none does.

    Raises:
        ConfigError, SessionStateError: some rank could not, in the words of the first.
    """
    from weightlife.hosts.vllm import remote

    answers = remote.ask(target, "declare", payload)
    failed = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
    if not failed:
        return [answer["paths"] for answer in answers]
    remote.ask(target, "withdraw", {**payload, "new": [answer.get("new", False) for answer in answers]})
    known = errors.from_message(next(iter(failed.values())))
    assert known is not None
    if len(answers) > 1:
        known.message += f"; so said ranks {list(failed)} of {len(answers)}, and none declares it"
    raise known


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


def answer_declare(model: Any, text: str, finder: bool) -> dict[str, Any]:
    """What a worker answers: paths and whether they were not declared before, or why not. Raising would tell one rank."""
    try:
        life = _ready(model, "declare")
        new = not life.addresses.has(_named(text) if finder else text)
        return {"paths": local_declare(model, text, finder), "new": new}
    except errors.WeightlifeError as error:
        return {"error": str(error)}


def local_withdraw(model: Any, text: str, finder: bool) -> None:
    """Take a declaration back that another rank could not make."""
    life = _ready(model, "declare")
    with life.owned("declare"):
        life.addresses.withdraw(_named(text) if finder else text)


def local_declare(model: Any, path: str | Callable[[Any], Any], finder: bool = False) -> list[str]:
    """`declare` of a model in this process. `finder`: the path is that of a finder."""
    life = _ready(model, "declare")
    with life.owned("declare"):
        if callable(path):
            return life.addresses.declare_finder(path)
        return life.addresses.declare_finder(_named(path)) if finder else life.addresses.declare(path)


def _importable(finder: Any) -> str:
    """The name by which workers find a function."""
    module, name = getattr(finder, "__module__", ""), getattr(finder, "__qualname__", "")
    text = f"{module}:{name}"
    why = ""
    if module == "__main__":
        why = "it is of the program that was started, which is another one there"
    elif not name or _look(module, name) is not finder:
        why = "it has no name in its module (a lambda, a method, an inner function)"
    if why:
        raise errors.ConfigError(
            f"workers in other processes can't be given {_finders.label(finder)}: {why}",
            hint="give a function of a module that the workers import too (worker_extension_cls, a plugin),"
            " or call register_finder there",
        )  # fmt: skip
    return text


def _look(module: str, name: str) -> Any:
    here: Any = sys.modules.get(module)
    for part in name.split("."):
        here = getattr(here, part, None)
    return here


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    found = _look(module, name)
    if not callable(found):
        raise errors.ConfigError(
            f"there is no finder {errors.clean(text)!r} in this worker",
            hint="import its module there, by worker_extension_cls or a plugin, before you declare",
        )
    return found


def local_seal(model: Any, by: str) -> int:
    """`seal` of a model in this process."""
    life = _ready(model, "seal")
    with life.owned("seal"):
        life.addresses.capture(by)
        return len(life.addresses.entries)
