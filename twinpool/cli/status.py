"""`twinpool status`: the workers of a running server, those without a place, and its books."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from twinpool.cli.client import client_of
from twinpool.core.ports import Role


def status(args: argparse.Namespace) -> int:
    """Print the state of a deployment; the exit code is 0 if its books add up."""
    client = client_of(args)
    found = {
        "workers": client.get("/admin/workers"),
        "deployment": client.get("/admin/deployment"),
        "audit": client.get("/admin/audit"),
    }
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        _show(Console(markup=False), client.url, found)
    return 0 if found["audit"]["ok"] else 1


def _show(console: Console, url: str, found: Mapping[str, Any]) -> None:
    audit, wanted = found["audit"], found["deployment"].get("workers", [])
    workers = sorted(found["workers"], key=_place)
    console.print(_table(workers, audit["workers"], wanted, width=console.width))
    joined = {worker["id"] for worker in workers}
    for worker in wanted:
        if worker["worker_id"] not in joined:
            why = worker["detail"] or worker["last_failure"] or "no news"
            console.print(f"{worker['worker_id']} is {worker['state']}: {why}", soft_wrap=True)
    for worker in workers:
        if worker["becomes"]:
            console.print(f"{worker['id']} becomes {worker['becomes']} once it is empty", soft_wrap=True)
    ray = found["deployment"].get("ray", "ok")
    if ray not in ("ok", "not used"):
        console.print(f"Ray: {ray}", soft_wrap=True)
    console.print(f"strangers are kept out by: {found['deployment'].get('security', '?')}", soft_wrap=True)
    router = audit["router"]
    books = "the books add up" if audit["ok"] else "THE BOOKS DO NOT ADD UP"
    console.print(
        f"{url}: {router['in_flight']} in flight, {router['queued']} queued; {books}", soft_wrap=True
    )


def _place(worker: Mapping[str, Any]) -> tuple[int, str, int]:
    """Return what puts prefill workers first, and ``decode-2`` before ``decode-10``."""
    name, _, number = worker["id"].rpartition("-")
    in_role = (name, int(number)) if number.isdecimal() else (worker["id"], 0)
    return (list(Role).index(Role(worker["role"])), *in_role)


def _table(
    workers: Sequence[Mapping[str, Any]],
    audits: Sequence[Mapping[str, Any]],
    wanted: Sequence[Mapping[str, Any]],
    *,
    width: int,
) -> Table:
    books = {audit["id"]: audit for audit in audits}
    failures = {worker["worker_id"]: worker["num_failures"] for worker in wanted}
    ways = _kv_ways(workers)
    names = (
        "worker",
        "role",
        "ranks",
        "state",
        "pid",
        "running",
        "queued",
        "blocks free",
        "failures",
        "host",
        "KV by",
    )
    rows = []
    for worker in workers:
        blocks = books.get(worker["id"], {}).get("blocks")
        told = (worker[name] for name in ("state", "pid", "running", "queued"))
        free = f"{blocks['free'] + blocks['cached']}/{blocks['total']}" if blocks else "?"
        failed = str(failures.get(worker["id"], 0))
        who = (worker["id"], worker["role"], str(len(worker["ranks"])))
        rows.append([*who, *map(str, told), free, failed, worker["host"], ways[worker["id"]]])
    columns = {name: cells for name, *cells in zip(names, *rows, strict=True)}
    if set(columns["ranks"]) <= {"1"}:
        del columns["ranks"]
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    if sum(widths.values()) + 2 * len(widths) > width:
        del columns["KV by"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        # Where it is narrow the host is cut: it alone is needed by no other command.
        table.add_column(name, no_wrap=True, min_width=0 if name == "host" else widths[name])
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _kv_ways(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, str]:
    """Return by which transports the KV that a worker sent or got came last, by its id."""
    ways: dict[str, set[str]] = {worker["id"]: set() for worker in workers}
    for worker in workers:
        for sender_id, exchange in worker["received_from"].items():
            if exchange["transport"]:
                ways[worker["id"]].add(exchange["transport"])
                ways[sender_id].add(exchange["transport"])
    return {worker_id: ",".join(sorted(found)) or "-" for worker_id, found in ways.items()}
