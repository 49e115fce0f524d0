# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point: runs in the front end, the engine core, every worker, more than once.

Inert unless asked (`WEIGHTLIFE=1`, or `install()` in the parent, which exports it), and never raises into the host.
"""

from __future__ import annotations

import logging
import os


def register() -> None:
    """Install weightlife in this process if the environment asks for it."""
    from weightlife.config import enabled_from_env

    try:
        if not enabled_from_env(os.environ):
            return
        from weightlife import _api

        _api.install_from_environment()
    except Exception:
        logging.getLogger("weightlife").exception(
            "weightlife could not be installed; the host runs its own path"
        )
