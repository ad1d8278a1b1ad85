"""`twinpool sweep`, `twinpool compare` and `twinpool report`: pool ratios beside each other."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from twinpool.cli.client import api_key_of
from twinpool.cli.exit_codes import INTERRUPTED
from twinpool.cli.study_args import serve_options, settings_of
from twinpool.cli.study_watch import TerminalWatch
from twinpool.cluster.server_process import server_process
from twinpool.lab.study.driver import StudyStopped
from twinpool.lab.study.figures.canvas import check_installed
from twinpool.lab.study.findings.all import conclude
from twinpool.lab.study.folder import StudyFolder
from twinpool.lab.study.laboratory import Laboratory
from twinpool.lab.study.report import write_report
from twinpool.lab.study.results import read_results
from twinpool.lab.study.run import run_study
from twinpool.lab.study.settings import StudySettings
from twinpool.lab.study.tables import requests_table

# A terminal has no room for these columns of the table of requests.
_HIDDEN = ("repeats", "least to most", "per worker, req/s", "errors")


def study(args: argparse.Namespace) -> int:
    """Measure what is not measured yet, and report; 130 if it was stopped, and what was measured is kept."""
    settings, folder = settings_of(args), StudyFolder(Path(args.out))
    options = serve_options(args, workers=settings.workers)
    if not args.no_report:
        check_installed()
    with folder.held():  # a mistake is told before a server is started
        folder.begin(settings)
    console = Console(stderr=True)
    is_stopped = False
    try:
        with _server(args, options, console) as url:
            _measure(settings, folder.path, args, url, console)
    except (StudyStopped, KeyboardInterrupt):
        is_stopped = True
        there = len(folder.measurements())
        _say(console, f"stopped; the same command goes on from the {there} cells in {folder.path}")
        if not there:
            return INTERRUPTED
    if not args.no_report:
        _report(folder)
    return INTERRUPTED if is_stopped else 0


def report(args: argparse.Namespace) -> int:
    """Make the report of a study anew."""
    _report(StudyFolder(Path(args.folder)))
    return 0


@contextmanager
def _server(args: argparse.Namespace, options: Sequence[str], console: Console) -> Iterator[str]:
    """Give the URL of the server that is named, or of one that lives as long as the block."""
    if args.url is not None:
        yield args.url
        return
    with server_process(options, say=lambda text: _say(console, text)) as url:
        yield url


def _measure(
    settings: StudySettings, path: Path, args: argparse.Namespace, url: str, console: Console
) -> None:
    def stop_on_signals(laboratory: Laboratory) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, laboratory.stop)

    gc.freeze()  # what is there now stays: looking through it again would delay what is measured
    with TerminalWatch(console) as watch:
        run_study(settings, path, url=url, api_key=api_key_of(args), watch=watch, on_start=stop_on_signals)


def _report(folder: StudyFolder) -> None:
    path = write_report(folder)
    results = read_results(folder)
    console = Console(highlight=False)
    told = requests_table(results)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown = [name for name in told.columns if name not in _HIDDEN]
    for name in shown[:-1]:
        is_arm = name == "arm"
        table.add_column(name, justify="left" if is_arm else "right", no_wrap=is_arm)
    words = " ".join((told.columns[-1], *(row[-1] for row in told.rows))).split()
    table.add_column(told.columns[-1], width=max(map(len, words)))  # wraps, and no word of it is cut
    for row in told.rows:
        texts = dict(zip(told.columns, row, strict=True))
        table.add_row(*(texts[name] for name in shown))
    console.print(table)
    for conclusion in conclude(results):
        console.print(f"- {conclusion.text}", soft_wrap=True, markup=False)
        console.print(f"  {conclusion.evidence}", soft_wrap=True, markup=False, style="dim")
    console.print(f"\n{path}", soft_wrap=True, markup=False)


def _say(console: Console, text: str) -> None:
    console.print(f"twinpool: {text}", style="dim", markup=False, soft_wrap=True)
