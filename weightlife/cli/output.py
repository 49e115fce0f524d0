# SPDX-License-Identifier: Apache-2.0
"""How every command speaks: results on stdout, all else on stderr, JSON on demand, colour only where it is wanted.

rich leaves colour out in pipes and where ``NO_COLOR`` is set. Text from files is shown through ``Text`` objects and
``errors.clean``: neither rich's markup nor an escape sequence in a name means anything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from weightlife.errors import clean

__all__ = ["BAD", "FAILED", "GOOD", "OUTCOME_STYLES", "doing", "emit_json", "stderr", "stdout", "text"]

GOOD = 0
"""Done, and what was looked at is in order."""
BAD = 1
"""Done, and something needs a look."""
FAILED = 2
"""Not done: wrong usage, or something that can't be read; for doctor and seams: loads would not be covered."""

OUTCOME_STYLES = {
    "committed": "green",
    "observed": "yellow",
    "open": "yellow",
    "aborted": "red",
    "refused": "red",
    "poisoned": "bold red",
}
_PIPE_COLUMNS = 200


def stdout() -> Console:
    """For results. In a pipe lines are long: nothing is cut to the width of a screen that is not there."""
    return _console(stderr=False)


def stderr() -> Console:
    """For everything that is no result."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # COLUMNS is no wish there: whoever imported `readline` without a terminal has it in what its children inherit (80).
    width = None if stream.isatty() else _PIPE_COLUMNS
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def text(value: object, style: str = "", limit: int = 160) -> Text:
    """Text of any origin, made safe for a terminal."""
    return Text(clean(value, limit), style=style)


def emit_json(document: Mapping[str, Any], *, line: bool = False) -> None:
    """One JSON document on stdout, in ASCII; ``line``: on one line, at once."""
    sys.stdout.write(json.dumps(document, indent=None if line else 2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """The one progress display of this process: on stderr, and only if that is a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
