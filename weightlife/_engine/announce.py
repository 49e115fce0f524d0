# SPDX-License-Identifier: Apache-2.0
"""Announced names: what a source says that it will bring, checked before its first byte is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightlife import _declared, errors, source_checks
from weightlife._declared import Header, Known
from weightlife._engine.export import manifest_of
from weightlife._names import prefix_change

if TYPE_CHECKING:
    from weightlife._engine.lifecycle import Lifecycle
    from weightlife._engine.manifest import Manifest
    from weightlife._engine.session import WeightLoadSession


@dataclass
class Facts:
    """A manifest as declarations are held against it. Made once for each: a transfer declares every chunk."""

    known: dict[str, Known]
    groups: list[frozenset[str]] | None = None


def facts_of(life: Lifecycle, manifest: Manifest) -> Facts:
    """Names of a complete load, as `_declared` takes them."""
    if manifest.facts is not None:
        return manifest.facts
    took: dict[int, set[str]] = {}
    for number, dtype in manifest.casts:
        took.setdefault(number, set()).add(dtype)
    known = {
        name: Known(
            entry.dtype, entry.shape, tuple(entry.writes),
            frozenset(dtype for number, _ in entry.writes for dtype in took.get(number, ())),
            frozenset(str(life.skeleton.storages[number].dtype).removeprefix("torch.") for number, _ in entry.writes),
        )
        for name, entry in manifest.names.items()
    }  # fmt: skip
    manifest.facts = Facts(known)
    return manifest.facts


def groups_of(life: Lifecycle, manifest: Manifest) -> list[frozenset[str]]:
    """The smallest legal partial updates of a manifest."""
    facts = facts_of(life, manifest)
    if facts.groups is None:
        facts.groups = manifest_of(life, left_out=False, known=manifest).atomic_groups()
    return facts.groups


def check(session: WeightLoadSession, declared: Mapping[str, Header], whole: bool, policy: str) -> None:
    """Hold a declaration against the manifest.

    Args:
        session: the session that it belongs to.
        declared: names and what is said of them.
        whole: nothing else will come: what is missing can be told now.
        policy: strict, warn or off.

    Raises:
        CompletenessError: by policy; nothing of what was declared has been written.
    """
    life, manifest = session.life, session.life.manifest
    if manifest.provisional:
        if life.routed is None:
            return
        # What headers told of one checkpoint is no law for another one: said, and not refused.
        manifest, policy = life.routed, weaker(policy, "warn")
    if policy == "off":
        return
    partial = session.partial if whole else "allow"
    groups = groups_of(life, manifest) if partial == "by_layer" else []
    found = _declared.problems(
        declared, facts_of(life, manifest).known, partial=partial, groups=groups,
        unexpected=session.settings.unexpected, model=life.name, session=session.id,
    )  # fmt: skip
    for setting, error in found:
        session.problem(error, weaker(policy, session.settings.casts if setting == "casts" else "strict"))
    if found:
        return
    change = prefix_change(declared, manifest.names)
    if change is not None:
        # The model may take both spellings, so this is no refusal; but if the update fails, this is why.
        session.report.notes.append(f"most names are not those of the last complete load: {change}")


def expect(session: WeightLoadSession, given: Any) -> None:
    """Declare everything that a session is going to receive.

    Raises:
        CompletenessError: what is declared cannot be a legal update. ConfigError: it declares no tensors.
    """
    declared = _declared.as_headers(given)
    check(session, declared, True, session.settings.announced)
    session.announced = declared


def arrived(session: WeightLoadSession, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """A tensor came in a session whose names were declared.

    Raises:
        UnexpectedTensorError, ShapeMismatchError, DtypeMismatchError: by policy; it is not what was declared.
    """
    assert session.announced is not None
    context: dict[str, Any] = {"model": session.life.name, "session": session.id, "tensors": [name]}
    header = session.announced.get(name)
    error: errors.CompletenessError | None = None
    if header is None:
        error = errors.UnexpectedTensorError("a tensor arrived that was not announced", **context)
    elif header.shape is not None and tuple(header.shape) != shape:
        message = f"{list(shape)} arrived, {list(header.shape)} was announced"
        error = errors.ShapeMismatchError(message, **context)
    elif header.dtype and header.dtype != dtype:
        error = errors.DtypeMismatchError(f"{dtype} arrived, {header.dtype} was announced", **context)
    if error is not None:
        session.problem(error, session.settings.announced)


def finished(session: WeightLoadSession) -> None:
    """Everything that was declared must have come.

    Raises:
        MissingTensorError: by policy.
    """
    if session.announced is None:
        return
    short = [name for name in session.announced if name not in session.intake.received]
    if short:
        message = f"{len(short)} of {len(session.announced)} announced tensors did not arrive"
        error = errors.MissingTensorError(message, model=session.life.name, tensors=short, session=session.id)
        session.problem(error, session.settings.announced)


def check_source(session: WeightLoadSession, source: source_checks.Source) -> None:
    """Hold the headers of files against themselves and against the manifest.

    Raises:
        SourceError, CompletenessError: by policy; nothing was touched.
    """
    policy = session.settings.source
    for error in source.problems:
        error.model, error.session = session.life.name, session.id
        repeated = isinstance(error, errors.RepeatedSourceError)
        session.problem(error, weaker(policy, session.settings.surplus if repeated else "strict"))
    if source.headers:
        check(session, source.headers, True, policy)


def source_held(session: WeightLoadSession, error: errors.SourceError | None) -> None:
    """What was found of files after they were read.

    Raises:
        ChangedSourceError: by policy.
    """
    if error is not None:
        error.model, error.session = session.life.name, session.id
        session.problem(error, session.settings.source)


_STRENGTH = ("off", "warn", "strict")


def weaker(one: str, other: str) -> str:
    """The milder of two policies."""
    return min(one, other, key=_STRENGTH.index)
