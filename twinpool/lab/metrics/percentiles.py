"""Mean and percentiles of a stream of numbers, in memory that does not grow with it.

Exact up to ``EXACT`` values.  Beyond that, values are counted in buckets whose bounds grow by a constant
factor, and every percentile is within ``RELATIVE_ERROR`` of the exact one.  Knows nothing of requests.

Source:
    The buckets and their middle are those of DDSketch (Masson, Rim, Lee, VLDB 2019, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RELATIVE_ERROR = 0.005
EXACT = 8192  # values that are kept as they are; so many are folded into buckets at a time

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GROWTH = math.log(_GROWTH)
_LEAST, _MOST = 1e-9, 1e9  # values outside count as 0 and as the largest one
_LEAST_POWER = math.ceil(math.log(_LEAST) / _LOG_GROWTH)
_NUM_BUCKETS = math.ceil(math.log(_MOST) / _LOG_GROWTH) - _LEAST_POWER + 2  # the first one is of zeros


class Percentiles:
    """Numbers of 0 and more, added one by one or many at a time."""

    def __init__(self) -> None:
        self._fresh: list[float] = []
        self._buckets: np.ndarray | None = None  # [_NUM_BUCKETS], int64, once there were EXACT values
        self._folded = 0
        self._folded_sum = 0.0
        self._least = math.inf
        self._most = -math.inf

    def __len__(self) -> int:
        return self._folded + len(self._fresh)

    def add(self, value: float) -> None:
        """Count one value."""
        assert value >= 0.0, f"{value} is no latency"
        self._fresh.append(value)
        if len(self._fresh) >= EXACT:
            self._fold()

    def extend(self, values: Sequence[float]) -> None:
        """Count many values; this is quicker than one by one."""
        self._fresh += values
        if len(self._fresh) >= EXACT:
            self._fold()

    def mean(self) -> float | None:
        """Return the arithmetic mean; None of nothing."""
        return (self._folded_sum + math.fsum(self._fresh)) / len(self) if len(self) else None

    def percentile(self, percent: float) -> float | None:
        """Return what ``percent`` of the values do not exceed, between two of them as numpy does.

        Returns:
            None of nothing; else the exact percentile, or one within ``RELATIVE_ERROR`` of it.
        """
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: Sequence[float]) -> list[float | None]:
        """Return the percentile of each of ``percents``, which costs little more than one."""
        if not len(self):
            return [None] * len(percents)
        if self._buckets is None:
            return [float(value) for value in np.percentile(self._checked(), percents)]
        self._fold()
        upto = np.cumsum(self._buckets)
        return [self._interpolated(upto, percent / 100 * (self._folded - 1)) for percent in percents]

    def to_json(self) -> dict[str, float | int | None]:
        """Return count, mean, extremes and the usual percentiles."""
        low, p50, p90, p95, p99, high = self.percentiles((0, 50, 90, 95, 99, 100))
        return {
            "count": len(self),
            "mean": self.mean(),
            "min": low,
            "p50": p50,
            "p90": p90,
            "p95": p95,
            "p99": p99,
            "max": high,
        }

    def _fold(self) -> None:
        if self._buckets is None:
            self._buckets = np.zeros(_NUM_BUCKETS, np.int64)
        if not self._fresh:
            return
        values = self._checked()
        powers = np.ceil(np.log(np.clip(values, _LEAST, _MOST)) / _LOG_GROWTH).astype(np.int64)
        places = np.where(values < _LEAST, 0, powers - _LEAST_POWER + 1)
        self._buckets += np.bincount(places, minlength=_NUM_BUCKETS)
        self._folded += len(values)
        self._folded_sum += float(values.sum())
        self._least, self._most = min(self._least, float(values.min())), max(self._most, float(values.max()))
        self._fresh.clear()

    def _checked(self) -> np.ndarray:
        values = np.fromiter(self._fresh, np.float64, len(self._fresh))
        assert values.min() >= 0.0, f"{values.min()} is no latency"
        return values

    def _interpolated(self, upto: np.ndarray, rank: float) -> float:
        below = math.floor(rank)
        low, high = self._at(upto, below), self._at(upto, math.ceil(rank))
        return low + (high - low) * (rank - below)

    def _at(self, upto: np.ndarray, rank: int) -> float:
        """The value of this rank, counted from 0: the middle of its bucket, but none that there cannot be."""
        if rank == 0:
            return self._least
        if rank == self._folded - 1:
            return self._most
        place = int(np.searchsorted(upto, rank, side="right"))
        middle = 2 * _GROWTH ** (place - 1 + _LEAST_POWER) / (_GROWTH + 1) if place else 0.0
        return min(max(middle, self._least), self._most)
