"""Workers of one machine share its cores: while more of them compute, each step takes longer.

How much longer is one number for each count of busy workers, for steps with a prompt in them and for steps
that only decode; who computes goes on at that pace at every moment.  Work is counted as the time that a step
would take alone.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from twinpool.lab.profile.slowdown import Slowdown
from twinpool.lab.simulate.timetable import Timetable


class Machine:
    """What workers of one machine run their steps on.

    Args:
        slowdown: As it was measured.
        timetable: Of the simulation.
    """

    def __init__(self, slowdown: Slowdown, timetable: Timetable) -> None:
        self._slowdown = slowdown
        self._timetable = timetable
        self._prompts, self._decodes = _Steps(has_prompt=True), _Steps(has_prompt=False)
        self._at_s = 0.0  # up to when what is done is counted
        self._number = 0

    def begin(self, work_s: float, on_end: Callable[[], None], *, has_prompt: bool) -> float:
        """Run a step that alone would take ``work_s``; return when it ends if nothing else begins or ends."""
        self._advance()
        self._number += 1
        steps = self._prompts if has_prompt else self._decodes
        steps.add(work_s, self._number, on_end)
        self._expect()
        return self._at_s + work_s * self._pace(steps)

    @property
    def _running(self) -> list[_Steps]:
        return [steps for steps in (self._prompts, self._decodes) if steps.count]

    def _pace(self, steps: _Steps) -> float:
        num_busy = self._prompts.count + self._decodes.count
        return self._slowdown.of(num_busy, has_prompt=steps.has_prompt)

    def _advance(self) -> None:
        now_s = self._timetable.now_s()
        for steps in self._running:
            steps.done_s += (now_s - self._at_s) / self._pace(steps)
        self._at_s = now_s

    def _expect(self) -> None:
        """Expect the end of the step that is done first, as things are now."""
        self._number += 1
        number = self._number
        steps = min(self._running, key=lambda steps: steps.left_s * self._pace(steps))
        end_s = self._at_s + steps.left_s * self._pace(steps)
        self._timetable.at(end_s, lambda: self._end(number, steps))

    def _end(self, number: int, steps: _Steps) -> None:
        if number != self._number:  # something began meanwhile
            return
        self._advance()
        on_end = steps.take_first()
        if self._running:
            self._expect()
        on_end()


class _Steps:
    """Steps that run at one pace.

    Args:
        has_prompt: Whether each of them has one.

    Attributes:
        has_prompt: As above.
        done_s: Work done for each of those that computed all the time.
    """

    def __init__(self, *, has_prompt: bool) -> None:
        self.has_prompt = has_prompt
        self.done_s = 0.0
        self._ends: list[tuple[float, int, Callable[[], None]]] = []  # (done_s at its end, number, action)

    @property
    def count(self) -> int:
        return len(self._ends)

    @property
    def left_s(self) -> float:
        """Work left for the one that ends first."""
        return max(0.0, self._ends[0][0] - self.done_s)

    def add(self, work_s: float, number: int, on_end: Callable[[], None]) -> None:
        heappush(self._ends, (self.done_s + work_s, number, on_end))

    def take_first(self) -> Callable[[], None]:
        return heappop(self._ends)[2]
