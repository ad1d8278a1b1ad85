"""The rate that each arm can bear, as a search found it, and how that compares with the reference."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from twinpool.lab.study.findings.words import Conclusion, against, interval, percent, rates_text
from twinpool.lab.study.results import Results
from twinpool.lab.study.spread import compare


def find(results: Results) -> Iterator[Conclusion]:
    """Say it for each arm; nothing where rates were given."""
    search = results.settings.search
    if search is None:
        return
    reference = results.capacities(results.reference)
    for arm in results.arms:
        mine = results.capacities(arm)
        text = f"{arm} bears {fmean(mine.values()):.3g} req/s with {percent(search.share)} within the limits"
        evidence = f"by repeat: {rates_text(rate for _, rate in sorted(mine.items()))}"
        comparison = compare(mine, reference)
        if arm != results.reference and comparison is not None:
            text += f"; {against(comparison, results.reference)}"
            evidence += f"; {interval(comparison, 'req/s')}"
        yield Conclusion(kind="capacity", text=f"{text}.", evidence=evidence)
