"""All that was measured in a study, ordered to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from twinpool.core.errors import ConfigError
from twinpool.lab.study.cell import Cell, Measurement
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.guard import Guard, flatten
from twinpool.lab.study.order import bracket, next_rate
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.spread import Comparison, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a cell that arms are compared by."""

    name: str
    of: Callable[[Measurement], float | None]


GOODPUT = Metric(name="requests within the limits", of=lambda cell: cell.good_per_s)


def _latency(name: str, latency: str, at: str) -> Metric:
    return Metric(name=name, of=lambda cell: cell.latency_s(latency, at))


LATENCIES = (
    _latency("median time to the first token", "ttft_s", "p50"),
    _latency("90th percentile of the time to the first token", "ttft_s", "p90"),
    _latency("median time per output token", "tpot_s", "p50"),
    _latency("90th percentile of the time per output token", "tpot_s", "p90"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What can be said of one study.

    Args:
        settings: Of the study.
        measurements: Of its arms; those with problems are among them.
        num_settings: Leaves of the resolved config that the guard compared.
    """

    settings: StudySettings
    measurements: tuple[Measurement, ...]
    num_settings: int

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that have a measurement that counts, in the order of the settings."""
        there = {measurement.cell.arm for measurement in self.valid}
        return tuple(arm.name for arm in self.settings.arms if arm.name in there)

    @property
    def reference(self) -> str:
        """The arm that the others are compared to."""
        wanted = self.settings.reference_arm
        return wanted if wanted in self.arms else self.arms[0]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(sorted({measurement.cell.rate for measurement in self.valid}))

    def some_rates(self, most: int) -> tuple[float, ...]:
        """Return at most so many rates: those that most arms have in common, evenly spread among equals."""
        ranked: dict[int, list[float]] = {}
        for rate in self.rates:
            num_arms = sum(bool(self.cells(arm, rate)) for arm in self.arms)
            ranked.setdefault(num_arms, []).append(rate)
        chosen: list[float] = []
        for _, rates in sorted(ranked.items(), reverse=True):
            room = min(most - len(chosen), len(rates))
            chosen += [rates[round(number * (len(rates) - 1) / max(1, room - 1))] for number in range(room)]
        return tuple(sorted(chosen))

    @property
    def valid(self) -> tuple[Measurement, ...]:
        return tuple(measurement for measurement in self.measurements if not measurement.problems)

    @property
    def invalid(self) -> tuple[Measurement, ...]:
        return tuple(measurement for measurement in self.measurements if measurement.problems)

    def cells(self, arm: str, rate: float) -> tuple[Measurement, ...]:
        """Return the repeats that count."""
        return tuple(
            measurement
            for measurement in self.valid
            if measurement.cell.arm == arm and measurement.cell.rate == rate
        )

    def values(self, metric: Metric, arm: str, rate: float) -> dict[int, float]:
        """Return a number by repeat; repeats that have none are left out."""
        told = {each.cell.repeat: metric.of(each) for each in self.cells(arm, rate)}
        return {repeat: value for repeat, value in told.items() if value is not None}

    def comparison(self, metric: Metric, arm: str, rate: float, *, other: str = "") -> Comparison | None:
        """Compare an arm with another, or with the reference; None if they have no repeat in common."""
        return compare(self.values(metric, arm, rate), self.values(metric, other or self.reference, rate))

    def good_share(self, arm: str, rate: float) -> float | None:
        """Return the mean share within the limits; None if it was not measured."""
        cells = self.cells(arm, rate)
        return fmean(cell.good_share for cell in cells) if cells else None

    def answered_share(self, arm: str, rate: float) -> float:
        """Return the mean share that was answered, within the limits or not, of a rate that was measured."""
        return fmean(cell.answered_share for cell in self.cells(arm, rate))

    def capacities(self, arm: str) -> dict[int, float]:
        """Return, by repeat, the highest rate that an arm bore in a search; 0 if it bore none.

        A repeat is left out if its search has not ended, or met a cell that does not count.
        """
        search = self.settings.search
        assert search is not None, "rates that were given are no search"
        found = {}
        for repeat in range(self.settings.repeats):
            cells = [
                each for each in self.measurements if each.cell.arm == arm and each.cell.repeat == repeat
            ]
            shares = {each.cell.rate: each.good_share for each in cells}
            has_ended = bool(shares) and next_rate(shares, search) is None
            if has_ended and not any(each.problems for each in cells):
                found[repeat] = bracket(shares, search.share)[0] or 0.0
        return found


def read_results(folder: StudyFolder) -> Results:
    """Read a study and check once more that nothing but roles differed between its cells.

    Raises:
        ConfigError: It cannot be read, is empty, or arms differ in more.
    """
    settings = folder.settings()
    names = {arm.name for arm in settings.arms}
    found = {cell: measurement for cell, measurement in folder.measurements().items() if cell.arm in names}
    results = Results(
        settings=settings,
        measurements=tuple(found[cell] for cell in sorted(found)),
        num_settings=check_all(found.items(), settings.allowed),
    )
    if not results.arms:
        raise ConfigError(str(folder.path), "holds no measurement that counts")
    return results


def check_all(measurements: Iterable[tuple[Cell, Measurement]], allowed: tuple[str, ...]) -> int:
    """Let the guard compare every cell; return how many settings each has.

    Raises:
        ConfigError: Two differ.
    """
    guard, most = Guard(allowed), 0
    for cell, measurement in measurements:
        guard.check(measurement.config, cell)
        most = max(most, sum(1 for _ in flatten(measurement.config)))
    return most
