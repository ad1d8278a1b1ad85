"""The highest rate that is met, found by doubling steps and then halving them.  Knows no simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LEAST_RATE, MOST_RATE = 1e-3, 1e6  # requests per second
_FIRST_STRIDE = 4


@dataclass(frozen=True, slots=True)
class RateGrid:
    """Rates at equal ratios, by number; the same ones for every layout."""

    precision: float  # ratio of two neighbours, less 1

    @property
    def least(self) -> int:
        return self.step_at(LEAST_RATE)

    @property
    def most(self) -> int:
        return self.step_at(MOST_RATE)

    def rate(self, step: int) -> float:
        return math.exp(step * math.log1p(self.precision))

    def step_at(self, rate: float) -> int:
        """Return the number of the highest rate that is not above ``rate``."""
        return math.floor(math.log(rate) / math.log1p(self.precision) + 1e-9)


def highest_step(is_met: Callable[[int], bool], *, first: int, least: int, most: int) -> int | None:
    """Return a step that is met while the next one is not; None if ``least`` is not met.

    It is the highest one where all steps below a step that is met are met too.  The search begins at
    ``first``, and asks about ``2 * log2`` of the distance from there times.
    """
    low, high = least - 1, most + 1  # met, or below all; not met, or above all
    step, stride = min(max(first, least), most), _FIRST_STRIDE
    while True:
        if is_met(step):
            low = step
            if step == most or high <= most:
                break
            step = min(step + stride, most)
        else:
            high = step
            if step == least or low >= least:
                break
            step = max(step - stride, least)
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low if low >= least else None
