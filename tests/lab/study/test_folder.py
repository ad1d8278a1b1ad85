"""The folder of a study: names that do not collide, and a file that cannot be read or written is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.made_up import measured, settings
from twinpool.core.errors import ConfigError
from twinpool.lab.study.cell import Cell
from twinpool.lab.study.folder import StudyFolder

CELL = Cell(arm="1:1", rate=2.0, repeat=0)


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    made = StudyFolder(tmp_path)
    made.begin(settings())
    told = measured(CELL)
    made.add(told.measurement, records=told.records, stories=told.stories)
    return made


def test_cells_of_different_rates_have_different_names() -> None:
    rates = (2.0, 2.0000001, 2.0000002, 2.5, 1e-7)

    names = [Cell(arm="1:1", rate=rate, repeat=0).name for rate in rates]

    assert names[0] == "1-1_at_2_r0" and names[3] == "1-1_at_2.5_r0"
    assert len(set(names)) == len(rates)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": NaN}', "{", "7"])
def test_what_is_no_json_object_is_named(folder: StudyFolder, text: str) -> None:
    path = folder.path / "cells" / f"{CELL.name}.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=f"^{path}: "):
        folder.measurements()


def _without_summary(bench: dict[str, Any]) -> None:
    del bench["summary"]


def _with(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda bench: bench["summary"].update(changes)


@pytest.mark.parametrize(
    "spoil",
    [
        _without_summary,
        _with(goodput={}),
        _with(answered="all"),
        _with(answered=10**400),
        _with(duration_s=None),
        _with(errors=["queue_full"]),
        _with(ttft_s={"p50": 0.1, "p99": 0.1}),
        _with(tpot_s=None),
        lambda bench: bench.update(machine=None),
        lambda bench: bench.update(load_before="low"),
    ],
)
def test_a_cell_without_a_number_that_a_report_tells_is_named(
    folder: StudyFolder, spoil: Callable[[dict[str, Any]], None]
) -> None:
    path = folder.path / "cells" / f"{CELL.name}.json"
    told = json.loads(path.read_text())
    spoil(told["bench"])
    path.write_text(json.dumps(told))

    with pytest.raises(ConfigError, match=rf"^{path}\.bench: cannot be read: "):
        folder.measurements()


@pytest.mark.parametrize(
    "change",
    [
        {"spans": None},
        {"spans": [{"name": "prefill", "start_s": 0.0}]},
        {"spans": [{"name": "prefill", "start_s": "now", "end_s": 1.0}]},
        {"events": [{"at_s": 1.0}]},
        {"index": None},
        {"kv_bytes": "many"},
    ],
)
def test_a_story_that_tells_not_what_happened_is_named_by_its_line(
    folder: StudyFolder, change: dict[str, Any]
) -> None:
    path = folder.path / "stories" / f"{CELL.name}.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), **change})
    path.write_text("\n".join(lines))

    with pytest.raises(ConfigError, match=f"^{path}:3: is no story: "):
        folder.stories(CELL)


def test_a_folder_in_the_place_of_a_file_is_named(folder: StudyFolder) -> None:
    (folder.path / "report.html").mkdir()

    with pytest.raises(ConfigError, match=r"report\.html: cannot be written: Is a directory$"):
        folder.write("report.html", "<html>")
