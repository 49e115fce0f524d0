# SPDX-License-Identifier: Apache-2.0
"""The contexts in which a load runs: recorded at the first one, entered again for every later one.

A reload that lacks the first load's default dtype writes fp32 handles over bf16 memory (a dead process, seen with
static int8), and one under inference mode makes tensors that later in-place updates refuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(eq=False, repr=False)
class LoadContext:
    """Default dtype and gradient mode of the first processing."""

    dtype: torch.dtype
    grad: bool

    @classmethod
    def current(cls) -> LoadContext:
        """The context of the calling thread."""
        return cls(torch.get_default_dtype(), torch.is_grad_enabled())

    @classmethod
    @contextmanager
    def first(cls, inference: bool) -> Iterator[None]:
        """The context of a first load: the caller's, but without inference mode, whose tensors no reload could write.

        `inference`: the model itself was built under inference mode, so that nothing else could write it now.
        """
        if inference or not torch.is_inference_mode_enabled():
            yield
            return
        with cls.current().entered():  # the gradient mode is off there, and stays so
            yield

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter it: inference mode off, no device context of the caller's."""
        before = torch.get_default_dtype()
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
            torch.set_default_dtype(self.dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
