"""`twinpool bench`: sends a workload to a server and shows how it was answered."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from twinpool.cli.bench_args import Asked, asked
from twinpool.cli.client import api_key_of
from twinpool.cli.exit_codes import INTERRUPTED
from twinpool.cli.run_folder import run_folder
from twinpool.cli.summary_view import show_summary
from twinpool.core.errors import ConfigError
from twinpool.core.open_files import allow_many_files
from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.bench.result import BenchResult
from twinpool.lab.bench.run import run_bench
from twinpool.lab.bench.strangers import printable
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.record import Record
from twinpool.lab.workload.traces.own import write_own

_REFRESH_S = 1.0


def bench(args: argparse.Namespace) -> int:
    """Run it; return 0 if the run can be believed, 130 if it was interrupted."""
    wanted = asked(args)
    if args.write_workload is not None:
        _write_workload(Path(args.write_workload), wanted)
        return 0
    with run_folder(args.out) as folder:
        result = _measured(args, wanted, folder.add)
        try:
            folder.finish(result.to_json())
        finally:  # also what could not be written is shown
            _show(result, as_json=args.json)
    if result.is_interrupted:
        return INTERRUPTED
    return 0 if result.is_valid else 1


def _write_workload(path: Path, wanted: Asked) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            write_own(wanted.workload, file)
    except OSError as error:
        raise ConfigError("--write-workload", f"{path} cannot be written: {error.strerror}") from None


def _measured(args: argparse.Namespace, wanted: Asked, on_record: Callable[[Record], None]) -> BenchResult:
    """Run it with progress on the terminal."""
    allow_many_files()
    gc.freeze()  # what is there now stays: looking through it again would delay what is measured
    with _progress(wanted) as on_start:
        return run_bench(
            wanted.workload,
            wanted.config,
            api_key=api_key_of(args),
            on_record=on_record,
            on_start=on_start,
        )


@contextmanager
def _progress(wanted: Asked) -> Iterator[Callable[[LoadGenerator, Summary], None]]:
    """Show how far it is, on a terminal; let Ctrl-C end it cleanly."""
    console = Console(stderr=True)
    live = Live(console=console, auto_refresh=False, transient=True)

    def start(generator: LoadGenerator, summary: Summary) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, generator.stop)

        def refresh() -> None:
            line = _line(generator, summary, wanted.workload.shape.count)
            live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            loop.call_later(_REFRESH_S, refresh)

        if console.is_terminal:
            live.start()
            refresh()

    try:
        yield start
    finally:
        live.stop()


def _line(generator: LoadGenerator, summary: Summary, count: int | None) -> str:
    sent = f"{generator.num_sent:,}" + (f" of {count:,}" if count is not None else "")
    p50_s, p99_s = summary.ttft_s.percentiles((50, 99))
    ttft = "" if p50_s is None or p99_s is None else f"  p50/p99 {p50_s * 1e3:,.0f}/{p99_s * 1e3:,.0f} ms"
    return (
        f"{generator.elapsed_s:6.0f} s  sent {sent}  in flight {generator.num_in_flight:,}"
        f"  answered {summary.num_answered:,}  errors {summary.errors.total():,}{ttft}"
    )


def _show(result: BenchResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    console = Console(highlight=False, markup=False)  # a stranger's words are in it
    rate = "" if result.offered_per_s is None else f" at {result.offered_per_s:.2f} requests/s"
    console.print(
        f"{result.workload['kind']}{rate} to {printable(result.model)} at {result.config.url}", soft_wrap=True
    )
    show_summary(console, result.summary)
    console.print(
        f"load generator: {result.cpu_share:.1%} of a core, at most {result.most_in_flight:,} in flight"
    )
    if result.first_problem:
        console.print(f"first error: {result.first_problem}", soft_wrap=True)
    for remark in result.remarks:
        console.print(remark, soft_wrap=True)
    for problem in result.problems:
        console.print(Text.assemble(("not valid:", "bold"), f" {problem}"), soft_wrap=True)
