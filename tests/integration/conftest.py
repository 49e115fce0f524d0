# SPDX-License-Identifier: Apache-2.0
"""Engines for the integration tests, each in a child process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration import _record, _run
from weightlife.testing import _cold

ARTIFACTS = Path(__file__).resolve().parent.parent.parent / ".artifacts"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record FILE` makes a run resumable."""
    parser.addoption(
        "--record", type=Path, help="keep outcomes here; leave out what passed with the same code"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the recorder up."""
    file = config.getoption("--record", default=None)
    if file is not None:
        config.pluginmanager.register(_record.Recorder(file))


@pytest.fixture(scope="session")
def checkpoint_root() -> Path:
    """Where tiny checkpoints are made, once for all runs."""
    return ARTIFACTS / "checkpoints"


@pytest.fixture(scope="session", autouse=True)
def _children() -> Iterator[None]:
    """Cold answers are kept beside the checkpoints; the job server ends with the session."""
    before = os.environ.get("WEIGHTLIFE_TESTING_CACHE")
    os.environ.setdefault("WEIGHTLIFE_TESTING_CACHE", str(ARTIFACTS / "oracle"))
    yield
    _cold.close()
    if before is None:
        os.environ.pop("WEIGHTLIFE_TESTING_CACHE", None)


@pytest.fixture
def engine(checkpoint_root: Path) -> Callable[..., dict[str, Any]]:
    """`engine(family, ways, weightlife=..., ...)`: the verdicts of one engine (see `_run.job`)."""

    def start(
        family: str, ways: Sequence[str], *, fresh: bool | None = None, timeout: float = 600.0, **more: Any
    ) -> dict[str, Any]:
        return _run.run(_run.job(family, ways, checkpoint_root, **more), fresh=fresh, timeout=timeout)

    return start
