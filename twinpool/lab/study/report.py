"""Makes everything of a study that can be made again from its measurements: page, pictures, one JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinpool.core.config import unbind
from twinpool.lab.study.cell import FORMAT
from twinpool.lab.study.findings.all import conclude
from twinpool.lab.study.findings.words import Conclusion
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.page import page
from twinpool.lab.study.pictures import draw_pictures
from twinpool.lab.study.results import Results, read_results
from twinpool.lab.study.tables import pools_table, requests_table


def write_report(folder: StudyFolder) -> Path:
    """Write ``report.html``, ``study.json`` and a PNG of each figure; return the path of the page.

    Raises:
        ConfigError: The study cannot be read, its arms differ in more than roles, or matplotlib is not here.
    """
    results = read_results(folder)
    conclusions = conclude(results)
    pictures = draw_pictures(results, folder)
    for picture in pictures:
        folder.write(f"figures/{picture.name}.png", picture.png)
    folder.write("study.json", json.dumps(to_json(results, conclusions), indent=1) + "\n")
    return folder.write("report.html", page(results, conclusions, pictures))


def to_json(results: Results, conclusions: tuple[Conclusion, ...]) -> dict[str, Any]:
    """Return a whole study but for its requests: settings, cells, tables, conclusions."""
    first = results.valid[0]
    return {
        "format": FORMAT,
        "settings": unbind(results.settings),
        "config": first.config,
        "conclusions": [asdict(each) for each in conclusions],
        "tables": [asdict(table) for table in (requests_table(results), pools_table(results))],
        "cells": [
            {name: value for name, value in unbind(measurement).items() if name not in ("config", "format")}
            for measurement in results.measurements
        ],
    }
