"""Why a recommendation may be less sure than it sounds."""

from __future__ import annotations

from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.offered_load import OfferedLoad
from twinpool.lab.recommend.ranking import Ranking
from twinpool.lab.study.spread import LEAST_REPEATS

_LEAST_MISSES = 5  # requests that may miss the limits; the share of fewer is mostly chance
_LEAST_LIMITS = 20  # times the limit of the first token that a run should last


def find_doubts(config: RecommendConfig, load: OfferedLoad, ranking: Ranking) -> tuple[str, ...]:
    """List them as sentences."""
    doubts = []
    num_requests = len(load.repeats[0])
    if config.repeats < LEAST_REPEATS:
        doubts.append(f"With fewer than {LEAST_REPEATS} repeats no layout is told from another.")
    if load.are_parts:
        doubts.append(f"The workload has no seed: repeats are parts of it, {num_requests} requests each.")
    if config.limits.ttft_s is not None:
        may_miss = num_requests * (1.0 - config.percentile / 100.0)
        if may_miss < _LEAST_MISSES:
            doubts.append(
                f"{may_miss:.0f} of the {num_requests} requests of a repeat may miss the limits: "
                f"for p{config.percentile:g} more are needed."
            )
        lasts_s = num_requests / ranking.best.mean if ranking.best.mean else None
        if lasts_s is not None and lasts_s < _LEAST_LIMITS * config.limits.ttft_s:
            doubts.append(
                f"At {ranking.best.mean:.3g} requests/s all come in {lasts_s:.3g} s, little more than one "
                "may wait: with more requests the highest rates may be lower."
            )
    return tuple(doubts)
