"""Which tokens of one layer have arrived: ranges in any order, overlapping or repeated."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Coverage:
    """The union of half-open token ranges inside ``[first_token, end_token)``."""

    def __init__(self, *, first_token: int, end_token: int) -> None:
        self._missing = end_token - first_token
        self._starts: list[int] = []  # disjoint, not touching, ascending
        self._ends: list[int] = []

    @property
    def is_whole(self) -> bool:
        """Whether no token is missing."""
        return self._missing == 0

    def num_missing(self, *, first_token: int, end_token: int) -> int:
        """Return how many tokens of a range have not arrived yet."""
        if not self._ends or first_token >= self._ends[-1]:  # in order, as almost always
            return end_token - first_token
        low, high = self._touching(first_token, end_token)
        present = sum(
            max(0, min(end, end_token) - max(start, first_token))
            for start, end in zip(self._starts[low:high], self._ends[low:high], strict=True)
        )
        return end_token - first_token - present

    def add(self, *, first_token: int, end_token: int) -> None:
        """Note that a range has arrived; it must lie inside the whole."""
        self._missing -= self.num_missing(first_token=first_token, end_token=end_token)
        low, high = self._touching(first_token, end_token)
        if low < high:
            first_token = min(first_token, self._starts[low])
            end_token = max(end_token, self._ends[high - 1])
        self._starts[low:high] = [first_token]
        self._ends[low:high] = [end_token]

    def _touching(self, first_token: int, end_token: int) -> tuple[int, int]:
        return bisect_left(self._ends, first_token), bisect_right(self._starts, end_token)
