"""How latencies are distributed, a box an arm at each rate: the median, half of the requests, nine in ten."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from twinpool.lab.record import Record
from twinpool.lab.study.figures.canvas import new_figure
from twinpool.lab.study.figures.palette import LIGHT, SERIES
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ABOUT_TTFT = "Time to the first token by rate and arm: median, middle half, and from 5 to 95 percent."
ABOUT_TPOT = "Time per output token by rate and arm: median, middle half, and from 5 to 95 percent."
_MARGIN, _COLUMN = 70, 34  # pixels beside the boxes, and that the boxes of a rate need
_PERCENTS = (5, 25, 50, 75, 95)

Value = Callable[[Record], float | None]


def draw_ttft(results: Results, folder: StudyFolder, width: int) -> Figure:
    """Return the figure of times to the first token."""
    limit = results.settings.bench.limits.ttft_s
    return _draw(
        results, folder, width, of=lambda record: record.ttft_s, name="time to first token", limit=limit
    )


def draw_tpot(results: Results, folder: StudyFolder, width: int) -> Figure:
    """Return the figure of times per output token after the first."""
    limit = results.settings.bench.limits.tpot_s
    return _draw(
        results, folder, width, of=lambda record: record.tpot_s, name="time per output token", limit=limit
    )


def _draw(
    results: Results, folder: StudyFolder, width: int, *, of: Value, name: str, limit: float | None
) -> Figure:
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter

    figure, (axes,) = new_figure(width, 330)
    arms, rates = results.arms, results.some_rates((width - _MARGIN) // _COLUMN)
    room = 0.8 / len(arms)
    for place, rate in enumerate(rates):
        for number, arm in enumerate(arms):
            values = _values(results, folder, arm, rate, of)
            if values:
                at = place + (number - (len(arms) - 1) / 2) * room
                _box(axes, at, room * 0.8, np.percentile(values, _PERCENTS), SERIES[number % len(SERIES)])
    axes.set_yscale("log")
    if limit is not None:
        axes.axhline(limit, color=LIGHT["ink"], linewidth=1.2, linestyle="--")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(_some_minor(axes)))
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_xlim(-0.6, len(rates) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("rate of requests (req/s)")
    axes.set_ylabel(f"{name} (s)")
    handles: list[Any] = [
        Patch(color=SERIES[number % len(SERIES)], label=arm) for number, arm in enumerate(arms)
    ]
    if limit is not None:
        from matplotlib.lines import Line2D

        line = Line2D(
            [], [], color=LIGHT["ink"], linewidth=1.2, linestyle="--", label=f"limit {_seconds(limit)}"
        )
        handles.append(line)
    columns = len(handles) if width > 500 else 2
    figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.5
    )
    return figure


def _values(results: Results, folder: StudyFolder, arm: str, rate: float, of: Value) -> list[float]:
    """Return the latencies of all answered requests of all repeats that count."""
    return [
        value
        for measurement in results.cells(arm, rate)
        for record in folder.records(measurement.cell)
        if not record.error and (value := of(record)) is not None and value > 0.0
    ]


def _box(axes: Axes, at: float, width: float, percentiles: np.ndarray, colour: str) -> None:
    p5, p25, p50, p75, p95 = percentiles
    axes.plot([at, at], [p5, p95], color=colour, linewidth=1.5, solid_capstyle="butt")
    axes.bar(at, p75 - p25, bottom=p25, width=width, color=colour)
    axes.plot(
        [at - width / 2, at + width / 2], [p50, p50], color=LIGHT["ink"], linewidth=2.0, solid_capstyle="butt"
    )


def _some_minor(axes: Axes) -> Callable[[float, int], str]:
    """Label 2 and 5 between powers of ten where few powers are on the axis."""

    def text(value: float, _: int) -> str:
        low, high = axes.get_ylim()
        digit = round(value / 10 ** np.floor(np.log10(value)))
        return _seconds(value) if high / low < 300 and digit in (2, 5) else ""

    return text


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1.0 else f"{value * 1000:g} ms"
