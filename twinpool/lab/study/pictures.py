"""The figures of a report, in the order in which they stand, with what is said below each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.lab.study.cell import Cell
from twinpool.lab.study.figures import goodput, heatmap, latency, timeline, waterfall
from twinpool.lab.study.figures.canvas import NARROW, WIDE, drawing, to_png, to_svg
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.results import Results
from twinpool.lab.study.showcase import shown_cells, shown_request, stories_of
from twinpool.lab.study.stories import Story

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure, drawn."""

    name: str
    title: str
    caption: str
    wide: str  # SVG
    narrow: str  # SVG, for a phone
    png: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    name: str
    title: str
    caption: str
    about: str
    draw: Callable[[int], Figure]


def draw_pictures(results: Results, folder: StudyFolder) -> tuple[Picture, ...]:
    """Draw every figure for a desktop and for a phone.

    Raises:
        ConfigError: matplotlib is not here, or the folder cannot be read.
    """
    with drawing():
        return tuple(_drawn(plan) for plan in _plans(results, folder))


def _drawn(plan: _Plan) -> Picture:
    wide = plan.draw(WIDE)
    return Picture(
        name=plan.name,
        title=plan.title,
        caption=plan.caption,
        wide=to_svg(wide, about=plan.about, class_name="wide"),
        narrow=to_svg(plan.draw(NARROW), about=plan.about, class_name="narrow"),
        png=to_png(wide),
    )


def _told_of(results: Results, cells: Mapping[str, Cell], stories: Mapping[str, Sequence[Story]]) -> str:
    """Say of how many requests a server still knew the stories: it remembers the last ones."""
    shown = min(map(len, stories.values()))
    sent = max(each.summary["requests"] for each in results.valid if each.cell in cells.values())
    return "All requests" if shown == sent else f"The last {shown:,} of {sent:,} requests"


def _plans(results: Results, folder: StudyFolder) -> list[_Plan]:
    plans = [
        _Plan(
            name="goodput",
            title="Requests within both limits",
            caption="Means of the repeats; bars reach from the least to the most.",
            about=goodput.ABOUT,
            draw=lambda width: goodput.draw(results, width),
        ),
        _Plan(
            name="share",
            title="Share of requests within both limits",
            caption="Means of the repeats.",
            about=heatmap.ABOUT,
            draw=lambda width: heatmap.draw(results, width),
        ),
        _Plan(
            name="ttft",
            title="Time to the first token",
            caption="All requests of all repeats, from when each was due: the line is the median, the box "
            "holds half of them, the whisker nine in ten. The scale is logarithmic.",
            about=latency.ABOUT_TTFT,
            draw=lambda width: latency.draw_ttft(results, folder, width),
        ),
        _Plan(
            name="tpot",
            title="Time per output token",
            caption="As above, the mean over the tokens of each answer after its first.",
            about=latency.ABOUT_TPOT,
            draw=lambda width: latency.draw_tpot(results, folder, width),
        ),
    ]
    cells = shown_cells(results)
    if not cells:
        return plans
    stories = stories_of(cells, folder)
    cell = next(iter(cells.values()))
    request = shown_request(stories)
    where = f"at {cell.rate:g} req/s, repeat {cell.repeat + 1}"
    if request:
        number = next(iter(request.values()))["index"] + 1
        plans.append(
            _Plan(
                name="waterfall",
                title="One request in each arm",
                caption=f"Request {number} {where}: the same prompt at the same moment of the same load.",
                about=waterfall.ABOUT,
                draw=lambda width: waterfall.draw(request, width),
            )
        )
    plans.append(
        _Plan(
            name="timeline",
            title="Both pools over time",
            caption=f"{_told_of(results, cells, stories)} {where}: how many wait for room, how many have "
            f"their prompt computed, and how many are answered at once.",
            about=timeline.ABOUT,
            draw=lambda width: timeline.draw(stories, width),
        )
    )
    return plans
