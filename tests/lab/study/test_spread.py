"""Repeats and their spread, with numbers that can be checked by hand."""

from __future__ import annotations

import random

import pytest

from twinpool.lab.study.findings.words import interval
from twinpool.lab.study.spread import Interval, bootstrap_mean, chance_of_disjoint, compare


def test_the_interval_of_three_values_is_their_range() -> None:
    # 27 resamples; one of them has the least value three times, which is more than 2.5 % of them.
    assert bootstrap_mean([1.0, 2.0, 6.0]) == Interval(1.0, 6.0)


def test_the_interval_of_four_values_leaves_out_six_resamples_at_each_end() -> None:
    # 256 resamples; by mean: 0 once, 0.25 (one 1, three 0) 4 times, then 0.5 (one 2, or two 1) 4 + 6 times.
    assert bootstrap_mean([0.0, 1.0, 2.0, 3.0]) == Interval(0.5, 2.5)


def test_one_value_has_no_spread() -> None:
    assert bootstrap_mean([2.5]) == Interval(2.5, 2.5)


def test_many_values_are_drawn_and_give_what_the_formula_gives() -> None:
    source = random.Random(1)
    values = [source.gauss(10.0, 2.0) for _ in range(100)]

    interval = bootstrap_mean(values)

    mean = sum(values) / 100
    error = (sum((value - mean) ** 2 for value in values) / 100) ** 0.5 / 10
    assert interval.low == pytest.approx(mean - 1.96 * error, abs=0.05)
    assert interval.high == pytest.approx(mean + 1.96 * error, abs=0.05)
    assert bootstrap_mean(values) == interval, "the same values give the same interval"


def test_arms_with_ranges_apart_differ_by_the_quotient_of_their_means() -> None:
    comparison = compare({0: 2.6, 1: 2.7, 2: 2.56}, {0: 2.0, 1: 2.1, 2: 1.9})

    assert comparison is not None and comparison.differs
    assert comparison.change == pytest.approx(2.62 / 2.0 - 1)  # 31 % more
    assert comparison.difference.low == pytest.approx(0.6) and comparison.difference.high == pytest.approx(
        0.66
    )


def test_overlapping_ranges_are_no_difference_even_if_each_repeat_says_so() -> None:
    comparison = compare({0: 1.1, 1: 2.1, 2: 3.1}, {0: 1.0, 1: 2.0, 2: 3.0})

    assert comparison is not None and comparison.is_known and not comparison.differs


def test_equal_values_are_no_difference() -> None:
    comparison = compare({0: 2.0, 1: 2.0, 2: 2.0}, {0: 2.0, 1: 2.0, 2: 2.0})

    assert comparison is not None and not comparison.differs and comparison.change == 0.0


def test_two_repeats_say_nothing_however_far_apart() -> None:
    comparison = compare({0: 9.0, 1: 9.0, 2: 9.0}, {0: 1.0, 1: 1.0})

    assert comparison is not None and comparison.repeats == 2
    assert not comparison.is_known and not comparison.differs


def test_arms_without_a_repeat_in_common_cannot_be_compared() -> None:
    assert compare({0: 1.0}, {1: 1.0}) is None


def test_of_nothing_there_is_no_share() -> None:
    comparison = compare({0: 1.0, 1: 1.0, 2: 1.0}, {0: 0.0, 1: 0.0, 2: 0.0})

    assert comparison is not None and comparison.differs and comparison.change is None


@pytest.mark.parametrize(("repeats", "orders"), [(3, 20), (4, 70), (5, 252)])
def test_equal_arms_look_different_as_often_as_the_formula_says(repeats: int, orders: int) -> None:
    assert chance_of_disjoint(repeats) == pytest.approx(2 / orders)  # of 2 n values n: 6 of 3 are 20 orders
    source, apart, tries = random.Random(7), 0, 1000
    for _ in range(tries):
        one, other = ({repeat: source.gauss(1.0, 0.1) for repeat in range(repeats)} for _ in range(2))
        comparison = compare(one, other)
        assert comparison is not None
        apart += comparison.differs
    assert apart / tries == pytest.approx(2 / orders, abs=3 * (2 / orders / tries) ** 0.5)


def test_five_repeats_of_which_one_contradicts_are_no_difference() -> None:
    # The bootstrap intervals of the means, 1.04 to 1.16 and 1.24 to 1.36, keep apart; the ranges do not.
    comparison = compare(
        dict(enumerate([1.0, 1.05, 1.1, 1.15, 1.2])), dict(enumerate([1.2, 1.25, 1.3, 1.35, 1.4]))
    )

    assert comparison is not None and comparison.is_known and not comparison.differs


def test_a_difference_of_latencies_is_told_in_their_unit() -> None:
    comparison = compare({0: 0.050, 1: 0.052, 2: 0.054}, {0: 0.060, 1: 0.060, 2: 0.060})

    assert comparison is not None
    assert interval(comparison, "ms", scale=1e3) == (
        "the difference is -10 to -6 ms (95 % bootstrap interval, 3 repeats)"
    )
