"""What the options of `sweep` and `compare` ask for: a study, and how its server is started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from twinpool.cli import options
from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError
from twinpool.core.units import parse_seconds
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.study.arm import all_ratios
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.workload.workload import open_workload

_WORKERS = 2  # where nothing says how many


def settings_of(args: argparse.Namespace) -> StudySettings:
    """Return the study that the options ask for.

    Raises:
        ConfigError: One of them cannot be read, or they do not fit together.
    """
    ratios = [ratio.strip() for ratio in (args.ratios or "").split(",") if ratio.strip()]
    workers = _size_of(ratios) or _WORKERS if args.workers is None else args.workers
    asked: dict[str, Any] = {
        "workers": workers,
        "ratios": ratios or all_ratios(workers),
        "colocated": args.colocated,
        "rates": [_number("--rates", text) for text in args.rates.split(",")] if args.rates else [],
        "search": _search(args),
        "repeats": args.repeats,
        "cell_s": args.cell,
        "workload": _workload(args.workload),
        "bench": _bench(args),
        "allowed": args.allow,
    }
    return bind(StudySettings, asked, "study")


def serve_options(args: argparse.Namespace, *, workers: int) -> list[str]:
    """Return the options of the `twinpool serve` that is studied.

    Raises:
        ConfigError: There are some, and ``--url`` says that the server runs already.
    """
    given = options.settings(args)
    if args.url is not None:
        if given or args.config:
            raise ConfigError("--url", "names a running server; its model and engine cannot be set here")
        return []
    told = ["--colocated", str(workers)]
    if args.config is not None:
        told += ["--config", args.config]
    for name, value in given.items():
        told += ["--set", f"{name}={json.dumps(value)}"]
    return told


def _size_of(ratios: Sequence[str]) -> int:
    """Return how many workers the first ratio has; 0 if it is none."""
    numbers = ratios[0].split(":") if ratios else []
    return sum(int(number) for number in numbers) if all(map(str.isdecimal, numbers)) else 0


def _search(args: argparse.Namespace) -> dict[str, float] | None:
    if args.search is None:
        return None
    least, _, most = args.search.partition(":")
    asked = {"least": _number("--search", least), "most": _number("--search", most)}
    return asked | {"share": args.share}


def _workload(line: str) -> dict[str, Any]:
    """Read the workload; how many requests a cell has is the study's own business."""
    try:
        workload = open_workload(line)
    except ConfigError as error:
        if error.field != "workload.count":
            raise
        kind, _, rest = line.partition(":")
        workload = open_workload(f"{kind}:{rest and rest + ','}count=1000000")
    told = {name: value for name, value in workload.to_json().items() if value is not None}
    if told.get("count") == 1_000_000:
        del told["count"]
    return told


def _bench(args: argparse.Namespace) -> dict[str, Any]:
    limits = Limits(
        ttft_s=parse_seconds(args.ttft, field="--ttft"), tpot_s=parse_seconds(args.tpot, field="--tpot")
    )
    return {
        "limits": unbind(limits),
        "timeout_s": args.timeout,
        "late_limit_s": parse_seconds(args.late_limit, field="--late-limit"),
    }


def _number(field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(field, f"{text!r} is not a number") from None
