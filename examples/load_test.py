"""Send thirty requests to a server when they are due, and show how many were answered in time.

    twinpool serve                                        # in another terminal
    python examples/load_test.py

TWINPOOL_URL and TWINPOOL_API_KEY name another server, also one that is no Twinpool, and its key.
"""

from __future__ import annotations

import os

from twinpool.lab import BenchConfig, Limits, Record, open_workload, run_bench


def main() -> None:
    """Print each request as it ends, and what all of them come to."""
    workload = open_workload("synthetic:prompt=uniform(8,64),output=8,arrival=poisson(4),count=30,seed=1")
    config = BenchConfig(
        url=os.environ.get("TWINPOOL_URL", "http://127.0.0.1:8000"), limits=Limits(ttft_s=2.0, tpot_s=0.5)
    )

    def show(record: Record) -> None:
        print(f"request {record.index}: TTFT {record.ttft_s} s, {record.output_tokens} tokens {record.error}")

    result = run_bench(workload, config, api_key=os.environ.get("TWINPOOL_API_KEY"), on_record=show)

    summary = result.summary
    print(f"{summary.num_answered} answered, {summary.goodput_share:.0%} in time")
    print(f"p50 {summary.ttft_s.percentile(50)} s, p99 {summary.ttft_s.percentile(99)} s to the first token")
    for problem in result.problems:
        print(f"not to be believed: {problem}")


if __name__ == "__main__":
    main()
