"""Shows on the terminal how a study goes on: a line for each cell that ended, and one that moves below."""

from __future__ import annotations

import asyncio

from rich.console import Console
from rich.live import Live
from rich.text import Text

from twinpool.lab.bench.generator import LoadGenerator
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.study.cell import Cell, Measurement

_REFRESH_S = 1.0


class TerminalWatch:
    """Use it as a context around what is measured in one event loop.

    Args:
        console: Where it is shown; what moves is shown on a terminal only.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._place = ""
        self._cell: Cell | None = None
        self._load: tuple[LoadGenerator, Summary] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> TerminalWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._live.stop()

    def began(self, cell: Cell, *, done: int, total: int | None) -> None:
        self._place = f"[{done + 1}/{total}]" if total is not None else f"[{done + 1}]"
        self._cell, self._load = cell, None
        if self._console.is_terminal and self._timer is None:
            self._live.start()
            self._refresh()

    def load(self, generator: LoadGenerator, summary: Summary) -> None:
        self._load = (generator, summary)

    def ended(self, measurement: Measurement) -> None:
        cell = measurement.cell
        texts = [
            f"{measurement.good_share:4.0%} within the limits",
            f"TTFT p50 {_ms(measurement.latency_s('ttft_s', 'p50'))}",
            f"TPOT p50 {_ms(measurement.latency_s('tpot_s', 'p50'))}",
            *(
                f"{role} busy {use.busy_share:.0%}"
                for role, use in measurement.pools.items()
                if use.busy_share is not None
            ),
            *(f"DOES NOT COUNT: {problem}" for problem in measurement.problems),
        ]
        line = f"{self._place} {_name(cell)}: {', '.join(texts)}"
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _refresh(self) -> None:
        self._live.update(Text(self._line()), refresh=True)
        self._timer = asyncio.get_running_loop().call_later(_REFRESH_S, self._refresh)

    def _line(self) -> str:
        assert self._cell is not None, "nothing is shown before a cell began"
        if self._load is None:
            return f"{self._place} {_name(self._cell)}: changing roles"
        generator, summary = self._load
        share = summary.goodput_share
        good = "" if share is None else f", {share:.0%} within the limits"
        return (
            f"{self._place} {_name(self._cell)}: {generator.elapsed_s:.0f} s, {generator.num_sent} sent, "
            f"{generator.num_in_flight} in flight, {summary.num_answered} answered{good}"
        )


def _name(cell: Cell) -> str:
    return f"{cell.arm} at {cell.rate:g} req/s, repeat {cell.repeat + 1}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:,.0f} ms"
