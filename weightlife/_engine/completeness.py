# SPDX-License-Identifier: Apache-2.0
"""Complete or refused: what a session received against what a complete load writes, before anything is processed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightlife import errors
from weightlife._engine import announce
from weightlife._engine import manifest as manifests
from weightlife._engine.intake import digest
from weightlife._engine.skeleton import view_on
from weightlife._names import nearest, prefix_clause

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightlife._engine.session import WeightLoadSession


def check(session: WeightLoadSession, touched: set[int]) -> None:
    """Hold a session against the manifest of its model.

    Args:
        session: the session; its stage still has every track.
        touched: ids of the modules on whose storages it wrote.

    Raises:
        BypassError, EmptyUpdateError, UnexpectedTensorError, MissingTensorError, HalfTouchedLayerError,
        SurplusTensorError: by policy. Nothing was committed.
    """
    _raw(session)
    announce.finished(session)
    if not touched:
        _empty(session)
    _ties(session)
    if session.life.manifest.provisional:
        session.report.notes.append(
            "the first load was a dummy: this load is taken as complete and becomes the manifest"
        )
        return
    if session.kernel_format:
        return
    _unexpected(session)
    error = missing(session, touched)
    if error is not None:
        session.problem(error, "strict")
    if session.partial != "forbid" and session.scope is None:
        _not_sent(session)
    if session.explicit:
        _surplus(session)


def missing(session: WeightLoadSession, touched: set[int]) -> errors.CompletenessError | None:
    """What did not arrive, by the session's policy: anything of a complete load, or the rest of a processed layer."""
    life, stage = session.life, session.stage
    assert stage is not None
    storages = life.skeleton.storages
    if session.partial == "allow":
        return None
    if session.scope is not None:
        wanted: Iterable[int] = session.scope
    elif session.partial == "forbid":
        wanted = life.manifest.expected
    else:
        rebuilt = life.plan.rebuild & touched
        wanted = [n for n in life.manifest.expected if storages[n].layers & rebuilt]
    short = manifests.missing(life.manifest, life.skeleton, stage.by_number, wanted)
    if not short:
        return None
    names = life.manifest.uncovered_names(short, stage.by_number)
    strange = _strange(session)
    layer = life.layer_path(next(iter(storages[short[0]].layers), -1))
    kind: type[errors.CompletenessError] = errors.HalfTouchedLayerError
    message = f"a layer whose weights are processed received some of its tensors, {len(names)} did not arrive"
    if session.partial == "forbid":
        kind = errors.MissingTensorError
        message = f"{len(names)} of {len(life.manifest.names)} tensors of a complete load did not arrive"
    if names and session.explicit and all(name in session.intake.received for name in names):
        message = f"{len(names)} tensors came and were not written to where they went in the first load"
    if not names:  # a loader that takes everything first, or pulls in a thread of its own
        message = f"{len(short)} weights were not written whole; which tensors they lack is not known"
    elif strange:
        message += f"; {len(strange)} arrived that nothing took{nearest_clause(names[0], strange, 'of them')}"
        message += prefix_clause(session.intake.received, life.manifest.names)
    return kind(message, model=life.name, layer=layer, tensors=names, session=session.id)


def _not_sent(session: WeightLoadSession) -> None:
    """What may be left out was: told all the same, for a sender that means to send everything is wrong in silence."""
    life, stage, report = session.life, session.stage, session.report
    assert stage is not None
    short = manifests.missing(life.manifest, life.skeleton, stage.by_number, life.manifest.expected)
    names = life.manifest.uncovered_names(short, stage.by_number) if short else []
    report.tensors_not_sent = len(names)
    if names:
        report.notes.insert(
            0,
            f"{len(names)} of {len(life.manifest.names)} tensors of a complete load were not sent, and keep their old "
            f"values: {errors.names(names)}. WEIGHTLIFE_PARTIAL_UPDATE=forbid refuses such an update",
        )


