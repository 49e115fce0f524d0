# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of tensors: where they are and how they are read, without their values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from weightlife._engine.skeleton import storage_key


class Print(NamedTuple):
    """The fingerprint of one tensor: where it is and how it is read. Numbers in bytes or elements of its dtype."""

    key: int
    pointer: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def fingerprint(tensor: torch.Tensor) -> Print | None:
    """The fingerprint of a tensor, or None where it has no storage to speak of."""
    key = storage_key(tensor)
    if key is None:
        return None
    memory = tensor.untyped_storage()
    try:
        pointer = memory.data_ptr()
    except RuntimeError:  # a storage without memory
        return None
    return Print(
        key, pointer, memory.nbytes(), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(),
        tensor.dtype, tensor.device,
    )  # fmt: skip


def same_geometry(tensor: torch.Tensor, seen: Print) -> bool:
    """Whether a tensor is read as it was: shape, stride, dtype and device."""
    return (
        tuple(tensor.shape) == seen.shape
        and tensor.stride() == seen.stride
        and tensor.dtype == seen.dtype
        and tensor.device == seen.device
    )


def same_view(tensor: torch.Tensor, seen: Print) -> bool:
    """The same, and from the same place of its storage."""
    return tensor.storage_offset() == seen.offset and same_geometry(tensor, seen)


def words(seen: Print) -> str:
    """A fingerprint as errors write it."""
    return (
        f"{str(seen.dtype).removeprefix('torch.')}{list(seen.shape)} stride {list(seen.stride)} on {seen.device},"
        f" storage of {seen.nbytes} bytes"
    )


__all__ = ["Print", "fingerprint", "same_geometry", "same_view", "words"]
