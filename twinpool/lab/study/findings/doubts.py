"""What a reader must know before believing the rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from twinpool.lab.study.findings.words import Conclusion
from twinpool.lab.study.results import GOODPUT, Results
from twinpool.lab.study.spread import Comparison, chance_of_disjoint, compare


def find(results: Results) -> Iterator[Conclusion]:
    """Say how often chance looks like a difference, what repeats are, and which cells do not count."""
    repeats = min((each.repeats for each in _comparisons(results) if each.is_known), default=None)
    if repeats is not None:
        chance = chance_of_disjoint(repeats)
        yield Conclusion(
            kind="doubt",
            text=f"Of comparisons between equal arms, up to {chance * 100:.3g} % would look like a "
            f"difference by chance alone.",
            evidence=f"{repeats} repeats: 2 of the {round(2 / chance)} orders that their values can have "
            f"keep two arms apart",
        )
    if results.settings.sends_parts:
        yield Conclusion(
            kind="doubt",
            text="The repeats are parts of one file: how much they vary says nothing of another one.",
            evidence=f"{results.settings.workload.get('path')}: each repeat sends what follows there",
        )
    if results.invalid:
        yield Conclusion(
            kind="doubt",
            text=f"{len(results.invalid)} of {len(results.measurements)} cells do not count.",
            evidence="; ".join(
                f"{each.cell.arm} at {each.cell.rate:g} req/s, repeat {each.cell.repeat + 1}: "
                f"{', '.join(each.problems)}"
                for each in results.invalid
            ),
        )


def _comparisons(results: Results) -> Iterator[Comparison]:
    """Yield every pair of arms, at each rate or by what a search found."""
    for one, other in combinations(results.arms, 2):
        if results.settings.search is None:
            told = [results.comparison(GOODPUT, one, rate, other=other) for rate in results.rates]
        else:
            told = [compare(results.capacities(one), results.capacities(other))]
        yield from (each for each in told if each is not None)
