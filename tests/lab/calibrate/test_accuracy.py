"""How predictions are scored: by hand, on orders and errors that are plain to see."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from twinpool.lab.calibrate.accuracy import Outcome, Score, layout_name, mean_outcome, rank_correlation
from twinpool.lab.study.arm import Arm

MEASURED = Outcome(tokens_per_s=50.0, ttft_s=0.4, tpot_s=0.1, good_share=0.9)


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([(1.0, 10.0), (2.0, 20.0), (5.0, 21.0)], 1.0),  # the same order, whatever the values
        ([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)], -1.0),
        ([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)], 0.5),  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
        ([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 0.75**0.5),  # ranks 1.5, 1.5, 3 and 1, 2, 3
        ([(1.0, 1.0), (1.0, 2.0)], None),
        ([(11.40, 11.42), (11.41, 11.41), (11.42, 11.40)], None),  # within 2 %: no order, not the opposite
        ([(1.0, 1.0), (1.01, 2.0), (2.0, 3.0)], 0.75**0.5),  # ranks 1.5, 1.5, 3 and 1, 2, 3
        ([(1.0, 1.0), (1.015, 2.0), (1.03, 3.0)], 0.75**0.5),  # 1.03 is no tie of 1.0
        ([(0.0, 1.0), (1.0, inf), (2.0, inf)], 0.75**0.5),
    ],
)
def test_rank_correlation(pairs: list[tuple[float, float]], wanted: float | None) -> None:
    found = rank_correlation(pairs)

    assert found is None if wanted is None else found == pytest.approx(wanted)


def test_errors_are_of_the_prediction() -> None:
    predicted = Outcome(tokens_per_s=55.0, ttft_s=0.3, tpot_s=0.1, good_share=0.85)
    score = Score(layout="2P1D", rate=1.0, repeats=1, load=0.5, measured=MEASURED, predicted=predicted)

    assert score.tokens_error == pytest.approx(0.1)
    assert score.ttft_error == pytest.approx(-0.25)
    assert score.good_error == pytest.approx(-0.05)


def test_repeats_are_averaged() -> None:
    assert mean_outcome([MEASURED, replace(MEASURED, tokens_per_s=70.0)]).tokens_per_s == 60.0


def test_layouts_have_the_names_that_simulate_takes() -> None:
    assert [layout_name(arm) for arm in (Arm(prefill=2, decode=1), Arm(colocated=3))] == ["2P1D", "3C"]
