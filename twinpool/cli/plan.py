"""`twinpool plan`: the memory of each role of a deployment, before anything of it is started."""

from __future__ import annotations

import argparse
import asyncio
import json

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from twinpool.checkpoints.resolve import resolve_model, served_name
from twinpool.cli.plan_args import model_of, numbers_of, workers_of
from twinpool.cli.run import deployment_config, say
from twinpool.cluster.config import DeploymentConfig
from twinpool.lab.memory.bytes_text import bytes_text
from twinpool.lab.memory.measuring.comparison import ComparedTerm, compare
from twinpool.lab.memory.memory_plan import MemoryPlan, plan_memory
from twinpool.lab.memory.worker_plan import WorkerPlan


def plan(args: argparse.Namespace) -> int:
    """Print the plan; return 0 if every role fits."""
    config = deployment_config(args)
    made = plan_memory(
        model_of(args, config.model, progress=say),
        workers_of(args, config),
        model_name=served_name(config.model),
        contexts=numbers_of(args.context, field="--context"),
        conversations=numbers_of(args.conversations, field="--conversations"),
    )
    measured = _measure(made, config) if args.measure else {}
    if args.json:
        told = made.to_json()
        if measured:
            told["measured"] = {role: [row.to_json() for row in rows] for role, rows in measured.items()}
        print(json.dumps(told, indent=2))
    else:
        _show(made)
        for role, rows in measured.items():
            _show_measured(role, rows)
    return 0 if made.fits else 1


def _measure(made: MemoryPlan, config: DeploymentConfig) -> dict[str, tuple[ComparedTerm, ...]]:
    from twinpool.lab.memory.measuring.measure import measure_plan

    folder = resolve_model(config.model, progress=say)
    say("running it twice: once to read its memory, once to trace it")
    found = asyncio.run(measure_plan(made, folder, device=config.device))
    return {str(plan.worker.role): compare(plan, found[plan.worker.role]) for plan in made.workers}


def _show_measured(role: str, rows: tuple[ComparedTerm, ...]) -> None:
    console = Console(highlight=False)
    console.print(f"\nmeasured: [bold]{role}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for number, name in enumerate(("term", "planned", "measured", "bytes measured", "error")):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        planned, measured = bytes_text(row.planned_bytes), bytes_text(row.measured_bytes)
        table.add_row(row.name, planned, measured, f"{row.measured_bytes:,}", f"{row.error:+.1%}")
    console.print(table)


def _show(made: MemoryPlan) -> None:
    console = Console(highlight=False)
    for worker in made.workers:
        console.print(_title(made, worker), soft_wrap=True)
        console.print(_terms(worker))
        for line in _verdict(made, worker):
            console.print(line, soft_wrap=True)
    for group in _alike(made.workers):
        roles = " and ".join(str(worker.worker.role) for worker in group)
        console.print(f"\nKV of conversations on each rank ({roles}); in brackets: does not fit")
        console.print(_table(made, group[0]))
    for note in made.notes():
        console.print(f"note: {note}", soft_wrap=True)


def _title(made: MemoryPlan, plan: WorkerPlan) -> str:
    worker = plan.worker
    ranks = f"{worker.num_ranks} ranks, each" if worker.num_ranks > 1 else "1 rank"
    device = "GPU" if worker.is_gpu else "CPU"
    return f"\n[bold]{worker.role}[/bold]: {escape(made.model_name)}, {worker.dtype}, {ranks} on a {device}"


def _terms(plan: WorkerPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("term", "size", "bytes", "is"):
        table.add_column(name, justify="right" if name in ("size", "bytes") else "left", no_wrap=True)
    table.add_column("made of", overflow="fold")
    for term in plan.terms:
        table.add_row(
            str(term.name), bytes_text(term.num_bytes), f"{term.num_bytes:,}", str(term.kind), term.source
        )
    table.add_section()
    total, memory = plan.total_bytes, plan.worker.memory_bytes
    table.add_row("sum", bytes_text(total), f"{total:,}", "", f"of {bytes_text(memory)} ({memory:,})")
    return table


def _verdict(made: MemoryPlan, plan: WorkerPlan) -> list[str]:
    if plan.fits:
        tokens = plan.capacity.num_tokens
        room = "conversations of any length" if tokens is None else f"{tokens:,} tokens"
        blocks = "" if plan.num_blocks is None else f" in {plan.num_blocks:,} blocks"
        return [f"fits, with room for {room}{blocks}: --kv-memory {plan.kv_memory_bytes}"]
    missing = plan.missing_bytes
    lines = [f"[bold]does not fit[/bold]: {bytes_text(missing)} ({missing:,} bytes) are missing on each rank"]
    for cut in made.cuts(plan):
        enough = "enough" if cut.is_enough else "not enough"
        lines.append(f"  {cut.term}: {cut.change} gains {bytes_text(cut.saved_bytes)}, {enough}")
    return lines


def _alike(workers: tuple[WorkerPlan, ...]) -> list[list[WorkerPlan]]:
    """Group workers whose tables are the same."""
    groups: dict[object, list[WorkerPlan]] = {}
    for worker in workers:
        key = (worker.worker.settings, worker.capacity.cache_bytes)
        groups.setdefault(key, []).append(worker)
    return list(groups.values())


def _table(made: MemoryPlan, plan: WorkerPlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tokens each", justify="right")
    for number in made.conversations:
        table.add_column(f"{number:,}", justify="right", no_wrap=True)
    table.add_column("fit", justify="right")
    for row in made.table(plan):
        cells = [bytes_text(cell.num_bytes) for cell in row]
        shown = [text if cell.fits else f"({text})" for text, cell in zip(cells, row, strict=True)]
        most = plan.capacity.conversations(row[0].num_tokens)
        table.add_row(f"{row[0].num_tokens:,}", *shown, "any" if most is None else f"{most:,}")
    return table
