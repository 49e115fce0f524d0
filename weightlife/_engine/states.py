# SPDX-License-Identifier: Apache-2.0
"""Where a session may stand, and where it may go from there. The drawing in the documentation is made from this table.

"Poisoned" is no state of a session: it is what a *model* is when an update failed and there is no way back.
"""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from weightlife.errors import SessionStateError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TRANSITIONS", "State", "move"]


class State(enum.Enum):
    """Where a session stands. `ABORTED` is reached from anywhere but `COMMITTED`."""

    IDLE = "idle"
    PREPARED = "prepared"
    RECEIVING = "receiving"
    PROCESSING = "processing"
    VALIDATING = "validating"
    COMMITTED = "committed"
    ABORTED = "aborted"


# Every step that a session can take, and what makes it take the step.
TRANSITIONS: Mapping[State, Mapping[State, str]] = MappingProxyType(
    {
        State.IDLE: {
            State.PREPARED: "prepare",
            State.ABORTED: "refused, untouched",
        },
        State.PREPARED: {
            State.RECEIVING: "load_weights",
            State.PROCESSING: "finish, nothing came",
            State.ABORTED: "error or abort",
        },
        State.RECEIVING: {
            State.RECEIVING: "next call, new epoch",
            State.PROCESSING: "finish, complete; a whole layer",
            State.ABORTED: "error or abort",
        },
        State.PROCESSING: {
            State.RECEIVING: "more to come",
            State.VALIDATING: "each hook ran once",
            State.ABORTED: "a hook raised",
        },
        State.VALIDATING: {
            State.COMMITTED: "all ranks agree",
            State.ABORTED: "contract or vote",
        },
        State.COMMITTED: {},
        State.ABORTED: {},
    }
)


def move(old: State, new: State) -> State:
    """`new`, if the table allows that step.

    Raises:
        SessionStateError: it does not.
    """
    if new not in TRANSITIONS[old]:
        raise SessionStateError(f"a session that is {old.value} can't become {new.value}")
    return new
