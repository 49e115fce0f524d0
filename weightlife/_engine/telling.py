# SPDX-License-Identifier: Apache-2.0
"""What a model's lifecycle tells: its reports, one log line each, and notes. None of it may fail a load."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from weightlife import errors
from weightlife._engine.events import NOTE, bus
from weightlife.hosts.protocol import Host
from weightlife.report import LoadReport

if TYPE_CHECKING:
    from weightlife._engine.session import WeightLoadSession

REPORTS_KEPT = 32  # a report of a large model is some 100 KiB


class Teller:
    """The telling half of a lifecycle.

    Args:
        name: class of the model.
    """

    session: WeightLoadSession | None
    host: Host

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = logging.getLogger("weightlife")
        self.reports: deque[LoadReport] = deque(maxlen=REPORTS_KEPT)

    def say(self, report: LoadReport) -> None:
        """One line a session."""
        self.tell(logging.INFO, report.summary_line(), report.session_id)

    def tell(self, level: int, text: str, session: str = "") -> None:
        """A line in the log. A filter or handler of somebody that raises must not undo a commit, or end a pass."""
        try:
            self.log.log(level, "%s", text)
        except Exception as error:  # noqa: BLE001 - telemetry may never break a load
            bus.emit(NOTE, session, message=f"the log line failed: {type(error).__name__}")

    def note(self, message: str) -> None:
        """One fact for the log and for listeners."""
        self.tell(logging.WARNING, errors.clean(message, 2000))
        bus.emit(NOTE, self.session.id if self.session else "", message=message)

    def notes_after_commit(self) -> list[str]:
        """What the host wants a caller to know. B serves already: a host that fails here is only heard of."""
        try:
            return self.host.commit_notes()
        except Exception as error:  # noqa: BLE001 - B serves
            text = errors.clean(errors.safe_text(error), 500)
            self.tell(logging.ERROR, f"the host's notes after a commit failed: {text}")
            return [f"the host's notes are missing: {type(error).__name__}"]


__all__ = ["REPORTS_KEPT", "Teller"]
