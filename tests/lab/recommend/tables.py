"""Cost tables of which the best layout can be worked out by hand, and brute force without a shortcut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from twinpool.lab.recommend.config import RecommendConfig
from twinpool.lab.recommend.offered_load import offer
from twinpool.lab.simulate.config import Pool, SimulationConfig, parse_layout
from twinpool.lab.simulate.simulation import run_simulation
from twinpool.lab.workload.workload import Workload

TOKEN_BYTES = 256  # of KV: one layer, one head of 64, two bytes each


def write_profile(
    folder: Path,
    name: str,
    *,
    prefill: Sequence[float],
    decode: Sequence[float],
    tp: int = 1,
    cache_tokens: int = 100_000,
    **more: Any,
) -> str:
    """Write a polynomial profile with ``more`` fields, and return its path."""
    path = folder / f"{name}.yaml"
    content = {
        "name": name,
        "source": "made up",
        "hardware": "none",
        "engine": "none",
        "tp": tp,
        "model": {
            "name": "toy",
            "num_layers": 1,
            "num_kv_heads": 1,
            "head_dim": 64,
            "max_tokens": 8192,
            "dtype": "float16",
        },
        "kv_cache_bytes": cache_tokens * TOKEN_BYTES * tp,  # the head is kept by every rank
        "polynomial": {"prefill": list(prefill), "decode": list(decode)},
        **more,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def brute_force(
    workload: Workload, config: RecommendConfig, layouts: Sequence[str], *, first: int, last: int
) -> dict[str, float]:
    """Try each layout with the first repeat at each rate of the grid, and return the highest rates met."""
    load = offer(workload, repeats=config.repeats, needs_rate=True)
    found: dict[str, float] = {}
    for layout in layouts:
        pools = tuple(
            Pool(role=role, workers=workers, profile=config.kinds[0].profile)
            for role, workers in parse_layout(layout)
        )
        deployment = SimulationConfig(pools=pools, transfer=config.transfer)
        found[layout] = 0.0
        for rate in ((1.0 + config.precision) ** step for step in range(first, last + 1)):
            result = run_simulation(load.at_rate(0, rate), deployment, limits=config.limits)
            if (result.summary.goodput_share or 0.0) < config.percentile / 100.0:
                break
            found[layout] = rate
    return found
