"""How a few GPUs are best laid out for a load, and whether pools are worth it at all; no worker is started.

python examples/recommend_layout.py [PROFILE [GPUS [PROMPT]]]     # `twinpool simulate --profiles` lists them
"""

import sys

from twinpool.lab import Limits, RecommendConfig, WorkerKind, open_workload, recommend_layout


def run(profile: str, gpus: str, prompt: str) -> None:
    """Print the highest rate of each layout, and the answer."""
    workload = open_workload(f"synthetic:prompt={prompt},output=uniform(8,32),arrival=poisson(20),count=100")
    config = RecommendConfig(
        kinds=(WorkerKind(profile=profile),),
        gpus=int(gpus),
        limits=Limits(ttft_s=0.5, tpot_s=0.0085),
        percentile=90,
        precision=0.05,
        has_what_if=False,
    )
    found = recommend_layout(workload, config)
    for entry in (*found.ranking.finalists, *found.ranking.others):
        bound = "below " if entry.is_below else ""
        print(f"{entry.layout.name:8} {bound}{entry.mean:.3g} requests/s")
    print(*found.to_json()["answer"], sep="\n")


if __name__ == "__main__":
    defaults = ("h100-llama-3.1-8b", "2", "lognormal(2000,sigma=0.7)")
    run(*sys.argv[1:4], *defaults[len(sys.argv) - 1 :])
