"""Summary: what a hand computes from a handful of requests."""

from __future__ import annotations

import json

import pytest

from twinpool.core.errors import ConfigError
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.summary import LATENCIES, Summary
from twinpool.lab.record import Record

# Due at 1 s, sent a tenth late, first token at 2 s, three more at steps of half a second.
QUICK = Record(
    index=0,
    due_s=1.0,
    sent_s=1.1,
    first_token_s=2.0,
    last_token_s=3.5,
    gaps_s=(0.5, 0.5, 0.5),
    end_s=3.5,
    prompt_tokens=10,
    cached_tokens=4,
    output_tokens=4,
    queue_s=0.25,
    kv_bytes=1000,
    path="disaggregated",
)
SLOW = Record(
    index=1,
    due_s=2.0,
    sent_s=2.0,
    first_token_s=6.0,
    last_token_s=8.0,
    gaps_s=(2.0,),
    end_s=8.0,
    prompt_tokens=30,
    output_tokens=2,
    path="local",
)
ONE_TOKEN = Record(
    index=2, due_s=3.0, sent_s=3.0, first_token_s=4.0, last_token_s=4.0, end_s=4.0, output_tokens=1
)
FAILED = Record(index=3, due_s=4.0, sent_s=4.0, end_s=11.0, prompt_tokens=50, error="timeout")


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    told = Summary().add_all([QUICK]).to_json()

    assert {name: told[name]["p50"] for name in LATENCIES} == {
        "ttft_s": 1.0,
        "tpot_s": 0.5,
        "itl_s": 0.5,
        "e2e_s": 2.5,
        "queue_s": 0.25,
        "normalised_s": 0.625,
        "late_s": pytest.approx(0.1),
    }


def test_throughput_is_over_the_time_from_the_first_due_to_the_last_end() -> None:
    told = Summary().add_all([QUICK, SLOW, ONE_TOKEN, FAILED]).to_json()

    assert told["duration_s"] == 10.0  # from 1 s to 11 s
    assert told["requests"] == 4
    assert told["answered"] == 3
    assert told["requests_per_s"] == pytest.approx(0.3)
    assert told["input_tokens_per_s"] == pytest.approx(4.0)  # 10 + 30; the failed one counts for nothing
    assert told["output_tokens_per_s"] == pytest.approx(0.7)
    assert told["cached_tokens"] == 4
    assert told["errors"] == {"timeout": 1}
    assert told["paths"] == {"disaggregated": 1, "local": 1}


def test_goodput_asks_for_both_limits_and_counts_failures_as_not_good() -> None:
    limits = Limits(ttft_s=1.0, tpot_s=0.5)
    assert [limits.are_met_by(r) for r in (QUICK, SLOW, ONE_TOKEN, FAILED)] == [True, False, True, False]

    told = Summary(limits).add_all([QUICK, SLOW, ONE_TOKEN, FAILED]).to_json()["goodput"]
    assert told == {
        "ttft_limit_s": 1.0,
        "tpot_limit_s": 0.5,
        "requests": 2,
        "share": 0.5,
        "per_s": pytest.approx(0.2),
    }


@pytest.mark.parametrize("limits", [Limits(ttft_s=0.99), Limits(tpot_s=0.49)])
def test_one_limit_missed_is_enough(limits: Limits) -> None:
    assert not limits.are_met_by(QUICK)


def test_gaps_count_alike_whichever_request_they_are_of() -> None:
    told = Summary().add_all([QUICK, SLOW])

    assert told.itl_s.mean() == pytest.approx((3 * 0.5 + 2.0) / 4)
    assert told.tpot_s.mean() == pytest.approx((0.5 + 2.0) / 2)


def test_failures_have_no_latencies_but_are_counted_as_sent() -> None:
    told = Summary().add_all([FAILED]).to_json()

    assert [told[name]["count"] for name in LATENCIES] == [0, 0, 0, 0, 0, 0, 1]
    assert told["goodput"]["share"] == 0.0


def test_nothing_comes_to_nulls_that_json_can_say() -> None:
    told = json.loads(json.dumps(Summary().to_json(), allow_nan=False))

    assert told["requests"] == 0
    assert told["goodput"]["share"] is None
    assert told["ttft_s"]["p99"] is None


def test_a_limit_that_nothing_can_meet_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"limits\.tpot_s: 0\.0 is not above 0"):
        Limits(tpot_s=0.0)
