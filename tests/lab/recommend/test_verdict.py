"""What follows from a ranking: by hand, on rates of three repeats."""

from __future__ import annotations

import pytest

from twinpool.lab.recommend.config import WorkerKind
from twinpool.lab.recommend.layout import Group, Layout
from twinpool.lab.recommend.ranking import Entry, Ranking
from twinpool.lab.recommend.verdict import Reason, judge
from twinpool.lab.simulate.config import parse_layout

KIND = WorkerKind(profile="toy")


def entry(name: str, *values: float) -> Entry:
    groups = (Group(role=role, workers=n, kind=KIND, ranks=1) for role, n in parse_layout(name))
    return Entry(layout=Layout(groups=tuple(groups)), values=values)


LOW, HIGH = entry("4C", 9.8, 10.1, 9.9), entry("2P2D", 10.2, 10.3, 10.1)
UNSTEADY = entry("3P1D", 9.5, 12.0, 12.5)


@pytest.mark.parametrize(
    ("finalists", "load_rate", "chosen", "reason"),
    [
        ([HIGH, LOW], 0.0, "4C", Reason.NO_DIFFERENCE),  # the spreads touch at 10.1
        ([HIGH, LOW], 9.8, "4C", Reason.COLOCATED_SUFFICES),
        ([HIGH, LOW], 10.0, "2P2D", Reason.SPLIT_SUFFICES),  # 4C has less in two repeats of three
        ([HIGH, LOW], 10.2, "4C", Reason.NO_DIFFERENCE),  # neither does
        ([UNSTEADY, HIGH, LOW], 10.0, "2P2D", Reason.SPLIT_SUFFICES),  # 3P1D has more, but not always
        ([entry("4C", 9.0, 13.0, 12.0), HIGH], 10.0, "2P2D", Reason.SPLIT_SUFFICES),
        ([entry("4C", 8.0, 8.0, 8.0), entry("2P2D", 5.0, 5.0, 5.0)], 20.0, "4C", Reason.COLOCATED_IS_BEST),
        ([entry("2P2D", 15.0, 15.0, 15.0), LOW], 20.0, "2P2D", Reason.SPLIT_IS_BETTER),
        ([HIGH], 10.0, "2P2D", Reason.SPLIT_SUFFICES),
        ([HIGH], 11.0, "2P2D", Reason.SPLIT_IS_BETTER),  # no colocated layout fits
        ([entry("4C", 0.0, 0.0, 0.0)], 10.0, "4C", Reason.NOTHING_SERVES),
    ],
)
def test_a_load_is_answered_by_whoever_answers_it_in_every_repeat(
    finalists: list[Entry], load_rate: float, chosen: str, reason: Reason
) -> None:
    verdict = judge(Ranking(finalists=tuple(finalists), others=()), precision=0.02, load_rate=load_rate)

    assert (verdict.chosen.layout.name, verdict.reason) == (chosen, reason)
    assert verdict.stays_colocated == (chosen == "4C" and reason is not Reason.NOTHING_SERVES)


def test_the_repeats_in_which_a_load_is_not_answered_are_counted() -> None:
    assert [LOW.misses(load_rate) for load_rate in (9.8, 9.9, 10.0, 10.2)] == [0, 1, 2, 3]
