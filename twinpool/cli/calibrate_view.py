"""A calibration on the terminal: what was measured, and what the profile says of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from twinpool.lab.calibrate.calibration import UNSTEADY, Calibration
from twinpool.lab.calibrate.fit import ServingCosts


def show_calibration(console: Console, found: Calibration) -> None:
    """Print steps, transfers and what serving adds, each beside what the profile says of it."""
    _show_steps(console, found)
    _show_transfers(console, found)
    if found.served is not None:
        _show_serving(console, found.costs)


def _show_steps(console: Console, found: Calibration) -> None:
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
    if found.unsteady_share > 0.0:
        console.print(
            f"{found.unsteady_share:.0%} of the steps varied by more than {UNSTEADY:.0%}: something else ran "
            "on this machine, and all below may be off by as much",
            soft_wrap=True,
        )


def _show_transfers(console: Console, found: Calibration) -> None:
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


def _show_serving(console: Console, costs: ServingCosts) -> None:
    step_ms, hop_ms = costs.step_s * 1e3, costs.hop_s * 1e3
    console.print(f"serving adds {step_ms:.2f} ms to a step, and {hop_ms:.2f} ms each way")
    slowdown = costs.slowdown
    if slowdown is not None:
        rows = [
            (str(number), *(f"{times:.2f} times" for times in pair))
            for number, pair in enumerate(zip(slowdown.prompts, slowdown.decodes, strict=True), 1)
        ]
        _table(console, ("workers that compute", "a prompt takes", "a decode"), rows)


def _table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
