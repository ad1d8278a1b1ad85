"""`twinpool kv-bench`: measures transfers of KV between two processes, or is the other side of that."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from twinpool.checkpoints.resolve import resolve_model
from twinpool.cli.kv_bench_args import address_of, check_listening, probe_of, wanted_of
from twinpool.cli.run import say, worker_security
from twinpool.core.errors import ConfigError
from twinpool.core.security import Trust, load_trust
from twinpool.core.tls import Party
from twinpool.lab.kv_bench.driving import Progress, measure
from twinpool.lab.kv_bench.listening import listen
from twinpool.lab.kv_bench.local import decode_peer
from twinpool.lab.kv_bench.probe import Probe
from twinpool.lab.kv_bench.report import COLUMNS, Report, cells, why_not
from twinpool.lab.kv_bench.source import Source, made_up, of_model
from twinpool.lab.kv_bench.talk import connect

_WAIT_S = 600.0


def kv_bench(args: argparse.Namespace) -> int:
    """Measure, or listen for who measures; return 0 if something was measured and nothing failed."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="twinpool: %(message)s")
    given = vars(args)
    trust = load_trust(worker_security(args), party=Party.WORKER)
    if "listen" in given:
        _listen(given, trust)
        return 0
    if "wait" in given:
        raise ConfigError("--wait", "goes with --listen")
    probe = probe_of(given)
    wanted_of(given, wire_bytes=probe.wire_bytes)  # a mistake is told before a model is loaded
    report = asyncio.run(_measure(given, probe, trust))
    where = given.get("json")
    if where == "-":
        print(json.dumps(report.to_json(), indent=2))
    else:
        if where is not None:
            _write(Path(where), report)
        _show(report)
    are_good = [row.is_measured for row in report.rows if not row.skipped]
    return 0 if are_good and all(are_good) else 1


def _listen(given: Mapping[str, Any], trust: Trust) -> None:
    check_listening(given)
    host, port = address_of("--listen", given["listen"], default_port=0)

    def announce(address: str) -> None:
        print(f"listening on {address}", flush=True)

    asyncio.run(listen(host, port, trust=trust, wait_s=given.get("wait", _WAIT_S), announce=announce))


async def _measure(given: Mapping[str, Any], probe: Probe, trust: Trust) -> Report:
    source = await _source(given, probe)
    wanted = wanted_of(given, wire_bytes=source.probe.wire_bytes)
    async with _other_side(given) as (host, port):
        talk = await connect(host, port, trust)
        try:
            with _progress_bar() as progress:
                rows = await measure(talk, source, wanted, trust=trust, progress=progress)
            await talk.call("end")
        finally:
            await talk.close()
    return Report(probe=source.probe, wanted=wanted, rows=rows)


async def _source(given: Mapping[str, Any], probe: Probe) -> Source:
    if "model" not in given:
        probe.check_memory()
        return await asyncio.to_thread(made_up, probe)
    return await of_model(resolve_model(given["model"], progress=say), probe)


@asynccontextmanager
async def _other_side(given: Mapping[str, Any]) -> AsyncIterator[tuple[str, int]]:
    if "connect" in given:
        yield address_of("--connect", given["connect"])
        return
    async with decode_peer() as address:
        yield address


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Show a bar on a terminal; it moves only when told to, so it takes no time from what is measured."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    is_quiet = not console.is_terminal
    with ProgressBar(*columns, console=console, auto_refresh=False, transient=True, disable=is_quiet) as bar:
        task = bar.add_task("", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, refresh=True)

        yield progress


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--json", f"{path} cannot be written: {error.strerror}") from None


def _show(report: Report) -> None:
    console = Console(highlight=False)
    console.print(report.title(), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in report.rows:
        if row.is_measured:
            table.add_row(*cells(row))
    if table.row_count:
        console.print(table)
    for row in report.rows:
        if not row.is_measured:
            console.print(f"{row.transport} {why_not(row)}", soft_wrap=True, markup=False)
