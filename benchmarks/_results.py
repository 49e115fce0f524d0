# SPDX-License-Identifier: Apache-2.0
"""RESULTS.md in sections: each benchmark writes its own and leaves the others alone."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
_ORDER = ("stock", "verify", "ledger", "telemetry", "digests", "kernels")


def write(name: str, text: str, place: Path = RESULTS) -> None:
    """Put a section into the file, in the place of the one of that name.

    Raises:
        ValueError: no section has this name.
    """
    if name not in _ORDER:
        raise ValueError(f"{name!r} is no section: {', '.join(_ORDER)}")
    old = place.read_text(encoding="utf-8") if place.exists() else ""
    found = dict(re.findall(r"<!-- begin (\w+) -->\n(.*?)\n<!-- end \1 -->", old, flags=re.DOTALL))
    found[name] = text.strip()
    parts = [f"<!-- begin {key} -->\n{found[key]}\n<!-- end {key} -->" for key in _ORDER if key in found]
    place.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def machine() -> str:
    """The processor, cores and versions in words, without names of machines."""
    import os
    import platform

    import torch

    cpu = "unknown processor"
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores ({cpu}), Python {platform.python_version()}, torch {torch.__version__}"
