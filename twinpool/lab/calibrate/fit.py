"""From measured times to those of a profile; arithmetic, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from twinpool.lab.calibrate.points import StepPoint, StepTiming
from twinpool.lab.calibrate.serving import Served
from twinpool.lab.profile.cost import Chunk, CostModel
from twinpool.lab.profile.measured import Measured
from twinpool.lab.profile.slowdown import Slowdown


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCosts:
    """What serving adds to the steps of an engine."""

    step_s: float = 0.0  # to each of them: the turn of the worker's thread, and the streams of its tokens
    hop_s: float = 0.0  # from client or router to worker, and back, each
    slowdown: Slowdown | None = None  # as in ``Profile``


def fit_times(steps: Sequence[StepTiming], *, step_s: float = 0.0) -> Measured:
    """Return the tables of a profile: the medians of all steps that are no checks.

    A longer prompt, or a longer context of as many decodes, takes no less time: neighbours that say so are
    noise, and both get their mean.

    Args:
        steps: As measured; of a kind in the order of their lengths.
        step_s: Added to each.
    """
    kinds: dict[tuple[int, ...], list[StepTiming]] = defaultdict(list)
    for timing in steps:
        if not timing.point.is_check:
            kinds[_kind(timing.point)].append(timing)
    used = [
        (timing.point, seconds + step_s)
        for timings in kinds.values()
        for timing, seconds in zip(timings, rising([timing.median_s for timing in timings]), strict=True)
    ]
    return Measured(
        prefill=tuple(
            (point.prompts, point.tokens, point.cached, seconds) for point, seconds in used if point.prompts
        ),
        decode=tuple((point.decodes, point.context, seconds) for point, seconds in used if point.decodes),
    )


def rising(values: Sequence[float]) -> list[float]:
    """Return the nearest values, by least squares, none of which is less than the one before.

    Source:
        Pooling of adjacent violators: Barlow et al., "Statistical Inference under Order Restrictions" (1972).
    """
    pools: list[tuple[float, int]] = []  # (mean, number of values)
    for value in values:
        mean, number = value, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, number = (before * many + mean * number) / (many + number), many + number
        pools.append((mean, number))
    return [mean for mean, number in pools for _ in range(number)]


def _kind(point: StepPoint) -> tuple[int, ...]:
    """Return what is equal of steps that differ in one length: single prompts, or decodes of one batch."""
    if point.decodes:
        return (point.decodes,)
    return () if point.prompts == 1 and not point.cached else (0, point.prompts, point.cached)


def fit_serving(served: Served, cost: CostModel) -> ServingCosts:
    """Return what is left of a served request when the steps of its engine are taken away.

    Args:
        served: As measured.
        cost: Of the engine, alone.
    """
    context = served.prompt_tokens + served.output_tokens // 2
    step_s = max(0.0, served.gap_s[0] - cost.step_s([], 1, context))
    both_ways_s = served.short_ttft_s - cost.step_s([Chunk(0, served.short_tokens)], 0, 0) - step_s
    most_s = min(served.ttft_s) / 2.0  # more is noise: a tiny model, a busy machine
    hop_s = min(max(0.0, both_ways_s), most_s) / 2.0
    return ServingCosts(step_s=step_s, hop_s=hop_s, slowdown=_slowdown(served, hop_s=hop_s))


def _slowdown(served: Served, *, hop_s: float) -> Slowdown | None:
    """Return how workers slow each other down: a prompt as in the mean of others that prefill and decode."""
    if len(served.ttft_s) < 2:
        return None
    both_ways_s, alone_s = 2.0 * hop_s, served.ttft_s[0] - 2.0 * hop_s
    prompts = [
        (fmean(both) - both_ways_s) / alone_s for both in zip(served.ttft_s, served.beside_s, strict=True)
    ]
    decodes = [gap_s / served.gap_s[0] for gap_s in served.gap_s]
    return Slowdown(prompts=_growing_from_one(prompts), decodes=_growing_from_one(decodes))


def _growing_from_one(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate((1.0, *values[1:]), max))
