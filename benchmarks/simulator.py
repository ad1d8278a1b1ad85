"""How many requests `twinpool simulate` works through in a second of processor time, and in how much memory.

    python -m benchmarks.simulator TRACE [--write]

TRACE is AzureLLMInferenceTrace_conv.csv of the Azure public dataset (2023): 19,366 conversations as
they came.  Longer runs take it several times, one after the other.  Each case is a process of its own;
reading the trace and summing up are counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

from benchmarks.document import provenance, table, write_section
from twinpool.engine.config import EngineConfig
from twinpool.lab import Pool, SimulationConfig, WorkItem, open_workload, parse_layout, run_simulation

CASES = (
    ("2P2D", "h100-llama-3.1-8b", 512, 19_366),
    ("2P2D", "h100-llama-3.1-8b", 0, 19_366),
    ("4C", "h100-llama-3.1-8b", 512, 19_366),
    ("2P2D", "a100-llama-3.1-70b-tp8", 512, 19_366),
    ("2P2D", "h100-llama-3.1-8b", 0, 1_000),
    ("2P2D", "h100-llama-3.1-8b", 0, 100_000),
)


def main() -> None:
    """Run every case, print the table, and put it into the document if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    parser.add_argument("--case", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(_run(args.trace, *CASES[args.case])))
        return
    rows = []
    for number, (layout, profile, chunk, count) in enumerate(CASES):
        command = [sys.executable, "-m", "benchmarks.simulator", args.trace, "--case", str(number)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        found: dict[str, Any] = json.loads(done.stdout)
        rows.append(
            (
                f"{layout}, {profile}, {f'chunks of {chunk}' if chunk else 'whole prompts'}",
                f"{count:,}",
                f"{count / found['cpu_s']:,.0f}",
                f"{found['wall_s']:.1f}",
                f"{found['simulated_s'] / found['wall_s']:,.0f}",
                f"{found['steps'] / found['cpu_s']:,.0f}",
                f"{found['peak_mib']:.0f}",
            )
        )
        print(rows[-1], flush=True)
    head = (
        "workers",
        "requests",
        "requests per CPU s",
        "s",
        "times faster than life",
        "steps per CPU s",
        "peak MiB",
    )
    text = f"{table(head, rows)}\n\n{provenance('benchmarks.simulator')}"
    print(text)
    if args.write:
        write_section("simulator", text)


def _run(trace: str, layout: str, profile: str, chunk: int, count: int) -> dict[str, float]:
    engine = EngineConfig(max_chunk_tokens=chunk, max_batch_tokens=2048 if chunk else 16_384)
    pools = tuple(
        Pool(role=role, workers=workers, profile=profile, engine=engine)
        for role, workers in parse_layout(layout)
    )
    began_s, cpu_s = perf_counter(), process_time()
    result = run_simulation(_conversations(trace, count), SimulationConfig(pools=pools))
    cpu_s, wall_s = process_time() - cpu_s, perf_counter() - began_s
    assert result.summary.num_answered == count, f"{result.summary.errors} of {count}"
    return {
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "simulated_s": result.simulated_s,
        "steps": sum(use.steps for use in result.workers),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _conversations(trace: str, count: int) -> Iterator[WorkItem]:
    """Yield ``count`` requests: the trace, and again from its beginning."""
    index, start_s, last_s = 0, 0.0, 0.0
    while True:
        for item in open_workload({"kind": "trace", "path": trace}):
            if index == count:
                return
            last_s = start_s + item.arrival_s
            yield replace(item, index=index, arrival_s=last_s)
            index += 1
        start_s = last_s + 0.2


if __name__ == "__main__":
    main()
