"""Where time comes from: passed in, so that tests can own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed moment; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to.

    Args:
        now_s: The first reading, in seconds.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``; a negative step is a bug of the caller."""
        assert seconds >= 0.0, "time does not go back"
        self._now_s += seconds
