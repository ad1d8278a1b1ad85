"""What is to happen when, and the clock that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Timetable:
    """Events in order of their time; those of one moment in the order in which they were entered.

    Implements ``core.clock.Clock``: it is the time of the event that happens now.

    Attributes:
        time_s: The same; only events change it.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._last: list[Action] = []  # of this moment
        self._num_entered = 0
        self._is_stopped = False

    def now_s(self) -> float:
        return self.time_s

    def at(self, time_s: float, action: Action) -> None:
        """Let ``action`` happen at ``time_s``, which has not passed."""
        assert time_s >= self.time_s, f"{time_s} has passed, it is {self.time_s}"
        self._num_entered += 1
        heappush(self._events, (time_s, self._num_entered, action))

    def last_now(self, action: Action) -> None:
        """Let ``action`` happen after all else of this moment."""
        self._last.append(action)

    def run(self) -> None:
        """Let one event after the other happen, until there is none or one of them says ``stop``."""
        self._is_stopped = False
        events = self._events
        while not self._is_stopped:
            if self._last and not (events and events[0][0] <= self.time_s):
                last, self._last = self._last, []
                for action in last:
                    action()
            elif events:
                self.time_s, _, action = heappop(events)
                action()
            else:
                return

    def stop(self) -> None:
        """Let nothing happen after this event."""
        self._is_stopped = True
