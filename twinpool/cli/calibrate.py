"""`twinpool calibrate`: measures this machine, shows how well a profile fits it, and writes that profile."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from twinpool.cli import options
from twinpool.cluster.server_process import server_process
from twinpool.core.config import bind, load_yaml, merge, to_yaml, unbind
from twinpool.core.errors import ConfigError
from twinpool.lab.calibrate.calibration import Calibration, calibrate_engine
from twinpool.lab.calibrate.config import CalibrateConfig
from twinpool.lab.calibrate.fit import slowdowns
from twinpool.lab.calibrate.serving import measure_serving
from twinpool.lab.calibrate.steps import Progress

_POINTS = ("prompts", "cached", "prompt_batches", "decode_batches", "contexts", "transfer_tokens")
_DEPLOYMENT = ("model", "device", "dtype", "kv_memory", "threads", "engine")  # settings of `serve` too


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write; return 0."""
    config = config_of(args)
    _check_writable(args.out)
    began_s = time.monotonic()
    console = Console(stderr=True)
    with _progress_bar(console) as progress:
        found = calibrate_engine(config, progress=progress)
        if config.workers:
            progress("serving: starting a server", 0, config.repeats)
            with server_process(serve_options(config), say=lambda _: None) as url:
                found = replace(found, served=measure_serving(config, url, progress=progress))
    profile = found.profile(command=shlex.join(["twinpool", *sys.argv[1:]]))
    Path(args.out).write_text(to_yaml(profile), encoding="utf-8")
    _show(Console(highlight=False), found)
    console.print(f"{args.out}: written after {time.monotonic() - began_s:.0f} s", markup=False)
    return 0


def config_of(args: argparse.Namespace) -> CalibrateConfig:
    """Return what the options ask for.

    Raises:
        ConfigError: One of them cannot be; it is named as the setting that it sets.
    """
    points = {name: _numbers(name, getattr(args, name)) for name in _POINTS}
    asked = {name: value for name, value in points.items() if value is not None}
    if args.transports:
        asked["transports"] = args.transports.split(",")
    counts = {"repeats": args.repeats, "workers": args.workers}
    asked |= {name: value for name, value in counts.items() if value is not None}
    file = {} if args.config is None else load_yaml(Path(args.config))
    return bind(CalibrateConfig, merge(merge(file, options.settings(args)), asked), "calibrate")


def serve_options(config: CalibrateConfig) -> list[str]:
    """Return the options of a `twinpool serve` with such workers, all of them colocated."""
    given = {**unbind(config), "threads": config.num_threads}
    told = ["--colocated", str(config.workers)]
    for name in _DEPLOYMENT:
        if given[name] is not None:
            told += ["--set", f"{name}={json.dumps(given[name])}"]
    return told


def _numbers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(f"calibrate.{name}", f"{text!r} is no list of numbers such as 8,32,128")
    return [int(part) for part in parts]


def _check_writable(path: str) -> None:
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError("--out", f"{path} does not end with .yaml")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError("--out", f"{Path(path).parent} is no folder")


@contextmanager
def _progress_bar(console: Console) -> Iterator[Progress]:
    """Show what is measured; nothing is drawn while it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    is_quiet = not console.is_terminal
    with ProgressBar(*columns, console=console, auto_refresh=False, transient=True, disable=is_quiet) as bar:
        task = bar.add_task("", total=None)
        kinds: set[str] = set()

        def progress(what: str, done: int, total: int) -> None:
            kind = what.partition(":")[0]
            if is_quiet and kind not in kinds:  # a log gets a line for each kind
                console.print(f"measuring {kind} ...", markup=False)
            kinds.add(kind)
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        yield progress


def _show(console: Console, found: Calibration) -> None:
    steps = [
        (
            f"{timing.point.name}{' (check)' if timing.point.is_check else ''}",
            f"{timing.median_s * 1e3:.2f}",
            f"{timing.spread:.0%}",
            f"{(1.0 + error) * timing.median_s * 1e3:.2f}",
            f"{error:+.1%}",
        )
        for timing, error in found.step_errors()
    ]
    _table(console, ("step", "ms", "spread", "fit", "error"), steps)
    links = found.links
    transfers = []
    for timing in found.transfers:
        if timing.problem or timing.transport not in links:
            continue
        link = links[timing.transport]
        fit_s = link.latency_s + timing.num_bytes / link.bytes_s
        transfers.append(
            (
                f"{timing.transport}, {timing.num_bytes:,} bytes",
                f"{timing.seconds * 1e3:.2f}",
                f"{fit_s * 1e3:.2f}",
                f"{fit_s / timing.seconds - 1.0:+.1%}",
            )
        )
    _table(console, ("transfer", "ms", "fit", "error"), transfers)
    for name, problem in {timing.transport: timing.problem for timing in found.transfers}.items():
        if problem:
            console.print(f"{name} {problem}", soft_wrap=True, markup=False)
    if found.served is not None:
        costs = found.costs
        console.print(
            f"serving adds {costs.step_s * 1e3:.2f} ms to a step, and {costs.hop_s * 1e3:.2f} ms each way"
        )
        rows = [
            (str(number), f"{prompt:.2f}", f"{decode:.2f}", f"{used:.2f}")
            for number, ((prompt, decode), used) in enumerate(
                zip(slowdowns(found.served, hop_s=costs.hop_s), costs.slowdown, strict=False), 1
            )
        ]
        _table(console, ("workers that compute", "a prompt takes", "a decode", "in the profile"), rows)


def _table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
