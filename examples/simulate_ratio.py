"""Which of a few layouts of equal workers would answer most of a load in time; no worker is started.

python examples/simulate_ratio.py [PROFILE [RATE]]       # `twinpool simulate --profiles` lists profiles
"""

import sys

from twinpool.lab import (
    Limits,
    Pool,
    SimulationConfig,
    load_profile,
    open_workload,
    parse_layout,
    run_simulation,
)

LAYOUTS = ("4C", "1P3D", "2P2D", "3P1D")


def run(profile: str, rate: str) -> None:
    """Print goodput and latencies of each layout at ``rate`` requests a second."""
    workload = open_workload(
        f"synthetic:prompt=lognormal(2000,sigma=0.7),output=uniform(32,256),arrival=poisson({rate}),count=400"
    )
    limits = Limits(ttft_s=0.5, tpot_s=0.0085)
    print(f"{load_profile(profile).hardware} each; within {limits.ttft_s} s and {limits.tpot_s} s per token:")
    for layout in LAYOUTS:
        pools = tuple(Pool(role=role, workers=n, profile=profile) for role, n in parse_layout(layout))
        result = run_simulation(workload, SimulationConfig(pools=pools), limits=limits)
        summary = result.summary
        busy = "  ".join(f"{use.worker} {use.busy_s / result.simulated_s:.0%}" for use in result.workers)
        ttft_s, tpot_s = summary.ttft_s.percentile(99) or 0.0, summary.tpot_s.percentile(99) or 0.0
        latencies = f"p99 TTFT {ttft_s:.2f} s, TPOT {tpot_s * 1e3:.1f} ms"
        print(f"{layout:5} {summary.goodput_share:6.1%}  {latencies}  {busy}")


if __name__ == "__main__":
    defaults = ("h100-llama-3.1-8b", "24")
    run(*sys.argv[1:3], *defaults[len(sys.argv) - 1 :])
