# SPDX-License-Identifier: Apache-2.0
"""The command line, an optional extra: ``weightlife --help``, or ``python -m weightlife``."""

from __future__ import annotations

import sys

__all__ = ["main"]

_NEEDS = ("typer", "rich", "jinja2")


def main() -> int:
    """Run the command line; returns the exit code. Without the extra it says how to get it."""
    try:
        from weightlife.cli.app import run

        return run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NEEDS:
            raise
        print(f"weightlife: the command line needs {missing}: pip install 'weightlife[cli]'", file=sys.stderr)
        return 2
