# SPDX-License-Identifier: Apache-2.0
"""Where a Chromium is: WEIGHTLIFE_BROWSER names one, or it is on PATH (Debian, Ubuntu: `apt-get install chromium`)."""

from __future__ import annotations

import os
import shutil

import pytest


def find() -> str:
    """Its path. The test fails where there is none: what it would have shown was not shown."""
    names = (os.environ.get("WEIGHTLIFE_BROWSER"), "chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        pytest.fail(
            "these tests need a Chromium: apt-get install chromium, or name one in WEIGHTLIFE_BROWSER",
            pytrace=False,
        )
    return path
