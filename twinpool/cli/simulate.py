"""`twinpool simulate`: lets a workload come to workers that are not there, and shows how it would go."""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from time import process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from twinpool.cli.run_folder import run_folder
from twinpool.cli.simulate_args import Asked, asked
from twinpool.cli.summary_view import show_summary
from twinpool.core.config import unbind
from twinpool.lab.profile.profile import load_links, load_profile, profile_names
from twinpool.lab.simulate.result import SimulationResult
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.workload.readable import Readable

_COLUMNS = ("worker", "busy", "steps", "prefilled", "decoded", "found", "preempted", "KV in", "KV out")


def simulate(args: argparse.Namespace) -> int:
    """Run it, or list what can be named; return 0 if all of the workload came and some was answered."""
    if args.profiles:
        _list_profiles()
        return 0
    wanted = asked(args)
    began_s, items = process_time(), Readable(wanted.workload)
    with run_folder(args.out) as folder:
        result = run_simulation(items, wanted.config, limits=wanted.limits, on_record=folder.add)
        cpu_s = process_time() - began_s
        told = _told(wanted, result, items.problem)
        try:
            folder.finish(told)
        finally:  # also what could not be written is shown
            if args.json:
                print(json.dumps(told, indent=2, allow_nan=False))
            else:
                _show(wanted, result, items.problem, cpu_s=cpu_s)
    return 0 if result.summary.num_answered and not items.problem else 1


def _told(wanted: Asked, result: SimulationResult, problem: str) -> dict[str, Any]:
    """Return everything but the requests: equal runs give equal texts, so no time of day is in it."""
    found = result.to_json()
    workers = found.pop("workers")
    profiles = sorted({pool.profile for pool in wanted.config.pools})
    return {
        "tool": "twinpool simulate",
        "version": version("twinpool"),
        "problem": problem,
        "config": unbind(wanted.config),
        "profiles": {name: load_profile(name).source for name in profiles},
        "workload": wanted.workload.to_json(),
        "simulated_s": result.simulated_s,
        "workers": workers,
        "summary": found,
    }


def _show(wanted: Asked, result: SimulationResult, problem: str, *, cpu_s: float) -> None:
    console = Console(highlight=False)
    pools = ", ".join(f"{pool.workers} {pool.role} on {pool.profile}" for pool in wanted.config.pools)
    console.print(f"{wanted.workload.kind} to {pools}: simulated", soft_wrap=True)
    show_summary(console, result.summary)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for use in result.workers:
        busy = use.busy_s / result.simulated_s if result.simulated_s else 0.0
        table.add_row(
            use.worker,
            f"{busy:.1%}",
            _short(use.steps).strip(),
            _short(use.prefilled_tokens),
            _short(use.decoded_tokens),
            _short(use.prefix_hit_tokens),
            f"{use.preemptions:,}",
            f"{_short(use.kv_bytes_in)}B",
            f"{_short(use.kv_bytes_out)}B",
        )
    console.print(table)
    rate = result.summary.num_requests / cpu_s if cpu_s > 0.0 else 0.0
    console.print(
        f"{result.simulated_s:,.0f} s simulated in {cpu_s:.1f} CPU s, {rate:,.0f} requests a second"
    )
    if problem:
        console.print(f"not all of the workload: {problem}", soft_wrap=True, markup=False)


def _short(number: int) -> str:
    """Return ``2.95 M`` for 2,948,695; three digits tell enough beside the exact ones in JSON."""
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number} "


def _list_profiles() -> None:
    console = Console(highlight=False)
    for name in profile_names():
        profile = load_profile(name)
        console.print(f"{name}: {profile.hardware}, {profile.engine}; {profile.source}", soft_wrap=True)
    for name, link in load_links().items():
        console.print(f"link {name}: {link.text()}", soft_wrap=True)
