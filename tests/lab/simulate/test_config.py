"""A deployment to simulate: what is given counts, 0 included, and what cannot be is refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.recommend.tables import write_profile
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.profile.profile import Link
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import Pool, SimulationConfig, Transfer
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
