"""How fast KV moves between two processes by each transport, in the sizes that matter.

    python -m benchmarks.kv_transfer [--write]

Runs `twinpool kv-bench`, and compares with the targets: the share of its bare link's speed that a transport
should reach, gather, checksums on both sides and the copy into the blocks included.

On a machine that is busy, ``--alone`` gives each peer a core of its own and puts both before
everything else (root; Linux with autogroups): two processes that have to wait for a core to hand over are
otherwise all that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import own_work
from benchmarks.document import provenance, table, write_section

TRANSPORTS = ("shm", "tcp", "grpc", "torch_dist", "nixl")
_WHOLE = "64 MiB"
_PIECES = "64 MiB in messages of 256 KiB"
SIZES = {
    _WHOLE: ("--bytes", "64MiB"),
    _PIECES: ("--bytes", "64MiB", "--message-bytes", "256KiB"),
    "256 KiB": ("--bytes", "256KiB"),
}
TARGETS = {
    ("shm", _WHOLE): 0.8,
    ("shm", _PIECES): 0.6,
    ("shm", "256 KiB"): 0.6,
    ("tcp", _WHOLE): 0.8,
    ("grpc", _WHOLE): 0.9,
    ("torch_dist", _WHOLE): 0.8,
}
CHECKSUM_TARGET = 0.15
_HEAD = (
    "transport",
    "GB/s",
    "bare",
    "ratio (target)",
    "first block, ms",
    "last block, ms",
    "CPU s/GB",
    "bare",
    "checksums (target)",
)
_LIMIT_S = 1800.0


def kv_bench(*options: str, alone: bool) -> Mapping[str, Any]:
    """Run it and return its report."""
    command = [sys.executable, "-m", "twinpool", "kv-bench"]
    peers = []
    try:
        listening = subprocess.Popen(
            [*command, "--listen", "127.0.0.1"], stdout=subprocess.PIPE, text=True, start_new_session=alone
        )
        peers.append(listening)
        if alone:
            _prefer(listening.pid, core=1)
        assert listening.stdout is not None
        address = listening.stdout.readline().rpartition(" ")[2].strip()
        measuring = subprocess.Popen(
            [*command, "--connect", address, "--json", "-", *options],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=alone,
        )
        peers.append(measuring)
        if alone:
            _prefer(measuring.pid, core=0)
        output, _ = measuring.communicate(timeout=_LIMIT_S)
        if not output:
            raise SystemExit(measuring.returncode)
        report: Mapping[str, Any] = json.loads(output)
        return report
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()


def _prefer(pid: int, *, core: int) -> None:
    """Give a process, the first of its session, one core, and the most weight there."""
    os.sched_setaffinity(pid, {core})
    os.setpriority(os.PRIO_PROCESS, pid, -15)
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists():
        autogroup.write_text("-15")


def section(size: str, report: Mapping[str, Any]) -> str:
    """Return the table of one size."""
    rows = [_cells(size, row) for row in report["transports"]]
    settings = report["settings"]
    layout = settings["layout"]
    blocks = "scattered" if settings["scattered"] else "neighbouring"
    title = (
        f"**{size}**: {report['wire_bytes']:,} bytes, {settings['num_tokens']} tokens of "
        f"{layout['num_layers']} layers x {layout['num_kv_heads']} KV heads x {layout['head_dim']}, "
        f"{settings['wire']}, {blocks} blocks; medians of {settings['repeat']}."
    )
    return f"{title}\n\n{table(_HEAD, rows)}"


def _cells(size: str, row: Mapping[str, Any]) -> Sequence[str]:
    name = row["transport"]
    if row["skipped"] or row["failed"]:
        return [name, row["failed"] or row["skipped"], *[""] * (len(_HEAD) - 2)]
    target = TARGETS.get((name, size))
    return [
        name,
        f"{row['gb_s']:.2f}",
        f"{row['bare_gb_s']:.2f}",
        f"{row['ratio']:.2f}" + ("" if target is None else f" ({target})"),
        f"{row['first_block_s'] * 1e3:.2f}",
        f"{row['last_block_s'] * 1e3:.2f}",
        f"{row['cpu_s_per_gb']:.2f}",
        f"{row['bare_cpu_s_per_gb']:.2f}",
        f"{row['checksum_cost']:+.0%} ({CHECKSUM_TARGET:.0%})",
    ]


def limits(report: Mapping[str, Any]) -> str:
    """Return what keeps each transport below its bare link, and how near it came to what is possible."""
    num_bytes = report["wire_bytes"]
    work = own_work.measure(num_bytes)
    rows = []
    for row in report["transports"]:
        if not (row["skipped"] or row["failed"]):
            best = own_work.best_ratio(row, num_bytes, work)
            rows.append(
                [row["transport"], f"{best:.2f}", f"{row['ratio']:.2f}", f"{row['ratio'] / best:.0%}"]
            )
    done = (
        f"To gather {num_bytes:,} bytes takes one core {work.gather_s * 1e3:.1f} ms here, a checksum "
        f"{work.checksum_s * 1e3:.1f} ms at each end, to fill blocks {work.scatter_s * 1e3:.1f} ms; the "
        "bare link does none of that. With it, and were no core ever idle, the ratios could be:"
    )
    return f"{done}\n\n{table(('transport', 'possible', 'reached', 'of that'), rows)}"


def main() -> None:
    """Print what was found, and keep it in the document if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=None)
    parser.add_argument("--alone", action="store_true", help="a core for each peer, and priority")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    args = parser.parse_args()
    options = ["--transports", ",".join(TRANSPORTS)]
    options += [] if args.repeat is None else ["--repeat", str(args.repeat)]
    parts = []
    for size, size_options in SIZES.items():
        report = kv_bench(*options, *size_options, alone=args.alone)
        parts.append(section(size, report))
        if size == _WHOLE:
            parts.append(limits(report))
        print(parts[-1], flush=True)
    text = "\n\n".join([*parts, provenance("benchmarks.kv_transfer")])
    if args.write:
        write_section("kv transfer", text)


if __name__ == "__main__":
    main()
