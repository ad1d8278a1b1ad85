"""A curve through measured points: straight between them, and on beyond the last two."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Segment(NamedTuple):
    """``y = base + slope * x`` for every ``x`` up to ``end``."""

    base: float
    slope: float
    end: float  # infinite for the last one


class Curve:
    """Linear interpolation; outside of the points it goes on as between the nearest two.

    Args:
        points: ``(x, y)`` in any order, no ``x`` twice; a single one makes a constant.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        self.points = sorted(points)
        assert self.points, "a curve needs a point"
        pairs = zip(self.points, self.points[1:], strict=False)
        self.segments = [_through(*first, *second) for first, second in pairs]
        if not self.segments:
            self.segments = [Segment(self.points[0][1], 0.0, float("inf"))]
        self.segments[-1] = self.segments[-1]._replace(end=float("inf"))
        self._ends = [segment.end for segment in self.segments]

    def at(self, x: float) -> float:
        """Return ``y`` at ``x``."""
        segment = self.segment(x)
        return segment.base + segment.slope * x

    def segment(self, x: float) -> Segment:
        """Return the segment on which ``x`` lies; of two, the right one."""
        return self.segments[min(bisect_right(self._ends, x), len(self.segments) - 1)]


def _through(x: float, y: float, next_x: float, next_y: float) -> Segment:
    assert next_x > x, f"two points of a curve have x = {x}"
    slope = (next_y - y) / (next_x - x)
    return Segment(y - slope * x, slope, next_x)
