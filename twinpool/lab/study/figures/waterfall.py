"""One request as it went through each arm: how long it waited, was computed, moved and answered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from twinpool.lab.study.figures.canvas import new_figure
from twinpool.lab.study.figures.palette import LIGHT, PHASES
from twinpool.lab.study.stories import Story, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOUT = "The same request in each arm: when it waited, was computed, its KV moved, and it was answered."


def draw(stories: Mapping[str, Story], width: int) -> Figure:
    """Return the figure.

    Args:
        stories: Of the same request, by arm.
        width: Of the figure.
    """
    rows: list[tuple[str, str, float, float]] = []  # arm or phase, and where it lies
    for arm, story in stories.items():
        rows.append((arm, "", 0.0, 0.0))
        for phase in phases(story):
            start_s = phase.start_s - story["sent_s"]
            rows.append((phase.name, phase.name, start_s, phase.end_s - story["sent_s"]))
    figure, (axes,) = new_figure(width, 60 + 19 * len(rows))
    last_s = max(end_s for *_, end_s in rows)
    for place, (_, phase_name, start_s, end_s) in enumerate(rows):
        if not phase_name:
            if place:
                axes.axhline(place - 0.55, color=LIGHT["grid"], linewidth=0.8)
            continue
        shown_s = max(end_s - start_s, last_s * 0.003)  # what is short is seen too
        axes.barh(place, shown_s, left=start_s, height=0.66, color=PHASES.get(phase_name, LIGHT["wait"]))
        axes.text(
            start_s + shown_s + last_s * 0.01,
            place,
            _duration(end_s - start_s),
            va="center",
            color=LIGHT["soft"],
            fontsize=9.5,
        )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, last_s * (1.12 if width > 500 else 1.3))
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    for label, (_, phase_name, *_) in zip(axes.get_yticklabels(), rows, strict=True):
        if not phase_name:
            label.set_fontweight("bold")
            label.set_color(LIGHT["ink"])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("time since the request was sent (s)")
    return figure


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1000:.3g} ms"
