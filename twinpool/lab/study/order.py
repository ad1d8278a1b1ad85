"""Which cell comes when.

Arms are interleaved, so that what changes slowly on a machine (its temperature, its neighbours) meets all of
them alike; who comes first changes from one group of cells to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from twinpool.lab.study.cell import Cell
from twinpool.lab.study.settings import SearchConfig, StudySettings

T = TypeVar("T")

_STEP = 2.0  # from one rate to the next, until one passes and one fails
_FEWEST = 1 / 16  # of the rate at which a search begins; an arm that fails there too has no such rate


def all_cells(settings: StudySettings) -> tuple[Cell, ...]:
    """Return the cells of a study with given rates, in the order in which they are measured."""
    names = [arm.name for arm in settings.arms]
    return tuple(
        Cell(arm=name, rate=rate, repeat=repeat)
        for repeat in range(settings.repeats)
        for number, rate in enumerate(settings.rates)
        for name in rotated(names, repeat + number)
    )


def rotated(items: Sequence[T], by: int) -> tuple[T, ...]:
    """Return the items beginning with number ``by``, and then those before it."""
    start = by % len(items)
    return (*items[start:], *items[:start])


def next_rate(
    shares: Mapping[float, float], config: SearchConfig, *, near: float | None = None
) -> float | None:
    """Return the rate that a search tries next, or None when it has ended.

    Args:
        shares: The share of requests within the limits, by rates that were tried.
        config: Where the search begins and ends.
        near: The result of an earlier search for the same thing: this one begins there, with small steps.
    """
    if not shares:
        return config.least if near is None else near
    step = _STEP if near is None else config.precision**2
    passed, failed = bracket(shares, config.share)
    if failed is None:
        assert passed is not None, "a rate that was tried passes or fails"
        return None if passed >= config.most else _rounded(min(passed * step, config.most))
    if passed is None:
        return None if failed <= config.least * _FEWEST else _rounded(failed / step)
    middle = _rounded(math.sqrt(passed * failed))
    return None if failed / passed <= config.precision or middle in shares else middle


def bracket(shares: Mapping[float, float], least: float) -> tuple[float | None, float | None]:
    """Return the highest rate that passes with no lower one that fails, and the lowest one that fails.

    Args:
        shares: Of requests within the limits, by rate.
        least: The share that passes.
    """
    failed = min((rate for rate, share in shares.items() if share < least), default=None)
    passed = max(
        (rate for rate, share in shares.items() if share >= least and (failed is None or rate < failed)),
        default=None,
    )
    return passed, failed


def _rounded(rate: float) -> float:
    """Three digits are enough, and make names that can be read."""
    return float(f"{rate:.3g}")
