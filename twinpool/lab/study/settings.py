"""What a study compares and how it measures; written down before the first measurement, and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twinpool.core.errors import ConfigError
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.study.arm import Arm, read_arms
from twinpool.lab.study.spread import LEAST_REPEATS
from twinpool.lab.workload.rate import mean_rate
from twinpool.lab.workload.workload import Workload, open_workload

_LEAST_REQUESTS = 8  # of a cell, however low its rate


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """A search for the highest rate at which enough requests are within the limits."""

    least: float = 0.25  # requests per second; where the search begins
    most: float = 256.0
    share: float = 0.9  # of the requests, that must be within both limits
    precision: float = 1.1  # the search ends when the rate that fails is less than so many times the other

    def __post_init__(self) -> None:
        if not 0.0 < self.least < self.most:
            raise ConfigError("study.search.least", f"{self.least} is not in (0, {self.most})")
        if not 0.0 < self.share <= 1.0:
            raise ConfigError("study.search.share", f"{self.share} is not in (0, 1]")
        if not self.precision > 1.0:
            raise ConfigError("study.search.precision", f"{self.precision} is not above 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """One study.

    A *cell* is one arm at one rate, once.  Cells of equal rate and repeat send the same requests at the same
    times; each repeat has others: drawn with another seed, or those that follow in a file.
    """

    workers: int
    ratios: tuple[str, ...] = ()
    colocated: bool = True
    rates: tuple[float, ...] = ()  # requests per second
    search: SearchConfig | None = None  # instead of rates
    repeats: int = LEAST_REPEATS
    cell_s: float = 60.0  # for which requests are sent
    workload: Mapping[str, Any] = field(default_factory=dict)
    bench: BenchConfig = field(default_factory=BenchConfig)
    allowed: tuple[str, ...] = ()  # settings in which arms may differ beside roles, with * for any part
    reference: str = "colocated"  # the arm to which the others are compared; else the first one

    def __post_init__(self) -> None:
        self.arms  # noqa: B018 - refuses what is no arm
        if bool(self.rates) == (self.search is not None):
            raise ConfigError("study.rates", "give rates or a search, one of them")
        if len(set(self.rates)) != len(self.rates):
            raise ConfigError("study.rates", "a rate stands twice")
        for rate in self.rates:
            if not rate > 0.0:
                raise ConfigError("study.rates", f"{rate:g} is not above 0")
        if self.repeats < 1:
            raise ConfigError("study.repeats", f"{self.repeats} is less than 1")
        if not self.cell_s > 0.0:
            raise ConfigError("study.cell_s", f"{self.cell_s:g} is not above 0")
        if self.bench.limits.ttft_s is None or self.bench.limits.tpot_s is None:
            raise ConfigError("study.bench.limits", "goodput needs limits for ttft_s and tpot_s")
        self.of_cell(max(self.rates, default=1.0), self.repeats - 1)

    @property
    def arms(self) -> tuple[Arm, ...]:
        return read_arms(self.ratios, workers=self.workers, colocated=self.colocated)

    @property
    def reference_arm(self) -> str:
        """The arm to which the others are compared."""
        names = [arm.name for arm in self.arms]
        return self.reference if self.reference in names else names[0]

    @property
    def sends_parts(self) -> bool:
        """Whether the repeats are parts of one file, one after the other."""
        one = open_workload({**self.workload, "count": 1})
        return self.repeats > 1 and not one.source.is_drawn

    def of_cell(self, rate: float, repeat: int) -> Workload:
        """Return what is sent at ``rate`` in one repeat, whatever the arm.

        Raises:
            ConfigError: The workload cannot be read, is too short, or has no requests at different times.
        """
        count = max(_LEAST_REQUESTS, round(rate * self.cell_s))
        given = dict(self.workload)
        given["count"] = min(count, int(given.get("count") or count))
        if "seed" in given or hasattr(open_workload(given).source, "seed"):
            given["seed"] = int(given.get("seed", 0)) + repeat
        workload = open_workload(given | {"speed": 1.0})
        if not workload.source.is_drawn:
            skip = workload.shape.skip + repeat * given["count"]
            workload = replace(workload, shape=replace(workload.shape, skip=skip))
        arrivals_s = [item.arrival_s for item in workload]
        if not workload.source.is_drawn and len(arrivals_s) < given["count"]:
            raise ConfigError(
                "study.workload",
                f"has {len(arrivals_s)} requests left for repeat {repeat + 1} at {rate:g} req/s, "
                f"which sends {given['count']}",
            )
        own_rate = mean_rate(
            len(arrivals_s), first_s=min(arrivals_s, default=0.0), last_s=max(arrivals_s, default=0.0)
        )
        if own_rate is None:
            raise ConfigError("study.workload", "has no two requests at different times, so it has no rate")
        return workload.at_speed(rate / own_rate)

    def bench_of(self, url: str, repeat: int) -> BenchConfig:
        """Return how a cell asks the server."""
        return replace(self.bench, url=url, seed=self.bench.seed + repeat)
