# SPDX-License-Identifier: Apache-2.0
"""Time of copies from the host's memory to a device, split off from what the loaders take besides.

It is the wall time of the thread that loads. From pageable memory, which is what files and most senders give, that is
the copy: CUDA returns once the source may be reused. A loader that asks for a non-blocking copy from pinned memory (none of
vLLM 0.32's does) gets the thread back at once: only the launch counts here, and what is left of the copy is
waited for later. Two readings of a clock a copy; on a CPU there is nothing to split, and nothing is read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from weightlife._engine.signatures import COPY_OPERATORS, signature_of

if TYPE_CHECKING:
    from weightlife._engine.receive import Receiver

# `.to(device)` is the last one: some loaders move a tensor before they write it.
_COPIES = COPY_OPERATORS | {"aten::_to_copy"}


def on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the host's memory."""
    return tensor.device.type == "cpu"


class HostCopies:
    """Adds up copies of one load. `seconds` may be read at any time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @classmethod
    def of(cls, model: torch.nn.Module) -> HostCopies | None:
        """A sum for a model on a device; None for one in the host's memory (told by its first parameter)."""
        first = next(model.parameters(), None)
        return None if first is None or on_host(first) else cls()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation that a loader was seen to make."""
        if signature_of(func).name not in _COPIES:
            return func(*args, **kwargs)
        began = perf_counter()
        out = func(*args, **kwargs)
        took = perf_counter() - began
        if _crosses(out, args):
            self.seconds += took
        return out

    def by_rule(
        self, items: Iterator[tuple[str, torch.Tensor]], receiver: Receiver
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Items of a load, where those by rule are timed from outside: nobody sees their operations.

        Such an item's loader copies its tensor and does nothing else, so its few microseconds count with the copy.
        """
        home = threading.get_ident()
        for item in items:
            timed = receiver.aside and on_host(item[1]) and threading.get_ident() == home
            began = perf_counter() if timed else 0.0
            yield item
            if timed:
                self.seconds += perf_counter() - began


def _crosses(out: Any, args: Any) -> bool:
    written = out if isinstance(out, torch.Tensor) else args[0]
    if isinstance(written, (list, tuple)):  # `_foreach_copy_`
        return any(not on_host(a) and on_host(b) for a, b in zip(written, args[1], strict=False))
    source = args[1] if len(args) > 1 else args[0]
    return isinstance(source, torch.Tensor) and on_host(source) and not on_host(written)


__all__ = ["HostCopies", "on_host"]
