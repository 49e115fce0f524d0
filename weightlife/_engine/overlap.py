# SPDX-License-Identifier: Apache-2.0
"""Copies of layers that were processed early, on a stream of their own: layer i is copied while i+1 is received.

Nothing waits on the host. The order that matters is kept on the device:

- a copy begins after what the current stream was told before: hooks that made the new values, undo copies of the old;
- the memory on both ends is not given to anybody else before the copy is done, also if its last reference goes;
- whoever reads the copied memory through the current stream has called `join()` before: a finish, an abort.

A CPU has no streams: there a copy is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class Streams(Protocol):
    """What is asked of a kind of device that has streams. A stream has `wait_stream(other)`."""

    def new(self, device: torch.device) -> Any:
        """A stream of its own."""

    def current(self, device: torch.device) -> Any:
        """The stream that operations of this thread go to."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Operations of this thread, on that stream's device, go to it."""

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        """The tensor's memory is in use until what the stream was told so far is done."""


class _Cuda:
    def new(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


_KINDS: dict[str, Streams] = {"cuda": _Cuda()}


class SideCopies:
    """The early copies of one session.

    Args:
        copy: copies (destination, source) pairs, on the streams that are current then.
    """

    def __init__(self, copy: Callable[[list[Pair]], object]) -> None:
        self._copy = copy
        self.streams: dict[torch.device, Any] = {}

    def __call__(self, pairs: list[Pair]) -> None:
        """Copy beside the current streams; where a device has none, as ever.

        Raises:
            What the copy raises. What it had begun is still waited for by `join`.
        """
        with ExitStack() as stack:
            for device in _devices(pairs):
                kind = _KINDS[device.type]
                side = self.streams.get(device)
                if side is None:
                    side = self.streams[device] = kind.new(device)
                side.wait_stream(kind.current(device))
                # Also where the copy raises: something may have begun.
                stack.callback(_record, kind, pairs, device, side)
                stack.enter_context(kind.use(side))
            self._copy(pairs)

    def join(self) -> None:
        """What the current streams are told from here on comes after every copy."""
        for device, side in self.streams.items():
            _KINDS[device.type].current(device).wait_stream(side)


def _devices(pairs: Sequence[Pair]) -> dict[torch.device, None]:
    return dict.fromkeys(t.device for pair in pairs for t in pair if t.device.type in _KINDS)


def _record(kind: Streams, pairs: Sequence[Pair], device: torch.device, side: Any) -> None:
    for pair in pairs:
        for tensor in pair:
            if tensor.device == device:
                kind.record(tensor, side)


__all__ = ["SideCopies", "Streams"]
