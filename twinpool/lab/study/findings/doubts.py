"""What a reader must know before believing the rest."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.lab.study.findings.words import Conclusion
from twinpool.lab.study.results import Results
from twinpool.lab.study.spread import LEAST_REPEATS, chance_of_disjoint


def find(results: Results) -> Iterator[Conclusion]:
    """Say how often chance looks like a difference, and which cells do not count."""
    repeats = results.settings.repeats
    if repeats >= LEAST_REPEATS and len(results.arms) > 1:
        chance = chance_of_disjoint(repeats)
        yield Conclusion(
            kind="doubt",
            text=f"Of comparisons between equal arms, up to {chance * 100:.3g} % would look like a "
            f"difference by chance alone.",
            evidence=f"{repeats} repeats: 2 of the {round(2 / chance)} orders that their values can have "
            f"keep two arms apart",
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
