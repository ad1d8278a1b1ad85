"""Why a recommendation may be less sure than it sounds."""

from __future__ import annotations

from collections.abc import Mapping

from twinpool.lab.profile.profile import Link, Profile, hop_s_of
from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.offered_load import OfferedLoad
from twinpool.lab.recommend.ranking import Ranking
from twinpool.lab.study.spread import LEAST_REPEATS

_LEAST_MISSES = 5  # requests that may miss the limits; the share of fewer is mostly chance
_LEAST_LIMITS = 20  # times the limit of the first token that a run should last


def find_doubts(
    config: RecommendConfig,
    load: OfferedLoad,
    ranking: Ranking,
    *,
    profiles: Mapping[str, Profile],
    links: Mapping[str, Link],
) -> tuple[str, ...]:
    """List them as sentences.

    Args:
        profiles: Of ``config.kinds``, by name.
        links: Over which workers of each send.
    """
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
    has_pools = not all(entry.layout.is_colocated for entry in (*ranking.finalists, *ranking.others))
    bare = [link for link in links.values() if not link.latency_s]
    if has_pools and bare:
        doubts.append(
            f"Transfers over {config.transfer.link} have no latency ({bare[0].source}): pools pay for what a "
            "real link has."
        )
    if has_pools and not hop_s_of(profiles.values(), asked_s=config.hop_s):
        doubts.append(
            "The router reaches workers in no time (recommend.hop_s): pools pay for that way twice."
        )
    return tuple(doubts)