def _ties(session: WeightLoadSession) -> None:
    """A tied partner that the loader left out must be what it is tied to.

    A configuration that says tied, and a checkpoint with a head of its own: where the model was built without reading
    the checkpoint (a dummy start), the head is dropped in silence, and another model serves.
    """
    life, stage = session.life, session.stage
    assert stage is not None
    for alias, canonical in life.aliases.items():
        entry = session.intake.received.get(alias)
        if entry is None or entry.writes:
            continue
        made = life.skeleton.tensors[life.skeleton.named(canonical)]
        track = stage.by_number.get(made.storage)
        if track is None or not track.ever:
            error: errors.CompletenessError = errors.MissingTensorError(
                f"{alias} is tied to a tensor that did not arrive",
                model=life.name, tensors=[canonical], session=session.id,
            )  # fmt: skip
            session.problem(error, "strict")
        elif life.host.rank()[1] > 1:
            session.report.notes.append(
                f"{alias} is tied; on one of several ranks its values are not compared"
            )
        else:
            now = view_on(track.current, made.dtype, made.offset, made.shape, made.stride)
            if digest(now, made.dtype) != entry.digest:
                error = errors.UnexpectedTensorError(
                    f"a tensor of its own arrived for what this model ties to {canonical}",
                    model=life.name, tensors=[alias], session=session.id,
                    hint="start the engine on this checkpoint (not on dummy weights), or send tied weights",
                )  # fmt: skip
                session.problem(error, "strict")


def _empty(session: WeightLoadSession) -> None:
    received, life = session.intake.received, session.life
    message = "no tensor of the update reached the model"
    if received:
        first = next(iter(received))
        message += f": none of {len(received)} names was taken, {first!r} first"
        message += nearest_clause(first, life.manifest.names)
        message += prefix_clause(received, life.manifest.names)
    session.problem(
        errors.EmptyUpdateError(message, model=life.name, tensors=list(received)[:8], session=session.id),
        session.settings.empty,
    )


def _unexpected(session: WeightLoadSession) -> None:
    """Names that no parameter took, though they are not among those that a complete load leaves out by design."""
    known = session.life.manifest.names
    strange = _strange(session)
    if not strange:
        return
    message = f"{len(strange)} of {len(session.intake.received)} tensors were taken by no parameter"
    message += nearest_clause(strange[0], known) + prefix_clause(session.intake.received, known)
    error = errors.UnexpectedTensorError(
        message, model=session.life.name, tensors=strange, session=session.id
    )
    if session.settings.unexpected == "refuse":
        session.problem(error, "strict")
    session.report.notes.append(str(error))


def _strange(session: WeightLoadSession) -> list[str]:
    known = session.life.manifest.names
    return [
        name
        for name, entry in session.intake.received.items()
        if entry.part is None and not entry.writes and (name not in known or known[name].writes)
    ]


def nearest_clause(name: str, names: Iterable[str], which: str = "known name") -> str:
    """The name that looks most like `name`, as a clause for a message, or nothing."""
    close = nearest(name, names)
    return f"; the nearest {which} is {close!r}" if close else ""


def _surplus(session: WeightLoadSession) -> None:
    life, stage = session.life, session.stage
    assert stage is not None
    extra = manifests.surplus(life.manifest, life.skeleton, stage.by_number)
    if not extra:
        return
    names = manifests.repeated_names(life.manifest, session.intake.received, stage.by_number, extra)
    layer = life.layer_path(next(iter(life.skeleton.storages[extra[0]].layers), -1))
    session.problem(
        errors.SurplusTensorError(
            "elements were written more often than a complete load writes them",
            model=life.name, layer=layer, tensors=names, session=session.id,
        ),
        session.settings.surplus,
    )  # fmt: skip


def _raw(session: WeightLoadSession) -> None:
    """Memory that was handed out raw must not have been written behind the ledger's back."""
    stage = session.stage
    assert stage is not None
    for track in {id(t): t for t in stage.index.values()}.values():
        if track.raw and not track.ever and track.stage is not None and stage.differs(track):
            raise errors.BypassError(
                f"{track.path} was written through its raw memory",
                model=session.life.name, layer=track.path, session=session.id,
            )  # fmt: skip
