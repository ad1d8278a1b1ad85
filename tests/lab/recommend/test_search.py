"""The search finds any boundary from anywhere in few questions; a budget is spent in every way there is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.recommend.budget import list_layouts
from twinpool.lab.recommend.config import RecommendConfig, WorkerKind
from twinpool.lab.recommend.layout import Group, Layout
from twinpool.lab.recommend.measures import HighestRate
from twinpool.lab.recommend.ranking import rank
from twinpool.lab.recommend.search import RateGrid, highest_step
from twinpool.lab.recommend.trials import Trials


@pytest.mark.parametrize("first", [-700, 0, 3, 99, 100, 101, 700])
@pytest.mark.parametrize("boundary", [-351, -350, 0, 100, 699, 700])
def test_the_last_step_that_is_met_is_found(first: int, boundary: int) -> None:
    asked: list[int] = []

    def is_met(step: int) -> bool:
        asked.append(step)
        return step <= boundary

    found = highest_step(is_met, first=first, least=-350, most=700)

    assert found == (boundary if boundary >= -350 else None)
    assert len(asked) == len(set(asked)) <= 20
    assert all(-350 <= step <= 700 for step in asked)


def test_a_grid_has_its_rates_at_equal_ratios() -> None:
    grid = RateGrid(0.25)

    assert grid.rate(3) == pytest.approx(1.25**3)
    assert grid.step_at(grid.rate(3)) == 3 and grid.step_at(grid.rate(3) * 0.999) == 2


def names(config: RecommendConfig, *ranks: int) -> list[str]:
    return [layout.name for layout in list_layouts(config, ranks)]


def test_every_ratio_of_a_number_of_gpus_is_listed() -> None:
    config = RecommendConfig(kinds=(WorkerKind(profile="a"),), gpus=4)

    assert names(config, 1) == ["4C", "1P3D", "2P2D", "3P1D", "1P1D2C", "1P2D1C", "2P1D1C"]


def test_pools_may_differ_in_ranks_and_leave_no_room_for_another_worker() -> None:
    kinds = (WorkerKind(profile="m-tp1"), WorkerKind(profile="m-tp4"))

    listed = names(RecommendConfig(kinds=kinds, gpus=6, has_mixed=False), 1, 4)

    assert listed[:2] == ["6C(tp1)", "1C(tp4)"]
    assert "2P(tp1)+1D(tp4)" in listed and "1P(tp4)+2D(tp1)" in listed
    assert "1P(tp1)+1D(tp4)" not in listed  # one more prefill worker fits
    assert not any("P(tp4)+1D(tp4)" in name for name in listed)  # 8 GPUs


def test_money_and_power_bound_the_workers() -> None:
    kinds = (
        WorkerKind(profile="m-old", cost=1.0, watts=400.0),
        WorkerKind(profile="m-new", cost=3.0, watts=700.0),
    )

    by_cost = names(RecommendConfig(kinds=kinds, budget=6.0, has_mixed=False), 1, 1)
    by_watts = names(RecommendConfig(kinds=kinds, watts=1500.0, has_mixed=False), 1, 1)

    assert by_cost[:2] == ["6C(old)", "2C(new)"] and "1P(new)+3D(old)" in by_cost
    assert by_watts[:2] == ["3C(old)", "2C(new)"] and "1P(new)+2D(old)" in by_watts


class _Repeats:
    """Trials of 20 requests each, of which one repeat is met at any rate and the others up to 2 a second."""

    grid = RateGrid(0.5)

    def __init__(self, *, boundless: int) -> None:
        self.load = SimpleNamespace(repeats=((None,) * 20,) * 3)
        self._boundless = boundless

    def is_met(self, layout: Layout, repeat: int, step: int) -> bool:
        return repeat == self._boundless or self.grid.rate(step) <= 2.0


@pytest.mark.parametrize("boundless", [0, 1, 2])
def test_one_repeat_that_is_met_at_any_rate_leaves_no_value(boundless: int) -> None:
    group = Group(role=Role.COLOCATED, workers=2, kind=WorkerKind(profile="a"), ranks=1)
    measure = HighestRate(cast(Trials, _Repeats(boundless=boundless)))

    with pytest.raises(ConfigError, match=r"^workload: 20 requests are so few that 2C .* at any rate"):
        rank([Layout(groups=(group,))], measure, repeats=3, near=1.0)
