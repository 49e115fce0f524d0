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

HERE = Path(__file__).resolve().parent
ARTIFACTS = HERE.parent.parent / ".artifacts"


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


# Modules whose tests are independent of each other, and those where one engine answers for all tests of a parameter.
_APART = frozenset({"test_reload_matrix", "test_modes", "test_fuzz", "test_first_load"})
_BY_ENGINE = {"test_clients": "engine", "test_field_tables": "job", "test_manifest": "family"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say which tests must share a process when they are spread over several (``pytest -n 2 --dist loadgroup``)."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        module = item.path.stem
        given = getattr(item, "callspec", None)
        name = None if given is None else given.params.get(_BY_ENGINE.get(module, ""))
        if "compile_cache" in item.name:
            group = "compiled"  # they look at one cache folder
        elif module in _APART:
            continue
        elif isinstance(name, str):
            group = f"{module}-{name}"
        else:
            group = module
        item.add_marker(pytest.mark.xdist_group(group))


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
