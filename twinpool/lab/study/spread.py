"""Values of a few repeats: their mean, their spread, and whether two arms differ at all.

A difference is claimed only where the ranges of the two do not overlap: then the chance that equal arms look
different is known whatever they are like, and no repeat contradicts another.  How large it is, is told by the
bootstrap interval of its mean.

Source:
    The percentile interval: Efron, Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

CONFIDENCE = 0.95
LEAST_REPEATS = 3  # with fewer nothing is concluded
_DRAWS = 10_000  # resamples, where there are more than can be gone through
_ALL_UP_TO = 6  # repeats whose resamples are all gone through: 6 ** 6 are 46,656


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high``, both included."""

    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


def bootstrap_mean(values: Sequence[float]) -> Interval:
    """Return the percentile interval of the mean under resampling; of one value, that value.

    Up to six values every resample is gone through, so the result is exact; beyond, ten thousand are drawn.
    """
    assert values, "an interval of nothing"
    size = len(values)
    if size <= _ALL_UP_TO:
        means = [math.fsum(draw) / size for draw in itertools.product(values, repeat=size)]
    else:
        source = random.Random("bootstrap")
        means = [math.fsum(source.choices(values, k=size)) / size for _ in range(_DRAWS)]
    means.sort()
    tail = (1.0 - CONFIDENCE) / 2
    cut = math.floor(tail * len(means))
    return Interval(means[cut], means[len(means) - 1 - cut])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One arm beside another in the repeats that both have, each with equal requests."""

    repeats: int
    mean: float
    other_mean: float
    range: Interval  # from the least to the most
    other_range: Interval
    difference: Interval  # of the mean of (value - other value) of a repeat

    @property
    def is_known(self) -> bool:
        """Whether there are enough repeats to say anything."""
        return self.repeats >= LEAST_REPEATS

    @property
    def differs(self) -> bool:
        """Whether the two are told apart; False means that there is no difference to be seen."""
        return self.is_known and not self.range.overlaps(self.other_range)

    @property
    def change(self) -> float | None:
        """The mean as a share of the other mean, less 1: 0.31 is 31 % more; None of nothing."""
        return self.mean / self.other_mean - 1.0 if self.other_mean > 0.0 else None


def compare(values: Mapping[int, float], others: Mapping[int, float]) -> Comparison | None:
    """Compare two arms by their values by repeat; None if they have no repeat in common."""
    both = sorted(values.keys() & others.keys())
    if not both:
        return None
    mine, theirs = [values[repeat] for repeat in both], [others[repeat] for repeat in both]
    return Comparison(
        repeats=len(both),
        mean=fmean(mine),
        other_mean=fmean(theirs),
        range=Interval(min(mine), max(mine)),
        other_range=Interval(min(theirs), max(theirs)),
        difference=bootstrap_mean([one - other for one, other in zip(mine, theirs, strict=True)]),
    )


def chance_of_disjoint(repeats: int) -> float:
    """Return how often the ranges of two equal arms do not overlap, by chance alone.

    Of all orders in which ``2 n`` different values can come, two keep the arms apart.
    """
    return 2 / math.comb(2 * repeats, repeats)
