# SPDX-License-Identifier: Apache-2.0
"""RESULTS.md in sections: each benchmark writes its own and leaves the others alone."""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
_ORDER = ("stock", "verify", "ledger", "telemetry", "digests", "kernels")


def write(name: str, text: str, place: Path = RESULTS) -> None:
    """Put a section into the file, in the place of the one of that name. Everything else stays as it is.

    Raises:
        ValueError: no section has this name.
    """
    if name not in _ORDER:
        raise ValueError(f"{name!r} is no section: {', '.join(_ORDER)}")
    old = place.read_text(encoding="utf-8") if place.exists() else ""
    made = f"<!-- begin {name} -->\n{text.strip()}\n<!-- end {name} -->"
    spans = {
        m[1]: m.span() for m in re.finditer(r"<!-- begin (\w+) -->\n.*?\n<!-- end \1 -->", old, re.DOTALL)
    }
    if name in spans:
        start, stop = spans[name]
        place.write_text(old[:start] + made + old[stop:], encoding="utf-8")
        return
    before = [spans[key][1] for key in _ORDER[: _ORDER.index(name)] if key in spans]
    at = max(before, default=0)
    parts = (old[:at].strip(), made, old[at:].strip())
    place.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


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
