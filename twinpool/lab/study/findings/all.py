"""What a study shows, in plain words, each with its evidence; "no difference" where none is to be seen."""

from __future__ import annotations

from twinpool.lab.study.findings import capacity, doubts, goodput, latency, pools
from twinpool.lab.study.findings.words import Conclusion
from twinpool.lab.study.results import Results


def conclude(results: Results) -> tuple[Conclusion, ...]:
    """Return what can be said, the most important first, and doubts last."""
    return tuple(
        conclusion
        for part in (capacity, goodput, latency, pools, doubts)
        for conclusion in part.find(results)
    )
