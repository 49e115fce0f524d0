# SPDX-License-Identifier: Apache-2.0
"""Identifiers of spans that no seed repeats.

The SDK draws them from Python's `random`, and inference engines seed that, with the same number in every worker and
again at run time. Measured with two ranks of vLLM 0.32: both give their spans the same ids, within one trace, and one
process gives an id twice. A viewer then hangs phases under the wrong span. It also draws from a stream that belongs
to the host.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["unseed"]


def unseed(provider: Any) -> None:
    """Let a provider draw ids from the system's randomness, if it has the SDK's default generator.

    Tracers that were taken from it before keep what they have. Without an SDK there is nothing to do.
    """
    module = sys.modules.get("opentelemetry.sdk.trace.id_generator")
    if module is None or type(getattr(provider, "id_generator", None)) is not module.RandomIdGenerator:
        return
    provider.id_generator = _generator(module)


def _generator(module: Any) -> Any:
    import random

    system = random.SystemRandom()

    class SystemIdGenerator(module.RandomIdGenerator):  # type: ignore[misc]  # a base found at run time
        def generate_span_id(self) -> int:
            return system.getrandbits(64) or 1

        def generate_trace_id(self) -> int:
            return system.getrandbits(128) or 1

    return SystemIdGenerator()
