"""Lengths: means and bounds of each distribution, and what is no distribution."""

from __future__ import annotations

import random

import pytest

from twinpool.core.errors import ConfigError
from twinpool.lab.workload.lengths import read_lengths


@pytest.mark.parametrize(
    ("text", "mean", "least", "most"),
    [
        ("512", 512, 512, 512),
        ("fixed(512)", 512, 512, 512),
        ("uniform(10, 20)", 15, 10, 20),
        ("uniform(least=7, most=7)", 7, 7, 7),
        ("lognormal(300, sigma=0.5)", 300, 1, 10_000),
        ("bimodal(100, 1000, 0.25)", 325, 100, 1000),  # 3/4 of 100 and 1/4 of 1000
        ("bimodal(100, 1000, long_share=0.25, spread=0.1)", 325, 90, 1100),
    ],
)
def test_drawn_lengths_have_the_mean_and_the_bounds_that_were_asked_for(
    text: str, mean: float, least: int, most: int
) -> None:
    lengths, source = read_lengths(text, "prompt"), random.Random(1)

    drawn = [lengths.draw(source) for _ in range(20_000)]

    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    assert min(drawn) >= least
    assert max(drawn) <= most


def test_a_lognormal_is_cut_at_most_and_never_empty() -> None:
    lengths, source = read_lengths("lognormal(2, sigma=2, most=50)", "prompt"), random.Random(2)

    drawn = {lengths.draw(source) for _ in range(20_000)}

    assert (min(drawn), max(drawn)) == (1, 50)


def test_uniform_reaches_both_ends_alike() -> None:
    lengths, source = read_lengths("uniform(1, 4)", "prompt"), random.Random(3)

    drawn = [lengths.draw(source) for _ in range(40_000)]

    assert [drawn.count(tokens) / 40_000 for tokens in (1, 2, 3, 4)] == pytest.approx([0.25] * 4, abs=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "prompt: 0 is less than 1 token"),
        ("normal(3)", r"prompt: 'normal\(3\)' is none of fixed\(...\), uniform\(...\), lognormal"),
        ("uniform(1, 1000000001)", "uniform.most: 1000000001 is more than 1,000,000,000 tokens"),
        (f"uniform(1, 1{'0' * 400})", "uniform.most: inf is a number, not a whole number"),
        (f"bimodal(1, 1{'0' * 400})", "bimodal.long"),
        ("lognormal(9, sigma=1e200)", r"lognormal\.sigma: 1e\+200 is not in"),
        ("uniform(9, 3)", "uniform.most: 3 is less than least, 9"),
        ("uniform(9)", r"prompt\.uniform\.most: is missing"),
        ("fixed(1, 2)", "has more values than tokens"),
        ("fixed(1.5)", r"prompt\.fixed\.tokens: 1\.5 is a number, not a whole number"),
        (
            "lognormal(100, sgima=1)",
            r"prompt\.lognormal\.sgima: is none of mean, most, sigma; did you mean sigma",
        ),
        ("lognormal(100, mean=1)", "mean stands twice"),
        ("lognormal(100,)", "nothing stands beside a comma"),
        ("lognormal((100)", "brackets"),
        ("bimodal(1, 2, 3)", r"bimodal\.long_share: 3\.0 is not in \[0, 1\]"),
        ("lognormal(nan)", "'nan' is a text, not a number"),
    ],
)
def test_what_is_no_distribution_is_refused_with_its_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lengths(text, "prompt")
