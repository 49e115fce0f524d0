# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels without a GPU. `TRITON_INTERPRET=1` must be set before triton is imported: `make test-kernels`."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if "tests/kernels" in item.path.as_posix()]
    if here and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/kernels need TRITON_INTERPRET=1 in the environment: make test-kernels")
