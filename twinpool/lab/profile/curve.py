"""A curve through measured points: straight between them, and on beyond the last two."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from twinpool.core.errors import ConfigError

# Seconds of a step that can be: below is no clock's tick, above no simulation ends.
SHORTEST_S, LONGEST_S = 1e-9, 1e9


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


def check_times(field: str, rows: Sequence[Sequence[float]], *, lowest: Sequence[float]) -> None:
    """Refuse measured rows that no curve goes through: of each, what was measured and then its seconds.

    Args:
        field: Who is blamed.
        rows: The rows.
        lowest: The least that each number before the seconds can be.

    Raises:
        ConfigError: A row has too many numbers or too few, one that cannot be, or what another row has.
    """
    seen = set()
    for number, row in enumerate(rows):
        name = f"{field}[{number}]"
        if len(row) != len(lowest) + 1:
            raise ConfigError(name, f"{list(row)} is no row of {len(lowest) + 1} values")
        *point, seconds = row
        if any(value < least for value, least in zip(point, lowest, strict=True)):
            raise ConfigError(name, f"{list(row)} has a number below {', '.join(f'{x:g}' for x in lowest)}")
        if not SHORTEST_S <= seconds <= LONGEST_S:
            raise ConfigError(name, f"{seconds:g} s is not in [{SHORTEST_S:g}, {LONGEST_S:g}]")
        if tuple(point) in seen:
            raise ConfigError(name, f"{point} was measured before")
        seen.add(tuple(point))


def _through(x: float, y: float, next_x: float, next_y: float) -> Segment:
    assert next_x > x, f"two points of a curve have x = {x}"
    slope = (next_y - y) / (next_x - x)
    return Segment(y - slope * x, slope, next_x)
