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
        if not mine:
            yield Conclusion(
                kind="capacity",
                text=f"Nothing can be concluded about the rate that {arm} bears.",
                evidence="no search of it has ended with cells that all count",
            )
            continue
        is_open = max(mine.values()) >= search.most  # nothing failed up to there
        rate = f"{'at least ' if is_open else ''}{fmean(mine.values()):.3g} req/s"
        text = f"{arm} bears {rate} with {percent(search.share)} within the limits"
        evidence = f"by repeat: {rates_text(rate for _, rate in sorted(mine.items()))}"
        comparison = compare(mine, reference)
        if arm != results.reference and comparison is not None:
            if is_open and max(reference.values()) >= search.most:
                text += f"; the search ends too low to tell it from {results.reference}"
            else:
                text += f"; {against(comparison, results.reference)}"
                evidence += f"; {interval(comparison, 'req/s')}"
        if is_open:
            evidence += f"; the search ended at {search.most:g} req/s"
        yield Conclusion(kind="capacity", text=f"{text}.", evidence=evidence)
