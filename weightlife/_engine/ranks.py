# SPDX-License-Identifier: Apache-2.0
"""Agreement between ranks: before a commit each tells the others whether it can, what it received, and what it holds."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weightlife import errors
from weightlife.hosts.protocol import Host

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession


def stream_digest(session: WeightLoadSession) -> int:
    """A 32-bit digest of what a session received: names, shapes and dtypes, in any order."""
    total = 0
    for name, entry in session.intake.received.items():
        total ^= zlib.crc32(f"{name}\0{entry.shape}\0{entry.dtype}".encode("utf-8", "surrogatepass"))
    return total


def _failed_at(session: WeightLoadSession) -> str:
    """The tensor at which a session failed, or nothing."""
    if session.intake.name:
        return session.intake.name
    told = session.report.violations
    return told[-1].tensors[0] if told and told[-1].tensors else ""


def _named(session: WeightLoadSession | None, codes: Sequence[int]) -> list[str]:
    """Names that this rank knows, by the codes that other ranks sent."""
    wanted = set(codes)
    if session is None or not wanted - {0}:
        return []
    known = dict.fromkeys((*session.intake.received, *session.life.manifest.names))
    return [name for name in known if zlib.crc32(name.encode("utf-8", "surrogatepass")) in wanted]


def update_id(everyone: Sequence[Sequence[int]]) -> str:
    """The session of the lowest rank that has one: what all ranks of an update call it. Empty: no rank has one.

    Args:
        everyone: each rank's words; a rank that did not come in time has fewer.
    """
    return next((f"{words[2]:012x}" for words in everyone if len(words) > 2 and words[2]), "")


class Ballot:
    """One model's votes. Ranks of one engine make the same calls in the same order, so votes pair up."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def cast(self, ok: bool, session: WeightLoadSession | None, model: str) -> None:
        """Exchange outcomes.

        Raises:
            RankMismatchError: some rank failed, received something else, or (by policy) holds other values.
        """
        rank, world = self.host.rank()
        if world == 1:
            return
        words = [int(ok), *((0, 0) if session is None else (stream_digest(session), int(session.id, 16)))]
        if session is not None and not ok:
            words.append(zlib.crc32(_failed_at(session).encode("utf-8", "surrogatepass")))
        held = None if session is None or not ok else session.held
        if held is not None:
            words += held.words
        everyone = self.host.exchange(words)
        if session is not None:
            session.report.update_id = update_id(everyone)
        if not ok:
            return  # this rank has its own error to raise
        failed = [i for i, other in enumerate(everyone) if not other[0]]
        strangers = [i for i, other in enumerate(everyone) if other[0] and other[1] != words[1]]
        if failed or strangers:
            what = f"ranks {failed} failed" if failed else f"ranks {strangers} received other tensors"
            names = _named(session, [words[3] for i in failed if len(words := everyone[i]) > 3])
            what += f" at {errors.clean(names[0])!r}" if names else ""
            raise errors.RankMismatchError(
                f"{what}; rank {rank} does not commit", model=model, tensors=names,
                session=session.id if session else "",
                hint="weightlife.last_reports(llm) says why, rank by rank; then send the update again" if failed else "",
            )  # fmt: skip
        if session is not None and held is not None:
            problem = held.problem([other[3:] for other in everyone])
            if problem is not None:
                session.problem(problem, session.settings.rank_values)
