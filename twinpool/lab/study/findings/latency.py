"""Where an arm answers sooner or later than the reference.

Latencies are those of answered requests, so nothing is said where arms answered different shares: who refuses
half of what comes answers the other half soon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from twinpool.lab.study.findings.words import Conclusion, interval, ms, percent, rates_text
from twinpool.lab.study.results import LATENCIES, Metric, Results
from twinpool.lab.study.spread import Comparison

_EQUAL_SHARES = 0.01  # answered shares that differ by more leave latencies of different requests


def find(results: Results) -> Iterator[Conclusion]:
    """Say it of the first token and of the others; arms without a difference at the same rates together."""
    for arm in results.arms:
        yield from _unequal(results, arm)
    for metric in LATENCIES:
        equal: dict[tuple[float, ...], list[str]] = {}
        for arm in results.arms:
            if arm == results.reference:
                continue
            known = {
                rate: comparison
                for rate in results.rates
                if (comparison := results.comparison(metric, arm, rate)) is not None
                and comparison.is_known
                and _is_comparable(results, arm, rate)
            }
            yield from _changes(results, metric, arm, known)
            same = tuple(rate for rate, comparison in known.items() if not comparison.differs)
            if same:
                equal.setdefault(same, []).append(arm)
        for rates, arms in equal.items():
            yield Conclusion(
                kind="latency",
                text=f"There is no difference in the {metric.name} between "
                f"{results.reference} and {' or '.join(arms)} at {rates_text(rates)}.",
                evidence="the ranges of their repeats overlap",
            )


def _is_comparable(results: Results, arm: str, rate: float) -> bool:
    """Whether an arm and the reference, both measured at ``rate``, answered equal shares."""
    mine, other = results.answered_share(arm, rate), results.answered_share(results.reference, rate)
    return abs(mine - other) <= _EQUAL_SHARES


def _unequal(results: Results, arm: str) -> Iterator[Conclusion]:
    """Say at which rates latencies of an arm are not compared."""
    both = [
        rate for rate in results.rates if results.cells(arm, rate) and results.cells(results.reference, rate)
    ]
    rates = [rate for rate in both if not _is_comparable(results, arm, rate)]
    if rates:
        yield Conclusion(
            kind="latency",
            text=f"Latencies of {arm} are not compared at {rates_text(rates)}: it answered another share of "
            f"its requests than {results.reference}.",
            evidence="; ".join(f"{_answered(results, arm, rate)} at {rate:g} req/s" for rate in rates),
        )


def _answered(results: Results, arm: str, rate: float) -> str:
    mine, other = results.answered_share(arm, rate), results.answered_share(results.reference, rate)
    return f"{percent(mine)} and {percent(other)} answered"


def _changes(
    results: Results, metric: Metric, arm: str, known: Mapping[float, Comparison]
) -> Iterator[Conclusion]:
    for word, sign in (("lower", -1), ("higher", 1)):
        changes = {
            rate: abs(comparison.change)
            for rate, comparison in known.items()
            if comparison.differs and comparison.change is not None and comparison.change * sign > 0
        }
        if not changes:
            continue
        by = _by(min(changes.values()), max(changes.values()), word)
        yield Conclusion(
            kind="latency",
            text=f"The {metric.name} of {arm} is {by} that of {results.reference} at {rates_text(changes)}.",
            evidence="; ".join(
                f"{ms(known[rate].mean)} against {ms(known[rate].other_mean)} at {rate:g} req/s, "
                f"{_answered(results, arm, rate)}, {interval(known[rate], 'ms', scale=1e3)}"
                for rate in changes
            ),
        )


def _by(least: float, most: float, word: str) -> str:
    """Say a change from ``least`` to ``most`` as a share, or as a multiple where that is easier to grasp."""
    if word == "higher" and least > 1.0:
        low, high, end = f"{least + 1.0:.2g}", f"{most + 1.0:.2g}", "times"
    else:
        low, high, end = percent(least), percent(most), f"{word} than"
    return f"{low if low == high else f'{low} to {high}'} {end}"
