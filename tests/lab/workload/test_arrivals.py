"""Arrivals: rate and burstiness of each process."""

from __future__ import annotations

import random
import statistics
from itertools import islice, pairwise

import pytest

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.arrivals import read_arrivals


@pytest.mark.parametrize(
    ("text", "cv"),
    [("poisson(4)", 1.0), ("gamma(4, cv=3)", 3.0), ("gamma(4, 0.25)", 0.25), ("constant(4)", 0.0)],
)
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(text: str, cv: float) -> None:
    times = list(islice(read_arrivals(text, "arrival").times(random.Random(1)), 100_001))

    gaps = [later - earlier for earlier, later in pairwise(times)]

    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.03, abs=1e-6)
    assert min(gaps) >= 0.0


def test_constant_arrivals_do_not_drift() -> None:
    times = islice(read_arrivals("constant(3)", "arrival").times(random.Random(1)), 3001)

    assert list(times)[3000] == 1000.0


def test_at_once_is_at_once() -> None:
    assert list(islice(read_arrivals("at_once", "arrival").times(random.Random(1)), 3)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["poisson", "gamma"])
def test_twice_the_rate_is_the_same_arrivals_at_half_the_times(kind: str) -> None:
    slow, quick = (
        list(islice(read_arrivals(f"{kind}({rate})", "arrival").times(random.Random(7)), 50))
        for rate in (2, 4)
    )

    assert quick == pytest.approx([time / 2 for time in slow])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poisson(0)", r"poisson\.rate: 0\.0 is not in \[1e-9, 1e9\]"),
        ("constant(1e300)", r"constant\.rate: 1e\+300 is not in"),
        ("gamma(1, cv=0)", r"gamma\.cv: 0\.0 is not in \[0\.001, 100\]"),
        ("gamma(1, cv=1e200)", r"gamma\.cv: 1e\+200 is not in"),
        ("gamma(1, cv=1e-200)", r"gamma\.cv: 1e-200 is not in"),
        ("poisson", r"arrival\.poisson\.rate: is missing"),
        ("4", "arrival: '4' is none of poisson"),
    ],
)
def test_what_is_no_process_is_refused_with_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arrivals(text, "arrival")
