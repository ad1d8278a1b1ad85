"""`twinpool calibrate`: measures this machine, shows how well a profile fits it, and writes that profile."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from twinpool.cli.calibrate_args import config_of, serve_options
from twinpool.cli.calibrate_view import show_calibration
from twinpool.cluster.server_process import server_process
from twinpool.core.config import to_yaml
from twinpool.core.errors import ConfigError
from twinpool.lab.calibrate.calibration import calibrate_engine
from twinpool.lab.calibrate.serving import measure_serving
from twinpool.lab.calibrate.steps import Progress


def calibrate(args: argparse.Namespace) -> int:
    """Measure and write; return 0."""
    config = config_of(args)
    check_writable(args.out)
    began_s = time.monotonic()
    console = Console(stderr=True)
    with _progress_bar(console) as progress:
        found = calibrate_engine(config, progress=progress)
        if config.workers:
            progress("serving: starting a server", 0, config.repeats)
            with server_process(serve_options(config), say=lambda _: None) as url:
                found = replace(found, served=measure_serving(config, url, progress=progress))
    show_calibration(Console(highlight=False), found)
    profile = found.profile(command=shlex.join(["twinpool", *sys.argv[1:]]))
    try:
        Path(args.out).write_text(to_yaml(profile), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", f"{args.out} cannot be written: {error.strerror}") from error
    console.print(f"{args.out}: written after {time.monotonic() - began_s:.0f} s", markup=False)
    return 0


def check_writable(path: str) -> None:
    """Try the file before minutes are spent on what shall be in it; a file that is there stays as it is."""
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError("--out", f"{path} does not end with .yaml")
    is_new = not Path(path).exists()
    try:
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError("--out", f"{path} cannot be written: {error.strerror}") from error
    if is_new:
        Path(path).unlink()


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
