"""Closed forms, by the vectors that state them."""

from __future__ import annotations

import pytest

from tests.lab.profile.bounds import (
    WorkerRate,
    colocated_rate,
    disaggregated_rate,
    machines_within,
    match_workers,
    mean_ttft_s,
)
from tests.shared import vectors
from twinpool.core.errors import ConfigError

KNOWN = vectors()
pytestmark = pytest.mark.skipif(not KNOWN, reason="vectors.json is not here")


def of(prefix: str) -> list[str]:
    return sorted(name for name in KNOWN if name.startswith(prefix))


@pytest.mark.parametrize("name", of("md1"))
def test_mean_ttft_is_that_of_distserve_equations_1_to_3(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    service_s, rate = given["D"], given["R"]
    assert mean_ttft_s(service_s, rate) == pytest.approx(wanted["avg_ttft"], abs=1e-9)
    assert mean_ttft_s(service_s, rate, stages=2) == pytest.approx(wanted["avg_ttft_inter2"], abs=1e-9)
    assert mean_ttft_s(service_s / given["K"], rate) == pytest.approx(wanted["avg_ttft_intra2"], abs=1e-9)


@pytest.mark.parametrize("name", of("fluid"))
def test_two_pools_never_have_a_higher_rate_than_workers_that_do_both(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    times = {"prefill_s": given["prefill_gpu_s_per_req"], "decode_s": given["decode_gpu_s_per_req"]}
    apart = disaggregated_rate(
        prefill_workers=given["prefill_gpus"], decode_workers=given["decode_gpus"], **times
    )
    together = colocated_rate(workers=given["prefill_gpus"] + given["decode_gpus"], **times)
    assert apart == pytest.approx(wanted["disagg_rps"], abs=1e-9)
    assert together == pytest.approx(wanted["colocated_fluid_rps"], abs=1e-9)
    assert apart <= together


@pytest.mark.parametrize("name", of("ratematch"))
def test_the_ratio_of_aiconfigurator(name: str) -> None:
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    match = match_workers(
        WorkerRate(
            per_s=given["prefill_seq_per_s_per_worker"],
            gpus=given["prefill_gpus_per_worker"],
            factor=given["prefill_factor"],
        ),
        WorkerRate(
            per_s=given["decode_seq_per_s_per_worker"],
            gpus=given["decode_gpus_per_worker"],
            factor=given["decode_factor"],
        ),
        total_gpus=given["allowed_total_gpus"],
        max_workers=given["max_workers"],
    )
    assert match is not None
    assert (match.prefill_workers, match.decode_workers) == (
        wanted["prefill_workers"],
        wanted["decode_workers"],
    )
    assert match.per_s == pytest.approx(wanted["seq_per_s"], abs=1e-6)
    assert match.per_s_per_gpu == pytest.approx(wanted["seq_per_s_per_gpu"], abs=1e-6)


@pytest.mark.parametrize("name", of("splitwise-iso"))
def test_splitwise_counts_machines_of_equal_power_and_cost(name: str) -> None:
    """The power-capped H100 machine of Splitwise's HHcap takes 70 % of the power of an H100 machine."""
    given, wanted = KNOWN[name]["inputs"], KNOWN[name]["expected"]
    left = given["budget_h100"] - given["h100"]
    power, cost = given["power_kW"], given["cost"]
    assert machines_within(left * power["h100"], price=power["a100"]) == wanted["iso_power_a100"]
    assert machines_within(left * cost["h100"], price=cost["a100"]) == wanted["iso_cost_a100"]
    assert machines_within(left, price=0.7) == wanted["hhcap_token_h100"]


def test_no_rate_is_met_by_a_worker_that_is_always_busy() -> None:
    with pytest.raises(ConfigError, match=r"10 a second keep a worker busy 1\.00 of the time"):
        mean_ttft_s(0.1, 10)
