"""Requests within the limits, beside those of the reference, rate by rate; equal ones are told together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from twinpool.lab.study.findings.words import Conclusion, against, interval, listed, percent, rates_text
from twinpool.lab.study.results import GOODPUT, Results
from twinpool.lab.study.spread import LEAST_REPEATS, Comparison


def find(results: Results) -> Iterator[Conclusion]:
    """Say where arms differ from the reference, where not, and where disaggregation loses."""
    others = [arm for arm in results.arms if arm != results.reference]
    if results.settings.search is not None or not others:
        return
    differ: list[tuple[str, float, Comparison]] = []
    equal: dict[str, list[float]] = {arm: [] for arm in others}
    unknown: list[str] = []
    for rate in results.rates:
        for arm in others:
            comparison = results.comparison(GOODPUT, arm, rate)
            if comparison is None or not comparison.is_known:
                unknown.append(f"{arm} at {rate:g} req/s")
            elif comparison.differs:
                differ.append((arm, rate, comparison))
            else:
                equal[arm].append(rate)
    num_compared = len(differ) + sum(map(len, equal.values()))
    if results.reference == "colocated" and num_compared:
        yield _verdict(differ, num_compared=num_compared)
    for arm, rate, comparison in sorted(differ, key=lambda each: (-each[1], each[0])):
        yield _differs(arm, rate, comparison, results.reference)
    yield from _equal(results, equal)
    yield from _among(results, others)
    if unknown:
        yield Conclusion(
            kind="goodput",
            text=f"Nothing can be concluded about {listed(unknown)}.",
            evidence=f"fewer than {LEAST_REPEATS} repeats count, of it or of {results.reference}",
        )


def _among(results: Results, arms: Sequence[str]) -> Iterator[Conclusion]:
    """Tell which ratios differ from each other, the better one first."""
    for rate in reversed(results.rates):
        for pair in permutations(arms, 2):
            comparison = results.comparison(GOODPUT, pair[0], rate, other=pair[1])
            if comparison is not None and comparison.differs and comparison.mean > comparison.other_mean:
                yield _differs(pair[0], rate, comparison, pair[1])


def _differs(arm: str, rate: float, comparison: Comparison, reference: str) -> Conclusion:
    return Conclusion(
        kind="goodput",
        text=f"At {rate:g} req/s {arm} {against(comparison, reference)}.",
        evidence=f"{comparison.mean:.3g} against {comparison.other_mean:.3g} req/s within the limits; "
        f"{interval(comparison, 'req/s')}",
    )


def _equal(results: Results, equal: dict[str, list[float]]) -> Iterator[Conclusion]:
    """Tell arms that are equal to the reference at the same rates together."""
    together: dict[tuple[float, ...], list[str]] = {}
    for arm, rates in equal.items():
        if rates:
            together.setdefault(tuple(rates), []).append(arm)
    for same, arms in together.items():
        yield Conclusion(
            kind="goodput",
            text=f"At {rates_text(same)} there is no difference in requests within the limits between "
            f"{results.reference} and {' or '.join(arms)}.",
            evidence="; ".join(_shares(results, arms, rate) for rate in same) + "; their ranges overlap",
        )


def _shares(results: Results, arms: Sequence[str], rate: float) -> str:
    told = [results.good_share(arm, rate) for arm in (*arms, results.reference)]
    known = [share for share in told if share is not None]
    low, high = percent(min(known)), percent(max(known))
    return f"{low if low == high else f'{low} to {high}'} within the limits at {rate:g} req/s"


def _verdict(differ: Sequence[tuple[str, float, Comparison]], *, num_compared: int) -> Conclusion:
    lost = [
        f"{arm} at {rate:g} req/s" for arm, rate, comparison in differ if (comparison.change or 0.0) < 0.0
    ]
    won = [f"{arm} at {rate:g} req/s" for arm, rate, comparison in differ if (comparison.change or 1.0) > 0.0]
    if lost and won:
        text = f"Disaggregation loses to colocated serving with {listed(lost)}, and wins with {listed(won)}."
    elif lost:
        text = f"Disaggregation loses to colocated serving with {listed(lost)}, and wins nowhere."
    elif won:
        text = f"Disaggregation wins with {listed(won)}, and loses nowhere."
    else:
        text = "Disaggregation neither wins nor loses against colocated serving at any of these rates."
    return Conclusion(
        kind="goodput", text=text, evidence=f"requests within the limits, {num_compared} comparisons"
    )
