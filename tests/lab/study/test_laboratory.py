"""A laboratory at a small server: warm pairs, empty caches, and what changed in the middle of a cell."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.lab.study.made_up import LIMITS, settings
from tests.lab.study.server import ToyServer
from twinpool.core.errors import Unavailable
from twinpool.lab.bench.config import BenchConfig
from twinpool.lab.study.cell import Cell
from twinpool.lab.study.laboratory import Laboratory, Measured
from twinpool.lab.study.server import StudiedServer


def measure(server: ToyServer, arm: str, **changes: Any) -> Measured:
    """Prepare and run one cell of eight requests in a fifth of a second."""
    asked = settings(
        **{"workers": len(server.roles), "cell_s": 0.2, "rates": (40.0,)} | changes,
        bench=BenchConfig(limits=LIMITS, late_limit_s=60.0),
    )

    async def run() -> Measured:
        async with server.serving() as url, StudiedServer(url) as studied:
            laboratory = Laboratory(asked, studied, on_start=lambda generator, summary: None)
            cell = Cell(arm=arm, rate=40.0, repeat=0)
            await laboratory.prepare(cell)
            return await laboratory.run(cell)

    return asyncio.run(asyncio.wait_for(run(), timeout=60.0))


def test_a_cell_is_measured_with_the_roles_of_its_arm_and_caches_that_were_emptied() -> None:
    server = ToyServer("colocated", "colocated")

    measured = measure(server, "1:1")

    assert server.roles == {"w0": "prefill", "w1": "decode"}
    assert measured.measurement.problems == ()
    assert measured.measurement.good_share == measured.measurement.answered_share == 1.0
    assert len(measured.records) == 8
    assert server.cleared_after == [6], "after three requests for each worker, and before the eight"


def test_every_pair_is_warm_where_both_pools_take_turns_in_step() -> None:
    server = ToyServer("prefill", "prefill", "decode", "decode")

    measure(server, "2:2", workers=4, ratios=("2:2",))

    # Twelve requests in step make two pairs, one more to a prefill worker alone and twelve the others.
    assert server.cleared_after == [12 + 1 + 12]
    assert set(server.pairs[:24]) == {(p, d) for p in ("w0", "w1") for d in ("w2", "w3")}


def test_a_role_that_changes_in_the_middle_of_a_cell_makes_it_void_and_shows_in_its_config() -> None:
    server = ToyServer("prefill", "decode")

    def change(number: int) -> None:
        if number == 6 + 4:
            server.roles["w1"] = "colocated"

    server.on_request = change
    measurement = measure(server, "1:1").measurement

    assert measurement.problems == ("worker w1 was decode and is colocated now",)
    assert measurement.config["workers"]["w1"]["role"] == "colocated"


def test_a_warm_up_that_is_refused_is_told() -> None:
    server = ToyServer("prefill", "decode")
    server.refuses = True

    with pytest.raises(Unavailable, match=r"^the warm-up was not answered: queue_full"):
        measure(server, "1:1")
