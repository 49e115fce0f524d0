# SPDX-License-Identifier: Apache-2.0
"""What a piece of work costs a process: wall, CPU seconds, page faults and peak resident memory."""

from __future__ import annotations

import gc
import resource
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def _status(field: str) -> int | None:
    """A field of /proc/self/status in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def _reset_peak() -> bool:
    """Set the kernel's peak of resident memory back to the present level (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


@contextmanager
def measured(out: dict[str, float | None], collect: bool = True) -> Iterator[None]:
    """Fill `out` with `seconds`, `cpu_seconds`, `faults`, `peak_bytes` and `left_bytes` of the body.

    `peak_bytes` is the highest resident memory over the level before, pages of mapped files included (a checkpoint
    that is read through a mapping counts, for stock as for weightlife); None where the kernel cannot tell.
    `left_bytes` is what the body left resident.
    """
    if collect:
        gc.collect()
    known = _reset_peak()
    before, rss = resource.getrusage(resource.RUSAGE_SELF), _status("VmRSS")
    started = time.perf_counter()
    try:
        yield
    finally:
        out["seconds"] = time.perf_counter() - started
        after, peak = resource.getrusage(resource.RUSAGE_SELF), _status("VmHWM")
        now = _status("VmRSS")
        out["cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        out["faults"] = after.ru_minflt - before.ru_minflt
        out["peak_bytes"] = None if peak is None or rss is None or not known else max(0, peak - rss)
        out["left_bytes"] = None if now is None or rss is None else now - rss
