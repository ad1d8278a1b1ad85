"""What all ranks of a worker must have alike, compared once before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from twinpool.core.errors import ConfigError
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel


def check_agreement(loaded: LoadedModel, cache: KVCache, *, attention: str) -> None:
    """Compare this rank's settings with those of rank 0; all ranks call it, each before its first step.

    Raises:
        ConfigError: They differ; the message names the first one that does.
        RankLost: A rank is gone.
    """
    group = loaded.group
    if group.size == 1:
        return
    own = {
        **loaded.spec.fingerprint,
        **{f"layout.{name}": str(value) for name, value in asdict(cache.layout).items()},
        "num_blocks": str(cache.num_blocks),
        "attention": attention,
    }
    brought = [json.loads(data) for data in group.exchange(json.dumps(own).encode())]
    for rank, settings in enumerate(brought):
        _compare(brought[0], settings, rank)


def _compare(first: Mapping[str, str], other: Mapping[str, str], rank: int) -> None:
    for name, value in first.items():
        if other.get(name) != value:
            raise ConfigError(
                "tensor_parallel", f"{name} is {value} on rank 0 and {other.get(name)} on rank {rank}"
            )
