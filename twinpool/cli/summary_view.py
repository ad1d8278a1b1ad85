"""A summary of requests on the terminal, measured or simulated."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from twinpool.lab.metrics.summary import Summary
from twinpool.lab.metrics.table import COLUMNS, latency_rows, outcome_lines


def show_summary(console: Console, summary: Summary) -> None:
    """Print latencies as a table, and the rest as lines below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in latency_rows(summary):
        table.add_row(*row)
    if table.row_count:
        console.print(table)
    for line in outcome_lines(summary):
        console.print(line, soft_wrap=True, markup=False)  # kinds of errors are strangers' words
