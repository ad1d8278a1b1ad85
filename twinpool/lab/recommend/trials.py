"""Simulations of layouts under one load: each question is answered once, and all are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from twinpool.core.ports import Role
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.layout import Group, Layout
from twinpool.lab.recommend.offered_load import OfferedLoad
from twinpool.lab.recommend.search import RateGrid
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Pool, SimulationConfig, Transfer
from twinpool.lab.simulate.result import SimulationResult
from twinpool.lab.simulate.simulation import run_simulation

_FOREVER_S = 1e9
_MOST_AT_ONCE = 2_000  # requests; a load of more than half of it is sent once


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A simulation that begins."""

    number: int  # from 1
    layout: str
    rate: float  # requests per second; infinite if all are sent at once
    what_if: str  # empty: as it was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a layout fared at a rate.

    Attributes:
        good_share: Of all requests, those answered within the limits.
        ttft_s, tpot_s: At the percentile of the question; None if nothing was answered.
        busy: Share of the time in which the workers of a role ran a step, on average.
    """

    rate: float
    good_share: float
    ttft_s: float | None
    tpot_s: float | None
    busy: Mapping[Role, float]
    num_errors: int
    kv_bytes: int
    duration_s: float


class _Decided(Exception):
    """Enough requests have ended to say whether the rate is met."""


class TrialCounter:
    """Counts the simulations of one recommendation, and tells somebody of each."""

    def __init__(self, on_trial: Callable[[Trial], None] | None) -> None:
        self.num_trials = 0
        self._on_trial = on_trial

    def begins(self, layout: Layout, rate: float, what_if: str) -> None:
        self.num_trials += 1
        if self._on_trial is not None:
            self._on_trial(Trial(number=self.num_trials, layout=layout.name, rate=rate, what_if=what_if))


class Trials:
    """Offers one load to any layout.

    Args:
        config: The question.
        load: What is offered.
        transfer: Between workers.
        cache_bytes: KV cache of a worker of each group; 0 is what its profile says.
        counter: Told of each simulation.
        what_if: How this differs from the question; empty: in nothing.
    """

    def __init__(
        self,
        config: RecommendConfig,
        load: OfferedLoad,
        *,
        transfer: Transfer,
        cache_bytes: Callable[[Layout, Group], int],
        counter: TrialCounter,
        what_if: str = "",
    ) -> None:
        self.load = load
        self.grid = RateGrid(config.precision)
        self._config = config
        self._transfer = transfer
        self._cache_bytes = cache_bytes
        self._counter = counter
        self._what_if = what_if
        self._is_met: dict[tuple[Layout, int, int], bool] = {}

    def is_met(self, layout: Layout, repeat: int, step: int) -> bool:
        """Say whether enough requests of a repeat are answered within the limits at a step of the grid."""
        key = (layout, repeat, step)
        if key not in self._is_met:
            self._is_met[key] = self._run_until_decided(layout, repeat, self.grid.rate(step))
        return self._is_met[key]

    def answered_rate(self, layout: Layout, repeat: int) -> float:
        """Return the requests per second that are answered if all are sent at once and nobody gives up.

        How unequally the last ones end says nothing of a longer queue.  So the load is sent twice, four
        times and so on, until the rate has changed by no more than the precision two times in a row.
        """
        rates = [self._rate_at_once(layout, repeat, 1)]
        copies = 2
        while copies * len(self.load.repeats[repeat]) <= _MOST_AT_ONCE:
            if _is_settled(rates, self._config.precision):
                break
            rates.append(self._rate_at_once(layout, repeat, copies))
            copies *= 2
        return rates[-1]

    def outcome(self, layout: Layout, repeat: int, rate: float) -> Outcome:
        """Run all of a repeat at a rate."""
        self._counter.begins(layout, rate, self._what_if)
        result = run_simulation(
            self.load.at_rate(repeat, rate), self._deployment(layout), limits=self._config.limits
        )
        return _outcome(result, layout, rate=rate, percentile=self._config.percentile)

    def _rate_at_once(self, layout: Layout, repeat: int, copies: int) -> float:
        self._counter.begins(layout, math.inf, self._what_if)
        deployment = self._deployment(layout)
        patient = replace(
            deployment.router,
            max_queued=copies * len(self.load.repeats[repeat]),
            queue_timeout_s=_FOREVER_S,
            request_timeout_s=_FOREVER_S,
        )
        items = self.load.at_once(repeat, copies=copies)
        summary = run_simulation(items, replace(deployment, router=patient)).summary
        return summary.num_answered / summary.duration_s

    def _run_until_decided(self, layout: Layout, repeat: int, rate: float) -> bool:
        self._counter.begins(layout, rate, self._what_if)
        num_requests = len(self.load.repeats[repeat])
        needed = math.ceil(num_requests * self._config.percentile / 100.0 - 1e-9)
        limits = self._config.limits
        num_good = num_bad = 0

        def count(record: Record) -> None:
            nonlocal num_good, num_bad
            is_good = limits.are_met_by(record)
            num_good += is_good
            num_bad += not is_good
            if num_good >= needed or num_bad > num_requests - needed:
                raise _Decided

        items = self.load.at_rate(repeat, rate)
        with suppress(_Decided):
            run_simulation(items, self._deployment(layout), on_record=count)
        return num_good >= needed

    def _deployment(self, layout: Layout) -> SimulationConfig:
        pools = tuple(
            Pool(
                role=group.role,
                workers=group.workers,
                profile=group.kind.profile,
                kv_cache_bytes=self._cache_bytes(layout, group),
                engine=self._config.engine,
            )
            for group in layout.groups
        )
        return SimulationConfig(
            pools=pools, router=self._config.router, transfer=self._transfer, hop_s=self._config.hop_s
        )


def _is_settled(rates: Sequence[float], precision: float) -> bool:
    """Say whether the last rate and the two before it are equal, as far as the precision goes."""
    return len(rates) > 2 and all(abs(rates[-1] - rate) <= precision * rates[-1] for rate in rates[-3:])


def _outcome(result: SimulationResult, layout: Layout, *, rate: float, percentile: float) -> Outcome:
    summary: Summary = result.summary
    busy = {}
    for group in layout.groups:
        uses = [use for use in result.workers if use.worker.startswith(f"{group.role}-")]
        busy[group.role] = sum(use.busy_s for use in uses) / len(uses) / (result.simulated_s or 1.0)
    return Outcome(
        rate=rate,
        good_share=summary.goodput_share or 0.0,
        ttft_s=summary.ttft_s.percentile(percentile),
        tpot_s=summary.tpot_s.percentile(percentile),
        busy=busy,
        num_errors=summary.errors.total(),
        kv_bytes=summary.kv_bytes,
        duration_s=summary.duration_s,
    )
