"""What both pools did over the time of a cell: how many requests waited, were read, and were answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from twinpool.lab.study.figures.canvas import legend, new_figure
from twinpool.lab.study.figures.palette import PHASES
from twinpool.lab.study.stories import Story, at_once, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "Requests that wait, whose prompt is computed, and that are answered, over time, by arm."
_LABELS = {"queue": "waiting", "prefill": "in prefill", "decode": "in decode"}
_BINS = 120


def draw(stories: Mapping[str, Sequence[Story]], width: int) -> Figure:
    """Return the figure.

    Args:
        stories: Of the requests of one cell, by arm.
        width: Of the figure.
    """
    figure, rows = new_figure(width, 60 + 130 * len(stories), rows=len(stories), share_y=True)
    end_s = max(
        (phase.end_s for told in stories.values() for story in told for phase in phases(story)), default=1.0
    )
    bins = _BINS if width > 500 else _BINS // 2
    times = [(number + 0.5) * end_s / bins for number in range(bins)]
    for axes, (arm, told) in zip(rows, stories.items(), strict=True):
        for name, label in _LABELS.items():
            spans = [
                (phase.start_s, phase.end_s)
                for story in told
                for phase in phases(story)
                if phase.name == name
            ]
            axes.plot(
                times, at_once(spans, end_s=end_s, bins=bins), color=PHASES[name], linewidth=1.6, label=label
            )
        axes.set_title(arm)
        axes.set_ylabel("requests")
    rows[-1].set_xlim(0, end_s)
    rows[-1].set_ylim(bottom=0)  # of all, once all is drawn
    rows[-1].set_xlabel("time since the start of the cell (s)")
    legend(figure, rows[0], width=width)
    return figure
