# SPDX-License-Identifier: Apache-2.0
"""Medians and quartiles of paired samples, and what may be said about them."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISY = 0.15
"""A spread (interquartile range over median) above this is called noise, in seconds or in ratios."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles by linear interpolation; one value is its own spread.

        Raises:
            ValueError: no values.
        """
        if not values:
            raise ValueError("no samples")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    @property
    def noise(self) -> float:
        """Interquartile range over median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Paired:
    """Stock against weightlife: seconds of each, and the ratio of each pair (weightlife over stock)."""

    stock: Spread
    ours: Spread
    ratio: Spread
    pairs: int

    @classmethod
    def of(cls, stock: Sequence[float], ours: Sequence[float]) -> Paired:
        """Pair by pair, in the order in which they were taken. Pairs with nothing of stock's have no ratio.

        Raises:
            ValueError: none, or not as many of one as of the other.
        """
        ratios = [b / a for a, b in zip(stock, ours, strict=True) if a]
        return cls(Spread.of(stock), Spread.of(ours), Spread.of(ratios or [math.nan]), len(ratios))

    @property
    def noisy(self) -> bool:
        """Whether the spread is too large for the ratio to be taken at its word."""
        return max(self.stock.noise, self.ours.noise, self.ratio.noise) > NOISY

    def verdict(self, goal: float) -> str:
        """`met`, `missed`, or `unclear` where the goal lies within the quartiles of the ratio."""
        if self.ratio.high <= goal:
            return "met"
        if self.ratio.low > goal:
            return "missed"
        return f"unclear, median {'met' if self.ratio.median <= goal else 'missed'}"
