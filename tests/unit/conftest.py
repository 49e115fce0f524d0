# SPDX-License-Identifier: Apache-2.0
"""Every unit test leaves the process as it found it: nothing installed, nothing open, no fault armed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Deterministic unless asked: the same examples on every machine and in every run. Speed is no property under test.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    yield
    toyhost = sys.modules.get("tests.toyhost")
    lifecycle = sys.modules.get("weightlife._engine.lifecycle")
    leaked = 0
    if toyhost is not None and lifecycle is not None:
        lives = [served.life for served in toyhost.Served.alive]
        held = sum((life.session is not None) + bool(life.poisoned) for life in lives)
        leaked = lifecycle.OpenSessions.count - held if lives else 0
        toyhost.faults.clear()
        toyhost.Served.close_all()
        lifecycle.OpenSessions.count = 0
    api = sys.modules.get("weightlife._api")
    if api is not None:
        api.uninstall()
    assert leaked == 0, f"the guard counts {leaked} sessions that nobody has open"
