# SPDX-License-Identifier: Apache-2.0
"""Digests of a model: `weightlife.digest`, `weightlife.check_digests`, `weightlife.expect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._models import find_here

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightlife.digests import Difference


def _ask(target: Any, question: str, payload: dict[str, Any] | None = None) -> list[Any]:
    from weightlife.hosts.vllm import remote

    return remote.ask(target, question, payload)


def digest(target: Any) -> list[dict[str, Any]]:
    """The digests of all runtime storage, by attribute path: one table a rank (see `weightlife.digests`).

    Args:
        target: a module, watched or not, or an `LLM`, engine, worker or runner.

    Raises:
        SessionStateError: an update is open, or the weights are asleep. HandshakeError: a worker runs without
            weightlife.
    """
    model = find_here(target)
    return _ask(target, "digest") if model is None else [local_digest(model)]


def check_digests(target: Any) -> list[Difference]:
    """What is not as it was after the last commit, by path and rank; empty where all is well.

    Needs the setting `digests="commit"`. Tensors that appeared since (workspaces) are no difference.

    Args:
        target: as for `digest`.

    Raises:
        ConfigError: no digests were kept. NotInstalledError: the model was built without weightlife.
        SessionStateError: an update is open, or the weights are asleep. SessionConflictError: a load is inside now.
    """
    from weightlife.digests import Difference as Found

    model = find_here(target)
    if model is not None:
        return local_check(model)
    answers = _ask(target, "check_digests")
    return [Found(**{**item, "rank": rank}) for rank, found in enumerate(answers) for item in found]


def expect(target: Any, table: dict[str, Any] | None) -> None:
    """From here on an update commits only if it brings exactly what a table of digests names.

    The expectation ends with the commit of an update that met it, or with `expect(target, None)`. Every rank is to
    receive all tensors of the table under the sender's names, as vLLM's loaders do.

    Args:
        target: a model that was built under weightlife, or an `LLM` or engine that serves one.
        table: what `weightlife.digests.digest_table` made on the sender's side.

    Raises:
        ConfigError: it is no table. NotInstalledError: the model was built without weightlife.
        SessionStateError: an update is open, or this model's loads are only observed.
    """
    from weightlife import digests

    checked = None if table is None else digests.check_table(table)
    model = find_here(target)
    if model is None:
        _ask(target, "expect", {"table": checked})
    else:
        local_expect(model, checked)


# -- in the process of the model -----------------------------------------------------------------------------------


def _quiet(life: Any, what: str) -> None:
    if life.session is not None:
        raise errors.SessionStateError(
            f"{what} while an update is open", model=life.name, session=life.session.id,
            hint="finish or abort it first",
        )  # fmt: skip
    why = life.host.refuse_reason(what)
    if why is not None:
        raise errors.SessionStateError(f"{what}: {why}", model=life.name)


def local_digest(model: Any) -> dict[str, Any]:
    """The table of a model in this process."""
    from weightlife._engine import lifecycle, runtime

    life = lifecycle.of(model)
    if life is None:
        skip: Callable[[Any], bool] = lambda _: False  # noqa: E731 - a model without a host around it
        return runtime.table(model, skip, skip)
    with life.owned("digest"):
        _quiet(life, "digest")
        return life.digests.now()


def local_check(model: Any) -> list[Difference]:
    """`check_digests` of a model in this process."""
    from weightlife import digests
    from weightlife._engine import lifecycle

    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    with life.owned("check_digests"):
        _quiet(life, "check_digests")
        if life.digests.kept is None:
            raise errors.ConfigError(
                f"no digests were kept for {life.name}: {life.digests.why}", model=life.name,
                hint="set digests='commit' before the model is built, then load",
            )  # fmt: skip
        found = digests.compare(life.digests.kept, life.digests.now())
    return [difference for difference in found if difference.what != "unexpected"]


def local_expect(model: Any, table: dict[str, Any] | None) -> None:
    """`expect` of a model in this process."""
    from weightlife._engine import lifecycle
    from weightlife.hosts import runtime

    life = lifecycle.of(model)
    if life is None:
        raise errors.NotInstalledError("this model was not built under weightlife")
    with life.owned("expect"):
        observing = runtime.installed() and runtime.mode_for(life) == "observe"
        if life.observed is not None or observing:
            raise errors.SessionStateError(
                f"loads of this model are only observed ({life.observed or runtime.unproven() or 'mode is observe'}): nothing would be checked",
                model=life.name,
            )  # fmt: skip
        if life.session is not None:
            raise errors.SessionStateError(
                "expect while an update is open", model=life.name, session=life.session.id
            )
        life.expected = table
