"""Colours of a report, light and dark, by what they are for; knows nothing of how a figure is drawn.

A figure is drawn in light colours, and its SVG gets their names instead, so that the page decides.

Source:
    The hues of series are ordered so that neighbours differ for colour-blind readers too; arms also differ in
    their markers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "surface": "#fcfcfb",
        "ink": "#0b0b0b",
        "soft": "#52514e",
        "grid": "#e3e2de",
        "wait": "#a9a7a0",
        "series-0": "#2a78d6",
        "series-1": "#eb6834",
        "series-2": "#1baf7a",
        "series-3": "#4a3aa7",
        "series-4": "#e87ba4",
        "series-5": "#eda100",
        "heat-0": "#f4f3f0",
        "heat-1": "#e1ecf8",
        "heat-2": "#cde2fb",
        "heat-3": "#9ec5f4",
        "heat-4": "#6da7ec",
        "heat-5": "#3987e6",
        "heat-6": "#256abf",
        "heat-7": "#184f95",
        "heat-8": "#0d366b",
        "on-light": "#0b0b0c",
        "on-dark": "#fffffe",
    }
)
DARK: Mapping[str, str] = MappingProxyType(
    {
        "surface": "#1a1a19",
        "ink": "#ffffff",
        "soft": "#c3c2b7",
        "grid": "#383835",
        "wait": "#77756e",
        "series-0": "#3987e5",
        "series-1": "#d95926",
        "series-2": "#199e70",
        "series-3": "#9085e9",
        "series-4": "#d55181",
        "series-5": "#c98500",
        "heat-0": "#262624",
        "heat-1": "#10294a",
        "heat-2": "#123661",
        "heat-3": "#184f95",
        "heat-4": "#256abf",
        "heat-5": "#3987e5",
        "heat-6": "#6da7ec",
        "heat-7": "#9ec5f4",
        "heat-8": "#cde2fb",
        "on-light": "#ffffff",
        "on-dark": "#0b0b0b",
    }
)
SERIES = tuple(LIGHT[f"series-{number}"] for number in range(6))
HEAT = tuple(LIGHT[f"heat-{number}"] for number in range(9))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "queue": LIGHT["wait"],
        "reserve": LIGHT["soft"],
        "prefill": LIGHT["series-0"],
        "transfer": LIGHT["series-1"],
        "decode": LIGHT["series-2"],
    }
)

_NAMES = MappingProxyType({colour: name for name, colour in LIGHT.items()})
_COLOUR = re.compile("|".join(_NAMES), re.IGNORECASE)


def heat_of(share: float) -> tuple[str, str]:
    """Return the colours of a field that shows a share in [0, 1], and of the text on it."""
    step = min(len(HEAT) - 1, max(0, round(share * (len(HEAT) - 1))))
    return HEAT[step], LIGHT["on-dark" if step >= 5 else "on-light"]


def by_name(svg: str) -> str:
    """Replace the colours of an SVG by the names under which a page knows them."""
    return _COLOUR.sub(lambda match: f"var(--{_NAMES[match[0].lower()]})", svg)


def style_sheet() -> str:
    """Return the CSS that gives the names their colours, light or dark as the reader's system is."""
    return f":root{{{_rules(LIGHT)}}}@media (prefers-color-scheme: dark){{:root{{{_rules(DARK)}}}}}"


def _rules(colours: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
