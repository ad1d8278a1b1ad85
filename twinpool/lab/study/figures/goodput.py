"""Requests within the limits against the rate, a line an arm."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from twinpool.lab.study.figures.canvas import legend, new_figure
from twinpool.lab.study.figures.palette import LIGHT, MARKERS, SERIES
from twinpool.lab.study.results import GOODPUT, Results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "Requests within both limits per second, against the rate at which they were sent, by arm."


def draw(results: Results, width: int) -> Figure:
    """Return the figure: means of the repeats, with a bar from the least to the most."""
    figure, (axes,) = new_figure(width, 330)
    rates = results.rates
    axes.plot(
        [0, *rates],
        [0, *rates],
        color=LIGHT["wait"],
        linewidth=1.2,
        linestyle=":",
        label="all within the limits",
    )
    for number, arm in enumerate(results.arms):
        told = {rate: results.values(GOODPUT, arm, rate) for rate in rates}
        known = [rate for rate in rates if told[rate]]
        means = [fmean(told[rate].values()) for rate in known]
        below = [max(0.0, mean - min(told[rate].values())) for rate, mean in zip(known, means, strict=True)]
        above = [max(0.0, max(told[rate].values()) - mean) for rate, mean in zip(known, means, strict=True)]
        axes.errorbar(
            known,
            means,
            yerr=(below, above),
            color=SERIES[number % len(SERIES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
            capsize=3,
            elinewidth=1.2,
            label=arm,
        )
    axes.set_xlim(0, rates[-1] * 1.06)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rate of requests (req/s)")
    axes.set_ylabel("within both limits (req/s)")
    legend(figure, axes, width=width)
    return figure
