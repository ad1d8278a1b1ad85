"""How numbers and comparisons are said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twinpool.lab.study.spread import CONFIDENCE, LEAST_REPEATS, Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """One sentence, and the numbers it rests on."""

    kind: str  # goodput, capacity, latency, pools, transfer or doubt
    text: str
    evidence: str


def against(comparison: Comparison, reference: str) -> str:
    """Say how one arm stands beside the reference, as the end of a sentence about it."""
    if not comparison.is_known:
        return f"with fewer than {LEAST_REPEATS} repeats it cannot be told from {reference}"
    if not comparison.differs:
        return f"there is no difference to {reference}"
    if comparison.change is None:
        return f"serves some requests within the limits, and {reference} none"
    if comparison.mean == 0.0:
        return f"serves none within the limits, and {reference} does"
    if comparison.change > 1.0:
        return f"serves {comparison.change + 1.0:.2g} times as many within the limits as {reference}"
    word = "more" if comparison.change > 0.0 else "less"
    return f"serves {percent(comparison.change)} {word} within the limits than {reference}"


def interval(comparison: Comparison, unit: str, *, scale: float = 1.0) -> str:
    """Say how sure a difference is, in ``unit``; ``scale`` makes it of what was compared."""
    low, high = comparison.difference.low * scale, comparison.difference.high * scale
    return (
        f"the difference is {low:+.3g} to {high:+.3g} {unit} ({percent(CONFIDENCE)} bootstrap interval, "
        f"{comparison.repeats} repeats)"
    )


def percent(share: float) -> str:
    return f"{abs(share) * 100:.0f} %"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1.0 else f"{seconds:.3g} s"


def listed(parts: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def rates_text(rates: Iterable[float]) -> str:
    """Return ``1, 2 and 4 req/s``."""
    return f"{listed([f'{rate:g}' for rate in rates])} req/s"
