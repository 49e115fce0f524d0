# SPDX-License-Identifier: Apache-2.0
"""weightlife: what happens to a model's weights while the process that serves it lives.

`import weightlife; weightlife.install()`, or `WEIGHTLIFE=1` in the environment, and every weight load and reload in
this process and its workers is one session: exactly once, in order, complete, in the storage that captured graphs
read, undone when it fails, and visible. Importing this package loads neither torch nor vLLM nor OpenTelemetry's SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weightlife import errors
from weightlife._version import __version__

if TYPE_CHECKING:
    from weightlife._addresses import declare, seal
    from weightlife._api import (
        configure_otel,
        install,
        last_report,
        last_reports,
        manifest,
        manifests,
        observe,
        status,
        uninstall,
    )
    from weightlife._finders import register_finder, unregister_finder
    from weightlife._integrity import check_digests, digest, expect
    from weightlife._load import load
    from weightlife._loaders import wrap_loader
    from weightlife._manifest import Manifest
    from weightlife._safetensors import read_safetensors
    from weightlife._session import abort, session, watch
    from weightlife._verify import verify

_LAZY = {
    "configure_otel": "weightlife._api",
    "install": "weightlife._api",
    "uninstall": "weightlife._api",
    "observe": "weightlife._api",
    "status": "weightlife._api",
    "last_report": "weightlife._api",
    "last_reports": "weightlife._api",
    "abort": "weightlife._session",
    "manifest": "weightlife._api",
    "manifests": "weightlife._api",
    "Manifest": "weightlife._manifest",
    "declare": "weightlife._addresses",
    "seal": "weightlife._addresses",
    "register_finder": "weightlife._finders",
    "unregister_finder": "weightlife._finders",
    "check_digests": "weightlife._integrity",
    "digest": "weightlife._integrity",
    "expect": "weightlife._integrity",
    "load": "weightlife._load",
    "read_safetensors": "weightlife._safetensors",
    "session": "weightlife._session",
    "verify": "weightlife._verify",
    "watch": "weightlife._session",
    "wrap_loader": "weightlife._loaders",
}

__all__ = [
    "Manifest", "__version__", "abort", "check_digests", "configure_otel", "declare", "digest", "errors", "expect",
    "install", "last_report", "last_reports", "load", "manifest", "manifests", "observe", "read_safetensors",
    "register_finder", "seal", "session", "status", "uninstall", "unregister_finder", "verify", "watch", "wrap_loader",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
