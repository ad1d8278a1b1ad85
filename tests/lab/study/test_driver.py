"""A study takes its cells in turns, keeps each at once, goes on where it was, and stops on a difference."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.made_up import config, measured, settings
from twinpool.core.errors import ConfigError
from twinpool.lab.study.cell import Cell
from twinpool.lab.study.driver import Driver, StudyStopped
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.laboratory import Measured
from twinpool.lab.study.order import all_cells
from twinpool.lab.study.results import read_results
from twinpool.lab.study.run import Unwatched
from twinpool.lab.study.settings import SearchConfig, StudySettings


class ToyLaboratory:
    """Measures made-up cells.

    Args:
        bad: How many of 20 requests are not within the limits.
        stop_after: Cells, after which somebody asks to stop during the next one.
        problems: Of the first measurements of a cell.
    """

    def __init__(
        self,
        *,
        bad: Callable[[Cell], int] = lambda cell: 0,
        stop_after: int = 1000,
        problems: Mapping[Cell, list[tuple[str, ...]]] | None = None,
        configs: Callable[[Cell], dict[str, Any]] = lambda cell: config(cell.arm),
    ) -> None:
        self.is_stopped = False
        self.ran: list[Cell] = []
        self._bad = bad
        self._stop_after = stop_after
        self._problems = dict(problems or {})
        self._configs = configs

    async def prepare(self, cell: Cell) -> Mapping[str, Any]:
        return self._configs(cell)

    async def run(self, cell: Cell) -> Measured:
        self.is_stopped = len(self.ran) >= self._stop_after
        self.ran.append(cell)
        problems = self._problems[cell].pop(0) if self._problems.get(cell) else ()
        return measured(cell, bad=self._bad(cell), problems=problems)


def drive(folder: StudyFolder, laboratory: ToyLaboratory, asked: StudySettings | None = None) -> None:
    wanted = asked or settings()
    with folder.held():
        folder.begin(wanted)
        asyncio.run(Driver(wanted, folder, laboratory, watch=Unwatched()).run())


def test_arms_take_turns_and_each_is_first_as_often() -> None:
    cells = all_cells(settings(workers=3, ratios=("1:2", "2:1"), rates=(1.0,)))

    assert [cell.arm for cell in cells] == [
        *("1:2", "2:1", "colocated"),
        *("2:1", "colocated", "1:2"),
        *("colocated", "1:2", "2:1"),
    ]
    assert [cell.repeat for cell in cells] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_every_cell_is_measured_once_and_kept(tmp_path: Path) -> None:
    laboratory, folder = ToyLaboratory(), StudyFolder(tmp_path)

    drive(folder, laboratory)

    assert laboratory.ran == list(all_cells(settings()))
    assert set(folder.measurements()) == set(laboratory.ran)
    assert len(list(folder.records(laboratory.ran[0]))) == len(folder.stories(laboratory.ran[0])) == 20


def test_a_study_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    with pytest.raises(StudyStopped):
        drive(folder, ToyLaboratory(stop_after=5))
    kept = folder.measurements()

    second = ToyLaboratory()
    drive(folder, second)

    assert set(kept) == set(all_cells(settings())[:5]), "the cell that was stopped counts for nothing"
    assert second.ran == list(all_cells(settings())[5:])


def test_a_cell_that_does_not_count_is_measured_a_second_time_and_again_when_asked(tmp_path: Path) -> None:
    cell, late = all_cells(settings())[1], ("sent late",)
    folder = StudyFolder(tmp_path)
    drive(folder, ToyLaboratory(problems={cell: [late, late]}))
    assert folder.measurements()[cell].tries == 2 and folder.measurements()[cell].problems == late

    again = ToyLaboratory(problems={cell: [late]})
    drive(folder, again)

    assert again.ran == [cell, cell]
    assert folder.measurements()[cell].problems == ()


def test_more_repeats_add_cells_to_those_that_are_there(tmp_path: Path) -> None:
    folder, more = StudyFolder(tmp_path), settings(repeats=4)
    drive(folder, ToyLaboratory())

    second = ToyLaboratory()
    drive(folder, second, more)

    assert second.ran == [cell for cell in all_cells(more) if cell.repeat == 3]


def test_another_study_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    drive(folder, ToyLaboratory())

    with pytest.raises(ConfigError, match=r"^study\.cell_s: is 10\.0 in .* and 20\.0 now"):
        drive(folder, ToyLaboratory(), settings(cell_s=20.0))


def test_two_sittings_at_once_are_refused(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    with folder.held(), pytest.raises(ConfigError, match="another study is being measured"):
        drive(StudyFolder(tmp_path), ToyLaboratory())


def test_the_run_ends_before_an_arm_of_other_settings_is_measured(tmp_path: Path) -> None:
    def configs(cell: Cell) -> dict[str, Any]:
        return config(cell.arm, settings={"threads": 2 if cell.arm == "colocated" else 1})

    laboratory, folder = ToyLaboratory(configs=configs), StudyFolder(tmp_path)

    with pytest.raises(
        ConfigError, match=r"^settings\.threads: is 1 in 1:1 at 1 req/s, repeat 1 and 2 in coloc"
    ):
        drive(folder, laboratory)
    assert [cell.arm for cell in laboratory.ran] == ["1:1"]


def test_settings_of_an_earlier_sitting_are_compared_too(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    with pytest.raises(StudyStopped):
        drive(folder, ToyLaboratory(stop_after=3))

    other = ToyLaboratory(configs=lambda cell: config(cell.arm, version="0.2"))
    with pytest.raises(ConfigError, match=r"^version: is '0\.1' in .* and '0\.2' in"):
        drive(folder, other)
    assert other.ran == []


def test_a_search_ends_at_the_rate_that_each_arm_can_bear(tmp_path: Path) -> None:
    # 1:1 meets the limits up to 5 req/s, colocated up to 3.
    most = {"1:1": 5.0, "colocated": 3.0}
    asked = settings(rates=(), search=SearchConfig(least=1.0, most=64.0, precision=1.1), repeats=3)
    laboratory = ToyLaboratory(bad=lambda cell: 20 if cell.rate > most[cell.arm] else 0)
    folder = StudyFolder(tmp_path)

    drive(folder, laboratory, asked)

    first = [cell.rate for cell in laboratory.ran if cell.arm == "1:1" and cell.repeat == 0]
    assert first[:5] == [1.0, 2.0, 4.0, 8.0, 5.66]
    for arm, limit in most.items():
        found = read_results(folder).capacities(arm)
        assert len(found) == 3
        assert all(limit / 1.1 <= rate <= limit for rate in found.values()), found
    by_repeat = [sum(cell.repeat == repeat for cell in laboratory.ran) for repeat in range(3)]
    assert by_repeat[1] < by_repeat[0], "a later repeat begins where the earlier one ended"


def test_a_search_says_zero_where_no_rate_can_be_borne(tmp_path: Path) -> None:
    asked = settings(rates=(), search=SearchConfig(least=1.0, most=64.0), repeats=1)
    laboratory, folder = ToyLaboratory(bad=lambda cell: 20), StudyFolder(tmp_path)

    drive(folder, laboratory, asked)

    assert sorted({cell.rate for cell in laboratory.ran}) == [0.0625, 0.125, 0.25, 0.5, 1.0]


def test_a_rate_that_cannot_be_measured_ends_the_search_and_says_nothing_of_lower_ones(
    tmp_path: Path,
) -> None:
    asked = settings(rates=(), search=SearchConfig(least=1.0, most=64.0), repeats=1, colocated=False)
    late = ("sent late",)
    laboratory = ToyLaboratory(problems={Cell(arm="1:1", rate=2.0, repeat=0): [late, late]})
    folder = StudyFolder(tmp_path)

    drive(folder, laboratory, asked)

    assert [cell.rate for cell in laboratory.ran] == [1.0, 2.0, 2.0]
    assert read_results(folder).capacities("1:1") == {}
