"""What follows from rates alone, in closed form: bounds that a simulation must keep.

None of these knows lengths, latency limits, links or memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from twinpool.core.errors import ConfigError


def disaggregated_rate(
    *, prefill_workers: float, decode_workers: float, prefill_s: float, decode_s: float
) -> float:
    """Return the most requests per second that two pools can answer, in the limit of a long queue.

    Args:
        prefill_s: Worker-seconds of one request's prompt.
        decode_s: Worker-seconds of its answer.
    """
    return min(prefill_workers / prefill_s, decode_workers / decode_s)


def colocated_rate(*, workers: float, prefill_s: float, decode_s: float) -> float:
    """Return the same of workers that do both, none of which disturbs the other.

    It is never below ``disaggregated_rate`` of as many workers, and equal only if both pools are full:
    ``min(x / a, y / b) <= (x + y) / (a + b)``.  What disaggregation wins comes from interference and limits.
    """
    return workers / (prefill_s + decode_s)


def mean_ttft_s(service_s: float, rate: float, *, stages: int = 1) -> float:
    """Return the mean time to the first token of one prefill worker, one prompt at a time, as they come.

    Args:
        service_s: Time of one prompt from its start to its first token.
        rate: Prompts per second, at random.
        stages: Pipeline stages, each of which is busy for its share of ``service_s``.

    Raises:
        ConfigError: More comes than can be served.

    Source:
        The M/D/1 queue; DistServe (Zhong et al., OSDI 2024), equations 1 and 2, and with ``service_s``
        divided by a speed-up, 3.
    """
    stage_s = service_s / stages
    load = rate * stage_s
    if load >= 1.0:
        raise ConfigError("rate", f"{rate} a second keep a worker busy {load:.2f} of the time")
    return service_s + stage_s * load / (2.0 * (1.0 - load))


def machines_within(budget: float, *, price: float) -> int:
    """Return how many machines of ``price`` each a budget of power or money pays for."""
    return int(budget / price + 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """What one worker of a pool can do."""

    per_s: float  # requests
    gpus: int
    factor: float = 1.0  # of it that is left once pools are put together


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Pools that go well together."""

    prefill_workers: int
    decode_workers: int
    per_s: float
    per_s_per_gpu: float


def match_workers(
    prefill: WorkerRate, decode: WorkerRate, *, total_gpus: Collection[int], max_workers: int
) -> Match | None:
    """Return the ratio with the most requests per second and GPU; of equal ones that with least to decode.

    Args:
        total_gpus: Sizes that a deployment may have; empty allows any.
        max_workers: Of each pool.

    Returns:
        None if no ratio has an allowed size.

    Source:
        The order of the search is that of ``_match_workers`` in aiconfigurator 0.12.0.
    """
    best: Match | None = None
    for num_decode in range(1, max_workers + 1):
        for num_prefill in range(1, max_workers + 1):
            gpus = num_prefill * prefill.gpus + num_decode * decode.gpus
            if total_gpus and gpus not in total_gpus:
                continue
            per_s = min(
                num_prefill * prefill.per_s * prefill.factor, num_decode * decode.per_s * decode.factor
            )
            if best is None or per_s / gpus > best.per_s_per_gpu:
                best = Match(
                    prefill_workers=num_prefill,
                    decode_workers=num_decode,
                    per_s=per_s,
                    per_s_per_gpu=per_s / gpus,
                )
    return best
