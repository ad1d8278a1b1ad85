"""Workers of one machine share its cores: while more of them compute, each step takes longer.

The model is one number for each count of busy workers, the same for prompts and decodes; who computes gets an
equal share at every moment.  Work is counted as the time that a step would take alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from twinpool.lab.simulate.timetable import Timetable


class Machine:
    """What workers of one machine run their steps on.

    Args:
        slowdown: How many times as long a step takes while so many workers compute, one worker first.  Beyond
            the last one it grows in proportion, as cores that are all busy are shared.
        timetable: Of the simulation.
    """

    def __init__(self, slowdown: Sequence[float], timetable: Timetable) -> None:
        assert slowdown, "a machine without a measured worker"
        self._slowdown = slowdown
        self._timetable = timetable
        self._steps: list[tuple[float, int, Callable[[], None]]] = []  # (_done_s at its end, number, action)
        self._done_s = 0.0  # work done for each of those that computed all the time
        self._at_s = 0.0  # when that was so
        self._number = 0

    def pace(self, num_busy: int) -> float:
        """Return how many times as long a step takes while so many workers compute."""
        most = len(self._slowdown)
        return self._slowdown[min(num_busy, most) - 1] * max(1.0, num_busy / most)

    def begin(self, work_s: float, on_end: Callable[[], None]) -> float:
        """Run a step that alone would take ``work_s``; return when it ends if nothing else begins or ends."""
        self._advance()
        self._number += 1
        heappush(self._steps, (self._done_s + work_s, self._number, on_end))
        self._expect()
        return self._at_s + work_s * self.pace(len(self._steps))

    def _advance(self) -> None:
        now_s = self._timetable.now_s()
        if self._steps:
            self._done_s += (now_s - self._at_s) / self.pace(len(self._steps))
        self._at_s = now_s

    def _expect(self) -> None:
        """Expect the end of the step that is done first, as things are now."""
        self._number += 1
        number = self._number
        left_s = max(0.0, self._steps[0][0] - self._done_s) * self.pace(len(self._steps))
        self._timetable.at(self._at_s + left_s, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._number:  # something began meanwhile
            return
        self._advance()
        _, _, on_end = heappop(self._steps)
        if self._steps:
            self._expect()
        on_end()
