"""The share of requests within the limits: a row an arm, a column a rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.lab.study.figures.canvas import new_figure
from twinpool.lab.study.figures.palette import LIGHT, heat_of
from twinpool.lab.study.results import Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARGIN, _COLUMN = 60, 36  # pixels beside the fields, and that a field needs for its text
ABOUT = "Share of requests within both limits, by arm and rate."


def draw(results: Results, width: int) -> Figure:
    """Return the figure; a field that was not measured is empty."""
    from matplotlib.patches import Rectangle

    arms, rates = results.arms, results.some_rates((width - _MARGIN) // _COLUMN)
    figure, (axes,) = new_figure(width, 80 + 44 * len(arms))
    for row, arm in enumerate(arms):
        for column, rate in enumerate(rates):
            share = results.good_share(arm, rate)
            if share is None:
                continue
            field, ink = heat_of(share)
            axes.add_patch(
                Rectangle((column - 0.48, row - 0.46), 0.96, 0.92, facecolor=field, edgecolor="none")
            )
            size = 11.0 if width / len(rates) > 60 else 9.0
            axes.text(column, row, f"{share * 100:.0f} %", color=ink, ha="center", va="center", fontsize=size)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(arms)), arms, color=LIGHT["ink"])
    axes.set_xlabel("rate of requests (req/s)")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure
