"""Percentiles: numpy's where they are exact, within the stated error where they are not."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from twinpool.lab.metrics.percentiles import EXACT, RELATIVE_ERROR, Percentiles

PERCENTS = (0, 1, 25, 50, 90, 95, 99, 99.9, 100)
SHAPES = {
    "uniform": lambda rng, n: rng.uniform(0.001, 2.0, n),
    "lognormal": lambda rng, n: rng.lognormal(-3.0, 2.0, n),
    "two modes far apart": lambda rng, n: np.where(rng.random(n) < 0.93, 0.003, 7.0) + rng.random(n) * 1e-3,
    "many zeros": lambda rng, n: np.where(rng.random(n) < 0.6, 0.0, rng.exponential(0.1, n)),
    "microseconds to days": lambda rng, n: 10.0 ** rng.uniform(-6, 5, n),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 100, EXACT - 1])
def test_few_values_give_numpys_percentiles(shape: str, count: int) -> None:
    values = SHAPES[shape](np.random.default_rng(1), count)
    told = _counted(values)

    assert told.percentiles(PERCENTS) == [pytest.approx(p) for p in np.percentile(values, PERCENTS)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [EXACT, EXACT + 1, 100_000])
def test_many_values_give_percentiles_within_the_stated_error(shape: str, count: int) -> None:
    values = SHAPES[shape](np.random.default_rng(2), count)
    told = _counted(values)

    for percent, exact in zip(PERCENTS, np.percentile(values, PERCENTS), strict=True):
        assert told.percentile(percent) == pytest.approx(exact, rel=RELATIVE_ERROR * (1 + 1e-9), abs=1e-9)
    assert told.mean() == pytest.approx(values.mean())


def test_the_hundred_numbers_from_1_have_the_percentiles_a_hand_finds() -> None:
    told = _counted(np.arange(1.0, 101.0))

    assert told.to_json() == {
        "count": 100,
        "mean": 50.5,
        "min": 1.0,
        "p50": pytest.approx(50.5),  # between the 50th and the 51st
        "p90": pytest.approx(90.1),  # 1 + 0.90 * 99
        "p95": pytest.approx(95.05),
        "p99": pytest.approx(99.01),
        "max": 100.0,
    }


def test_nothing_has_no_percentiles_and_no_mean() -> None:
    assert Percentiles().percentiles((50, 99)) == [None, None]
    assert Percentiles().mean() is None


def test_reading_percentiles_early_changes_none_of_those_read_later() -> None:
    values = np.random.default_rng(4).exponential(1.0, 3 * EXACT)
    told, undisturbed = Percentiles(), _counted(values)

    for value in values.tolist():
        told.add(value)
        if len(told) % 1000 == 0:
            told.percentile(50)

    assert told.percentiles(PERCENTS) == undisturbed.percentiles(PERCENTS)


def test_memory_is_the_same_for_a_million_values_as_for_twenty_thousand() -> None:
    chunk = np.random.default_rng(5).exponential(1.0, 20_000).tolist()
    tracemalloc.start()
    told = Percentiles()
    told.extend(chunk)
    early = tracemalloc.get_traced_memory()[0]
    for _ in range(49):
        told.extend(chunk)
    late = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert len(told) == 1_000_000
    assert late <= early + 4096


def test_a_negative_value_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match=r"-0\.5 is no latency"):
        Percentiles().add(-0.5)


def _counted(values: np.ndarray) -> Percentiles:
    told = Percentiles()
    for value in values.tolist():
        told.add(value)
    return told
