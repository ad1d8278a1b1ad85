"""Compare one prefill and one decode worker with two colocated ones, at a running server of two workers.

    twinpool serve                                 # in another terminal
    python examples/ratio_study.py study 30 1 2    # a folder, seconds of a cell, and rates in requests/s

The workers change roles between the arms, and have their own again at the end.  With the same folder a run
goes on where the last one was stopped.  TWINPOOL_URL and TWINPOOL_API_KEY name another server and its key.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twinpool.lab import BenchConfig, Limits, StudySettings, conclude, run_study


def main(folder: str, cell_s: str, *rates: str) -> None:
    """Measure what the folder does not hold yet, and print what can be concluded."""
    settings = StudySettings(
        workers=2,
        ratios=("1:1",),
        colocated=True,
        rates=tuple(float(rate) for rate in rates),
        cell_s=float(cell_s),
        workload={"kind": "synthetic", "prompt": "bimodal(32, 256, long_share=0.2)", "output": "16"},
        bench=BenchConfig(limits=Limits(ttft_s=2.0, tpot_s=0.2), late_limit_s=0.25),
    )
    results = run_study(
        settings,
        Path(folder),
        url=os.environ.get("TWINPOOL_URL", "http://127.0.0.1:8000"),
        api_key=os.environ.get("TWINPOOL_API_KEY"),
    )
    for conclusion in conclude(results):
        print(f"{conclusion.text}\n    {conclusion.evidence}")


if __name__ == "__main__":
    main(*sys.argv[1:])
