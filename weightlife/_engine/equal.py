# SPDX-License-Identifier: Apache-2.0
"""Two tensors bit by bit: NaN equals itself, minus zero does not equal zero. Dense tensors are not copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements of a mask that is held at one time: 16 MiB for the mask, and as much again where views are not dense.
_PIECE = 1 << 24


@dataclass(frozen=True)
class Unequal:
    """How many elements differ, and the index of the first."""

    count: int
    first: tuple[int, ...]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers, for comparison (a view, and one dimension more where an element is two words)."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() not in _WORDS:
        plain = torch.view_as_real(plain)
    return plain.view(_WORDS[plain.element_size()])


def _dense(tensor: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor without gaps as 8-byte words, where they can be; the tail is the caller's."""
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return None
    size = tensor.numel() * tensor.element_size()
    flat = tensor.view(-1).view(torch.uint8)
    aligned = flat.storage_offset() % 8 == 0 and size >= 8
    return flat[: size // 8 * 8].view(torch.int64) if aligned else None


def unequal(a: torch.Tensor, b: torch.Tensor) -> Unequal | None:
    """How two tensors of one shape and dtype differ, or None where they don't."""
    left, right = bits(a), bits(b)
    if left.device != right.device:
        right = right.to(left.device)
    if left.numel() == 0 or _same(left, right):
        return None
    per = left.numel() // a.numel()  # words of an element
    count, first = 0, -1
    flat_left, flat_right = left.reshape(-1, per), right.reshape(-1, per)
    for start in range(0, a.numel(), _PIECE):
        mask = (flat_left[start : start + _PIECE] != flat_right[start : start + _PIECE]).any(dim=1)
        some = int(mask.sum())
        if some and first < 0:
            first = start + int(mask.to(torch.uint8).argmax())
        count += some
    return Unequal(count, tuple(_unravelled(first, tuple(a.shape))))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    x, y = _dense(left), _dense(right)
    if x is None or y is None:
        return bool(torch.equal(left, right))
    whole = x.numel() * 8
    if not torch.equal(x, y):
        return False
    tail_x, tail_y = left.view(-1).view(torch.uint8)[whole:], right.view(-1).view(torch.uint8)[whole:]
    return bool(torch.equal(tail_x, tail_y))


def _unravelled(index: int, shape: tuple[int, ...]) -> list[int]:
    out: list[int] = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        out.append(place)
    return out[::-1]


__all__ = ["Unequal", "bits", "unequal"]
