"""A deployment to simulate: what is given counts, 0 included, and what cannot be is refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.recommend.tables import write_profile
from twinpool.core.config import bind
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.profile.profile import Link
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Loss, Pool, SimulationConfig, Transfer
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.workload.item import WorkItem


@pytest.mark.parametrize(("hop_s", "wanted"), [(None, 1.5), (0.0, 1.0), (0.1, 1.2)])
def test_a_hop_is_that_of_the_profile_unless_another_is_given(
    hop_s: float | None, wanted: float, tmp_path: Path
) -> None:
    profile = write_profile(tmp_path, "toy", prefill=(1.0, 0.0, 0.0), decode=(0.1, 0.0, 0.0), hop_s=0.25)
    pools = (Pool(role=Role.COLOCATED, workers=1, profile=profile),)
    found: list[Record] = []

    run_simulation(
        [WorkItem(index=0, arrival_s=0.0, prompt_tokens=16, output_tokens=2)],
        SimulationConfig(pools=pools, hop_s=hop_s),
        on_record=found.append,
    )

    assert found[0].first_token_s == pytest.approx(wanted)  # a hop there, a prompt of 1 s, a hop back


def test_a_link_is_slowed_down_whether_it_ships_was_measured_or_is_given() -> None:
    measured = {"here": Link(latency_s=0.5, bytes_s=100.0, source="measured")}

    assert Transfer(link="eth_10g", slowdown=10).resolve().bytes_s == 1.25e8
    assert Transfer(link="here", slowdown=4).resolve(measured) == Link(
        latency_s=0.5, bytes_s=25.0, source="measured"
    )
    assert Transfer(link="here", bytes_s=10.0, latency_s=0.0, slowdown=2).resolve(measured) == Link(
        latency_s=0.0, bytes_s=5.0, source="as asked"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"bytes_s": 0.0}, "transfer.bytes_s: 0.0 is not above 0"),
        ({"slowdown": 0.0}, "transfer.slowdown: 0.0 is not above 0"),
        ({"latency_s": -1.0}, "transfer.latency_s: -1.0 is less than 0"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transfer(**setting)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pools": [{"role": "decode", "workers": 99_999_999, "profile": "toy"}]}, "pools: 99999999 workers"),
        ({"max_model_tokens": -4}, "max_model_tokens: -4 is less than 0"),
        ({"losses": [{"at_s": 1, "worker": "decode-0", "back_after_s": -5}]}, "losses.back_after_s: -5.0 is"),
        (
            {"role_changes": [{"at_s": 1, "worker": "decode-0", "role": "prefill", "timeout_s": -5}]},
            "role_changes.timeout_s: -5.0 is less than 0",
        ),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(setting: Mapping[str, Any], message: str) -> None:
    pools = [{"role": "decode", "workers": 1, "profile": "toy"}]

    with pytest.raises(ConfigError, match=f"^{message}"):
        bind(SimulationConfig, {"pools": pools, **setting})


def one_request(profile: str, *, arrival_s: float = 0.0, prompt_tokens: int = 16, **more: Any) -> Record:
    found: list[Record] = []
    run_simulation(
        [WorkItem(index=0, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=2)],
        SimulationConfig(pools=(Pool(role=Role.COLOCATED, workers=1, profile=profile),), **more),
        on_record=found.append,
    )
    return found[0]


@pytest.mark.parametrize(
    ("prefill", "more", "message"),
    [
        ((90_000.0, 0.0, 0.0), {}, "profile: of colocated-0 says that a step takes 90000 s"),
        ((0.0, 1e8, 1e8), {}, "profile: of colocated-0 says that a step takes 2.72e"),  # 16e8 + 256e8
        ((1.0, 0.0, 0.0), {"hop_s": 1e300}, r"hop_s: 1e\+300 is more than 86400"),
        ((1.0, 0.0, 0.0), {"arrival_s": 1e18}, r"workload: request 0 comes after 1e\+18 s"),
    ],
)
def test_times_that_no_simulation_sees_the_end_of_are_refused(
    prefill: tuple[float, ...], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    profile = write_profile(tmp_path, "toy", prefill=prefill, decode=(0.1, 0.0, 0.0))

    with pytest.raises(ConfigError, match=f"^{message}"):
        one_request(profile, **more)


def test_a_prompt_that_no_memory_holds_is_refused_as_any_that_is_too_long(tmp_path: Path) -> None:
    profile = write_profile(tmp_path, "toy", prefill=(1.0, 0.0, 0.0), decode=(0.1, 0.0, 0.0))

    longest, longer = (one_request(profile, prompt_tokens=tokens) for tokens in (8190, 8191))
    record = one_request(profile, prompt_tokens=10**14)

    assert (longest.error, longer.error) == ("", "context_length_exceeded")
    assert (record.error, record.prompt_tokens) == ("context_length_exceeded", 10**14)


@pytest.mark.parametrize(
    ("more", "lost_s", "busy_s"),
    [
        ({}, 0.25, 0.25),  # in the prompt, which takes 1 s
        ({}, 1.25, 1.25),  # in the third step of many that take 0.1 s
        ({"slowdown": {"prompts": [1.0, 2.0], "decodes": [1.0, 2.0]}}, 0.25, 0.25),
    ],
)
def test_a_worker_that_dies_was_busy_until_then(
    more: dict[str, Any], lost_s: float, busy_s: float, tmp_path: Path
) -> None:
    profile = write_profile(tmp_path, "toy", prefill=(1.0, 0.0, 0.0), decode=(0.1, 0.0, 0.0), **more)
    result = run_simulation(
        [WorkItem(index=0, arrival_s=0.0, prompt_tokens=16, output_tokens=50)],
        SimulationConfig(
            pools=(Pool(role=Role.COLOCATED, workers=1, profile=profile),),
            losses=(Loss(at_s=lost_s, worker="colocated-0"),),
        ),
    )

    assert [use.busy_s for use in result.workers] == [pytest.approx(busy_s)]
