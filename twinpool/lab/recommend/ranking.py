"""Layouts in order: all of them by one repeat of the load, and the first few by every repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from twinpool.lab.recommend.layout import Layout
from twinpool.lab.recommend.measures import Measure
from twinpool.lab.study.spread import Comparison, compare

FINALISTS = 3  # layouts that are tried with every repeat, and the best colocated one


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A layout and its values.

    Attributes:
        values: In requests per second, by repeat; one value if the layout is no finalist.
        is_below: The only value is a bound: the layout does not reach it.
    """

    layout: Layout
    values: tuple[float, ...]
    is_below: bool = False

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def misses(self, load_rate: float) -> int:
        """Return in how many repeats a load is not answered."""
        return sum(value < load_rate for value in self.values)

    def against(self, other: Entry) -> Comparison:
        """Compare two finalists, repeat by repeat."""
        comparison = compare(dict(enumerate(self.values)), dict(enumerate(other.values)))
        assert comparison is not None, "an entry without a value"
        return comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Finalists first, the best one at their head; then the others by their value."""

    finalists: tuple[Entry, ...]
    others: tuple[Entry, ...]

    @property
    def best(self) -> Entry:
        return self.finalists[0]

    @property
    def runner_up(self) -> Entry | None:
        return self.finalists[1] if len(self.finalists) > 1 else None

    @property
    def colocated(self) -> Entry | None:
        """The best of those without pools; None if none fits."""
        return next((entry for entry in self.finalists if entry.layout.is_colocated), None)


def rank(layouts: Sequence[Layout], measure: Measure, *, repeats: int, near: float) -> Ranking:
    """Put layouts in order.

    A layout that does not reach the value of the last of the finalists so far, for which one simulation
    suffices, is not searched further; so the finalists are the same as if all were searched.

    Args:
        layouts: At least one; of equal ones the earlier counts as the better.
        near: A rate at which the search begins.
    """
    found: list[Entry] = []
    below: list[Entry] = []
    for layout in layouts:
        leaders = sorted((entry.mean for entry in found), reverse=True)[:FINALISTS]
        has_bar = len(leaders) == FINALISTS and not layout.is_colocated and leaders[-1] > 0.0
        if has_bar and measure.is_below(layout, 0, leaders[-1]):
            below.append(Entry(layout=layout, values=(leaders[-1],), is_below=True))
            continue
        start = leaders[0] if leaders and leaders[0] > 0.0 else near
        found.append(Entry(layout=layout, values=(measure.value(layout, 0, near=start),)))
    found.sort(key=lambda entry: -entry.mean)
    first = found[:FINALISTS]
    if not any(entry.layout.is_colocated for entry in first):
        first += [entry for entry in found[FINALISTS:] if entry.layout.is_colocated][:1]
    finalists = [_with_repeats(entry, measure, repeats, near=entry.mean or near) for entry in first]
    finalists.sort(key=lambda entry: -entry.mean)
    others = [entry for entry in found if entry not in first] + below
    others.sort(key=lambda entry: (-entry.mean, entry.is_below))
    return Ranking(finalists=tuple(finalists), others=tuple(others))


def _with_repeats(entry: Entry, measure: Measure, repeats: int, *, near: float) -> Entry:
    more = [measure.value(entry.layout, repeat, near=near) for repeat in range(1, repeats)]
    return Entry(layout=entry.layout, values=(*entry.values, *more))
