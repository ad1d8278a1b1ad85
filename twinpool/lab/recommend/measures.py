"""What makes one layout better than another: the highest rate within limits, or what it answers at most."""

from __future__ import annotations

from typing import Protocol

from twinpool.core.errors import ConfigError
from twinpool.lab.recommend.layout import Layout
from twinpool.lab.recommend.search import highest_step
from twinpool.lab.recommend.trials import Trials


class Measure(Protocol):
    """Gives a layout a value in requests per second; more is better."""

    def value(self, layout: Layout, repeat: int, *, near: float) -> float:
        """Return the value; ``near`` is where to begin to look, and changes nothing else.

        Raises:
            ConfigError: The load has too few requests to tell.
        """
        ...

    def is_below(self, layout: Layout, repeat: int, value: float) -> bool:
        """Say whether it is known, at the price of one simulation, that the layout's value is less."""
        ...


class HighestRate:
    """The highest rate of the grid at which enough requests are answered within the limits, or 0."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._grid = trials.grid

    def value(self, layout: Layout, repeat: int, *, near: float) -> float:
        step = highest_step(
            lambda step: self._trials.is_met(layout, repeat, step),
            first=self._grid.step_at(near) if near > 0.0 else self._grid.least,
            least=self._grid.least,
            most=self._grid.most,
        )
        if step == self._grid.most:
            problem = f"so few that {layout.name} answers them in time at any rate: give a larger count"
            raise ConfigError("workload", f"{len(self._trials.load.repeats[repeat])} requests are {problem}")
        return 0.0 if step is None else self._grid.rate(step)

    def is_below(self, layout: Layout, repeat: int, value: float) -> bool:
        return not self._trials.is_met(layout, repeat, self._grid.step_at(value))


class AnsweredRate:
    """The requests answered per second if all are sent at once, and as many again until it has settled."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def value(self, layout: Layout, repeat: int, *, near: float) -> float:
        return self._trials.answered_rate(layout, repeat)

    def is_below(self, layout: Layout, repeat: int, value: float) -> bool:
        return False
