"""Which cell and which request of a study are shown from the inside, for each arm the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinpool.lab.study.cell import Cell
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.results import Results
from twinpool.lab.study.stories import Story, first_token_s, phases


def shown_cells(results: Results) -> Mapping[str, Cell]:
    """Return a cell of every arm, of one rate and repeat: the highest rate that most arms have in common."""
    by_load: dict[tuple[float, int], dict[str, Cell]] = {}
    for measurement in results.valid:
        if measurement.stories:
            cell = measurement.cell
            by_load.setdefault((cell.rate, -cell.repeat), {})[cell.arm] = cell
    if not by_load:
        return {}
    _, cells = max(by_load.items(), key=lambda item: (len(item[1]), item[0]))
    return {arm: cells[arm] for arm in results.arms if arm in cells}


def stories_of(cells: Mapping[str, Cell], folder: StudyFolder) -> Mapping[str, Sequence[Story]]:
    """Read the stories of the cells, by arm."""
    return {arm: folder.stories(cell) for arm, cell in cells.items()}


def shown_request(stories: Mapping[str, Sequence[Story]]) -> Mapping[str, Story]:
    """Return one request as every arm answered it: the one in the middle, by how long its prompt took.

    Only those count that were decoded in every arm, of those the half whose prompts took longest to compute.
    """
    by_arm = {
        arm: {
            story["index"]: story
            for story in told
            if any(phase.name == "decode" for phase in phases(story)) and first_token_s(story) is not None
        }
        for arm, told in stories.items()
    }
    if not by_arm:
        return {}
    common = set.intersection(*(set(told) for told in by_arm.values()))
    if not common:
        return {}

    def computed_s(index: int) -> float:
        return sum(
            phase.end_s - phase.start_s
            for told in by_arm.values()
            for phase in phases(told[index])
            if phase.name == "prefill"
        )

    longest = sorted(common, key=computed_s)[len(common) // 2 :]
    index = longest[len(longest) // 2]
    return {arm: told[index] for arm, told in by_arm.items()}
