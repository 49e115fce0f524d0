# SPDX-License-Identifier: Apache-2.0
"""The digest on a CPU, compiled by numba. Importing this needs numba; `weightlife.kernels.digest` does without.

One thread: on the machine where this was written it reads 26 to 33 GB/s, and a memory copy moves 12 to 18 (a digest
reads only). The first call in a process compiles for 0.6 s, or reads numba's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, uint32, uint64

from weightlife.kernels.digest import GOLDEN, MIX_1, MIX_2, WORDS, keys

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _total(words: Any, key: Any, first_block: Any) -> Any:
    total = uint64(0)
    for b in range(words.shape[0] // WORDS):
        block = words[b * WORDS : (b + 1) * WORDS]
        s = uint64(0)
        for j in range(WORDS):
            # Explicit widths: numba would make a signed 64-bit number of a uint32 and a literal.
            x = block[j]
            x = uint32(x ^ uint32(x >> uint32(8)))
            x = uint32(x ^ uint32(x >> uint32(16)))
            s += uint64(x) * uint64(
                key[j]
            )  # both below 2**32: one vector instruction for each four or eight words
        z = s + (first_block + uint64(b) + uint64(1)) * uint64(GOLDEN)
        z ^= z >> uint64(30)
        z *= uint64(MIX_1)
        z ^= z >> uint64(27)
        z *= uint64(MIX_2)
        z ^= z >> uint64(31)
        total += z
    return total


def _compiled() -> Any:
    try:
        return njit(nogil=True, cache=True)(_total)
    except RuntimeError:  # numba has no folder that it could write its cache to
        return njit(nogil=True)(_total)


_kernel = _compiled()


def total(words: NDArray[np.uint32], first_block: int) -> int:
    """As `digest.numpy_total`; `words` may lie at any address."""
    return int(_kernel(words, keys(), np.uint64(first_block)))
