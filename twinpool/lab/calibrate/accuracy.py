"""How well a simulation foretold a study: each arm at each rate, as it was measured and as predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean

from twinpool.engine.config import EngineConfig
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.simulate.config import ROLE_LETTERS, Pool, SimulationConfig, Transfer
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.study.arm import Arm
from twinpool.lab.study.cell import Cell
from twinpool.lab.study.settings import StudySettings

_TIE = 0.02  # values that are no further apart have no order: no measurement is that exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a load came to; as the means of its repeats."""

    tokens_per_s: float  # of answers
    ttft_s: float  # p50
    tpot_s: float  # p50
    good_share: float  # of the requests, within the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One layout at one rate."""

    layout: str  # as in 2P1D
    rate: float
    repeats: int
    load: float  # of the machine before it was measured: what else ran there
    measured: Outcome
    predicted: Outcome

    @property
    def tokens_error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted.tokens_per_s / self.measured.tokens_per_s - 1.0

    @property
    def ttft_error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted.ttft_s / self.measured.ttft_s - 1.0

    @property
    def good_error(self) -> float:
        """Predicted - measured, as a share of all requests: 0.05 are 5 points."""
        return self.predicted.good_share - self.measured.good_share


def layout_name(arm: Arm) -> str:
    """Return ``2P1D`` or ``3C``."""
    return "".join(f"{workers}{ROLE_LETTERS[role]}" for role, workers in arm.pools.items())


def predict(settings: StudySettings, arm: Arm, cell: Cell, *, profile: str, transport: str) -> Outcome:
    """Simulate a cell of a study: the same requests at the same times.

    Args:
        settings: Of the study.
        arm: Of the cell.
        cell: What is simulated.
        profile: Path of the profile of each worker.
        transport: Over which KV goes, one that was measured.
    """
    config = SimulationConfig(
        pools=tuple(
            Pool(role=role, workers=workers, profile=profile, engine=EngineConfig())
            for role, workers in arm.pools.items()
        ),
        transfer=Transfer(link=transport),
    )
    workload = settings.of_cell(cell.rate, cell.repeat)
    return outcome_of(run_simulation(workload, config, limits=settings.bench.limits).summary)


def outcome_of(summary: Summary) -> Outcome:
    """Return what a run came to; a latency that nothing has is infinite."""
    ttft_s, tpot_s = summary.ttft_s.percentile(50), summary.tpot_s.percentile(50)
    return Outcome(
        tokens_per_s=summary.output_tokens / summary.duration_s,
        ttft_s=float("inf") if ttft_s is None else ttft_s,
        tpot_s=float("inf") if tpot_s is None else tpot_s,
        good_share=summary.goodput_share or 0.0,
    )


def mean_outcome(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the means of some repeats."""
    return Outcome(
        tokens_per_s=fmean(outcome.tokens_per_s for outcome in outcomes),
        ttft_s=fmean(outcome.ttft_s for outcome in outcomes),
        tpot_s=fmean(outcome.tpot_s for outcome in outcomes),
        good_share=fmean(outcome.good_share for outcome in outcomes),
    )


def rank_correlation(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return Spearman's correlation, 1 if both orders are the same; None where one side has no order.

    Values of one side that are within 2 % of each other share the mean of their ranks.
    """
    firsts, seconds = zip(*pairs, strict=True)
    first, second = _ranks(_tied(firsts)), _ranks(_tied(seconds))
    mean = (len(first) + 1) / 2
    above = sum((one - mean) * (other - mean) for one, other in zip(first, second, strict=True))
    below = sqrt(sum((one - mean) ** 2 for one in first) * sum((other - mean) ** 2 for other in second))
    return above / below if below > 0.0 else None


def _tied(values: Sequence[float]) -> list[float]:
    """Return the least value of the tie that each one is in."""
    least = -inf
    told: dict[float, float] = {}
    for value in sorted(values):
        if value > least * (1.0 + _TIE):
            least = value
        told[value] = least
    return [told[value] for value in values]


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]
