# SPDX-License-Identifier: Apache-2.0
"""What vLLM is here: ``python -m weightlife.hosts.vllm.probe`` prints one JSON document about it.

A process of its own, for ``weightlife doctor`` and ``seams``: to import the engine takes some ten seconds, writes logs
to stdout, and may crash natively where an installation is broken. The seams are really applied here, through vLLM's own
plugin mechanism if that works, so what is reported is what an engine would get.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from importlib import metadata
from typing import Any

__all__ = ["probe"]


def probe() -> dict[str, Any]:
    """The host's version and platform, whether the plugin installs, and the state of every seam. Plain data."""
    out: dict[str, Any] = {"schema_version": 1, "vllm": None, "error": None, "plugin": None, "seams": []}
    try:
        module = importlib.import_module("vllm")
        out["vllm"] = {"version": str(getattr(module, "__version__", "")), "distribution": _distribution()}
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            out["error"] = f"vLLM does not import: {error}"
        return {**out, **_devices()}
    except Exception as error:  # noqa: BLE001 - a broken installation is what this is to find out
        return {**out, **_devices(), "error": f"vLLM does not import: {type(error).__name__}: {error}"}
    out["plugin"] = _plugin()
    out["seams"] = _seams()
    return {**out, **_devices(), "platform": _platform()}


def _distribution() -> str:
    found = metadata.packages_distributions().get("vllm", [])
    return ", ".join(sorted(set(found)))


def _plugin() -> dict[str, Any]:
    """Load vLLM's general plugins as an engine does, and see whether weightlife is there afterwards."""
    from weightlife.hosts import runtime

    points = [p for p in metadata.entry_points(group="vllm.general_plugins") if p.name == "weightlife"]
    found: dict[str, Any] = {"registered": bool(points), "installs": False, "error": None}
    try:
        importlib.import_module("vllm.plugins").load_general_plugins()
    except Exception as error:  # noqa: BLE001 - another package's plugin may be what fails
        found["error"] = f"{type(error).__name__}: {error}"
    found["installs"] = runtime.installed()
    return found


def _seams() -> list[dict[str, Any]]:
    from weightlife import _api
    from weightlife.hosts import runtime
    from weightlife.hosts.vllm.table import SEAMS

    if not runtime.installed():
        _api.install_from_environment()
    broken: dict[str, str] = {}
    for module in dict.fromkeys(seam.module for seam in SEAMS):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not (error.name and f"{module}.".startswith(f"{error.name}.")):
                broken[module] = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - one module that needs a device must not hide the others
            broken[module] = f"{type(error).__name__}: {error}"
    rows = runtime.patcher().status()
    for row in rows:
        module = row["target"].partition(":")[0]
        if row["state"] == "wrapped":
            row["found"] = True
        else:
            row["found"] = False
            row["state"] = f"not importable: {broken[module]}" if module in broken else row["state"]
            if row["state"] == "waiting for import":
                row["state"] = "module absent in this version"
    return rows


def _platform() -> str:
    try:
        return str(importlib.import_module("vllm.platforms").current_platform.device_name)
    except Exception as error:  # noqa: BLE001 - as above
        return f"unknown ({type(error).__name__})"


def _devices() -> dict[str, Any]:
    out: dict[str, Any] = {"torch": None, "devices": [], "triton": None}
    try:
        torch = importlib.import_module("torch")
        out["torch"] = str(torch.__version__)
        if torch.cuda.is_available():
            out["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except Exception as error:  # noqa: BLE001 - as above
        out["torch_error"] = f"{type(error).__name__}: {error}"
    try:
        out["triton"] = str(importlib.import_module("triton").__version__)
    except Exception as error:  # noqa: BLE001 - as above
        out["triton_error"] = f"{type(error).__name__}: {error}"
    return out


def _main() -> None:
    # stdout belongs to the answer: what the host prints there goes to stderr
    answer = os.dup(1)
    os.dup2(2, 1)
    document = json.dumps(probe())
    with os.fdopen(answer, "w") as stream:
        stream.write(document + "\n")
    sys.stderr.flush()
    os._exit(0)  # threads and farewells of a half-started engine are nobody's business here


if __name__ == "__main__":
    _main()
