"""How every figure begins and ends: its size in pixels, its type, its axes, and its SVG and PNG.

The only place that loads matplotlib, when it is first used.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import ConfigError
from twinpool.lab.study.figures.palette import LIGHT, by_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = 760, 350  # pixels of a figure on a desktop and on a phone
_DPI = 72  # a point is a pixel then
_PNG_SCALE = 2
_TYPE = 11.0
_SETTINGS: Any = {
    "font.family": "DejaVu Sans",  # wider than what a page shows, so nothing that fits here overlaps there
    "font.size": _TYPE,
    "svg.fonttype": "none",
    "svg.hashsalt": "twinpool",
    "axes.edgecolor": LIGHT["soft"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.titlecolor": LIGHT["ink"],
    "axes.facecolor": LIGHT["surface"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": _TYPE,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "text.color": LIGHT["ink"],
    "figure.facecolor": LIGHT["surface"],
    "savefig.facecolor": LIGHT["surface"],
    "legend.frameon": False,
    "lines.linewidth": 2.0,
}


def check_installed() -> None:
    """Check that figures can be drawn.

    Raises:
        ConfigError: matplotlib is not here.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "matplotlib", "is not installed; figures need it: pip install 'twinpool[lab]'"
        ) from None


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of a report inside the block."""
    check_installed()
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(
    width: int, height: int, *, rows: int = 1, share_y: bool = False
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of so many pixels with axes one below the other, which share their x axis.

    Args:
        width: Of the figure.
        height: Of the figure.
        rows: How many axes.
        share_y: Whether they share their y axis too.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, sharey=share_y, squeeze=False)
    return figure, [row[0] for row in axes]


def legend(figure: Figure, axes: Axes, *, width: int) -> None:
    """Put what is drawn in ``axes`` above the figure, in as many columns as there is room for."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), int(width / (40 + longest * _TYPE * 0.68))))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, borderaxespad=0.2, columnspacing=1.5
    )


def to_svg(figure: Figure, *, about: str, class_name: str) -> str:
    """Return a figure as an element of a page: no size of its own, colours by name, and words for those who
    do not see it.

    Args:
        figure: Drawn inside ``drawing``.
        about: What it shows.
        class_name: For the page's style.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, body = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None, "matplotlib gives every SVG a view box"
    start = f'<svg class="{class_name}" {box[0]} role="img" xmlns="http://www.w3.org/2000/svg" '
    start += f'xmlns:xlink="http://www.w3.org/1999/xlink"><title>{_escaped(about)}</title>'
    return start + by_name(_with_own_ids(body, class_name + about))


def to_png(figure: Figure) -> bytes:
    """Return a figure as a picture, twice as fine as on the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI * _PNG_SCALE, metadata={"Software": None})
    return file.getvalue()


def _with_own_ids(body: str, name: str) -> str:
    """Give ids that no other figure on the page has."""
    import hashlib

    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    body = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", body)
    return re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', body)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
