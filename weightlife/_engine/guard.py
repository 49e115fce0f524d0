# SPDX-License-Identifier: Apache-2.0
"""The guard: what a forward pass does when it meets a session or a poisoned model.

It sits where a worker executes, never on anything that is traced or captured. Without an open session it costs one
comparison and an uncontended lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from weightlife import errors
from weightlife._engine.lifecycle import Lifecycle, OpenSessions


class Pass(enum.Enum):
    """What kind of pass comes."""

    REAL = "real"
    DUMMY = "dummy"  # an idle data-parallel rank, a warm-up, an empty batch: changes nothing


@contextmanager
def showing_a(life: Lifecycle) -> Iterator[None]:
    """Generation A in the module tree for the length of a pass; B comes back after it."""
    session = life.session
    stage = session.stage if session is not None else None
    if stage is None or not stage.showing_b:
        yield
        return
    receiver = session.receiver if session is not None else None
    stage.show_a()
    if receiver is not None:
        receiver.suspended = True
    try:
        yield
    finally:
        if receiver is not None:
            receiver.suspended = False
        if session is not None and session.stage is stage:
            stage.show_b()


def _settle_implicit(life: Lifecycle) -> None:
    """A real batch is the end of an implicit session whose touched layers are whole."""
    session = life.session
    assert session is not None
    if session.foreign_modes and not session.touched():
        life.abort(None)  # a client's dry pass: its own mode kept every write away
        return
    try:
        session.check_ready()
    except errors.CompletenessError as error:
        session.waited_batches += 1
        if not session.warned:
            session.warned = True
            message = f"a batch met an update that is not complete and ran on the old weights: {error}"
            life.note(message)
            # If the rest still comes it commits, and nothing else would tell that requests were answered by A.
            session.report.notes.append(errors.clean(message, 500))
        if session.waited_batches > life.settings.implicit_patience:
            life.failed = errors.SessionFailedError(
                f"the update stayed incomplete for {session.waited_batches} batches and was dropped: {error.message}",
                model=life.name, tensors=error.tensors, session=session.id,
            )  # fmt: skip
            life.abort(error)
        return
    try:
        life.finish("the next batch")
    except Exception as error:  # noqa: BLE001 - raising here would kill the engine; the client's next call learns it
        life.failed = errors.SessionFailedError(
            f"the update could not be committed: {errors.safe_text(error)}",
            model=life.name,
            session=session.id,
        )
        life.note(f"{life.failed}; the old weights serve")


def _refuse(life: Lifecycle) -> errors.WeightlifeError | None:
    if life.poisoned:
        return errors.PoisonedModelError(life.poisoned, model=life.name)
    session = life.session
    if session is None or session.settings.isolation == "staged":
        return None
    return errors.EngineNotPausedError(
        "a pass met an update that is written in place", model=life.name, session=session.id
    )


@contextmanager
def entering(lives: Iterable[Lifecycle], kind: Pass, always: bool = False) -> Iterator[None]:
    """The length of a pass: what it meets is settled before, the right generation shown during it.

    `always`: take the model's lock even while no session is open. Hosts that run loads and passes in one thread don't
    need it; a plain module may be used from several.

    Raises:
        PoisonedModelError, EngineNotPausedError: the pass must not run. Hosts turn them into an answer that does not
        kill the engine.
    """
    if OpenSessions.count == 0 and not always:
        yield
        return
    with ExitStack() as stack:
        for life in lives:
            stack.enter_context(life.turn.passing())
            if life.is_inside() and not (life.session is not None and life.session.pulling):
                continue  # a pass of the load itself (a hook that runs a layer): it sees what is being made
            if kind is Pass.REAL and not life.is_inside():
                session = life.session
                if session is not None and not session.explicit:
                    _settle_implicit(life)
                error = _refuse(life)
                if error is not None:
                    raise error
            stack.enter_context(showing_a(life))
            stack.enter_context(life.turn.running())
        yield


def guarded(lives: Iterable[Lifecycle], kind: Pass, call: Callable[[], Any]) -> Any:
    """Run a pass under the guard."""
    with entering(lives, kind):
        return call()
