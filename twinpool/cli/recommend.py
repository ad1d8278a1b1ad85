"""`twinpool recommend`: shows which layout of some GPUs answers most in time, and how sure that is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version

from rich import box
from rich.console import Console
from rich.table import Table

from twinpool.cli.recommend_args import asked
from twinpool.lab.recommend.ranking import Entry
from twinpool.lab.recommend.recommend import recommend_layout
from twinpool.lab.recommend.recommendation import Recommendation
from twinpool.lab.recommend.trials import Trial
from twinpool.lab.recommend.verdict import Reason
from twinpool.lab.recommend.words import answer_lines, question_text, spread_text


def recommend(args: argparse.Namespace) -> int:
    """Look for a layout and say what was found; return 0 if one serves."""
    wanted = asked(args)
    with _progress() as on_trial:
        found = recommend_layout(wanted.workload, wanted.config, model=wanted.model, on_trial=on_trial)
    if args.json:
        told = {
            "tool": "twinpool recommend",
            "version": version("twinpool"),
            "workload": wanted.workload.to_json(),
            **found.to_json(),
        }
        print(json.dumps(told, indent=2, allow_nan=False))
    else:
        _show(found)
    return 1 if found.verdict.reason is Reason.NOTHING_SERVES else 0


@contextmanager
def _progress() -> Iterator[Callable[[Trial], None]]:
    """Show on a terminal what is simulated, in a line that goes away."""
    console = Console(stderr=True, highlight=False)
    with console.status("simulating", refresh_per_second=4) as status:

        def show(trial: Trial) -> None:
            rate = "all at once" if trial.rate == float("inf") else f"at {trial.rate:.3g} requests/s"
            what_if = f", with {trial.what_if}" if trial.what_if else ""
            status.update(f"simulation {trial.number}: {trial.layout} {rate}{what_if}")

        yield show


def _show(found: Recommendation) -> None:
    console = Console(highlight=False)
    console.print(f"{question_text(found.config)}:", markup=False, soft_wrap=True)
    console.print(_table(found))
    for number, line in enumerate(answer_lines(found)):
        console.print(line, style="bold" if number == 0 else None, soft_wrap=True, markup=False)
    for doubt in found.doubts:
        console.print(f"doubt: {doubt}", soft_wrap=True, markup=False)
    for profile, source in found.sources.items():
        console.print(f"times of {profile}: {source}", style="dim", soft_wrap=True, markup=False)
    for link in dict.fromkeys(found.links.values()):
        text = f"link {found.config.transfer.link}: {link.text()}"
        console.print(text, style="dim", soft_wrap=True, markup=False)
    console.print(f"{found.num_simulations} simulations", style="dim")


def _table(found: Recommendation) -> Table:
    ranking, misfits = found.ranking, found.misfits
    entries = (*ranking.finalists, *ranking.others)
    has_cost = any(entry.layout.cost for entry in entries)
    has_watts = any(entry.layout.watts for entry in entries)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layout", no_wrap=True)
    for name in ("GPUs", *(("cost",) * has_cost), *(("W",) * has_watts), "requests/s", "to the best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for entry in entries:
        table.add_row(*_cells(found, entry, has_cost=has_cost, has_watts=has_watts))
    for misfit in misfits:
        blank = [""] * (has_cost + has_watts)
        table.add_row(misfit.layout.name, str(misfit.layout.gpus), *blank, "", "", misfit.why)
    return table


def _cells(found: Recommendation, entry: Entry, *, has_cost: bool, has_watts: bool) -> list[str]:
    layout, best = entry.layout, found.ranking.best
    prices = [f"{layout.cost:.4g}"] * has_cost + [f"{layout.watts:.0f}"] * has_watts
    behind = "" if entry is best or not best.mean else f"{entry.mean / best.mean - 1.0:+.0%}"
    is_chosen = layout == found.layout and found.verdict.reason is not Reason.NOTHING_SERVES
    return [
        layout.name,
        str(layout.gpus),
        *prices,
        spread_text(entry),
        behind,
        "recommended" if is_chosen else "",
    ]
