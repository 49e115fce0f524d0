# SPDX-License-Identifier: Apache-2.0
"""Copy many tensors, in plain torch: the reference that the Triton kernels beside it are held to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def copy_many(dst: Sequence[torch.Tensor], src: Sequence[torch.Tensor]) -> None:
    """Copy each ``src[i]`` into the storage of ``dst[i]``.

    Every pair is checked before the first one is written, so an error leaves all of ``dst`` as it was. The checks
    are not for show: ``Tensor.copy_`` broadcasts and converts, and the CPU's ``_foreach_copy_`` broadcasts unequal
    shapes silently; neither is wanted where bytes are moved.

    Args:
        dst: Tensors to write to, of any strides and on any device. Autograd does not record the writes.
        src: As many tensors, each of the same shape and dtype as its counterpart; the device may differ.

    Raises:
        ValueError: The lengths differ, or a pair's shapes or dtypes do.
    """
    if len(dst) != len(src):
        raise ValueError(f"copy_many got {len(dst)} destination tensors but {len(src)} source tensors")
    for index, (to, of) in enumerate(zip(dst, src, strict=True)):
        if to.shape != of.shape:
            raise ValueError(
                f"pair {index}: destination shape {tuple(to.shape)}, source shape {tuple(of.shape)}"
            )
        if to.dtype != of.dtype:
            raise ValueError(f"pair {index}: destination dtype {to.dtype}, source dtype {of.dtype}")
    with torch.no_grad():
        for to, of in zip(dst, src, strict=True):
            to.copy_(of)
