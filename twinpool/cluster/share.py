"""What every rank of a worker has, rank 0 and the others alike: a share of the model, a cache, transfers.

The functions that load block, and all ranks call them at the same time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.registry import chosen_transports
from twinpool.cluster.config import WorkerConfig
from twinpool.core.clock import Clock
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.units import parse_bytes
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, ModelSpec, load_model
from twinpool.engine.memory import default_budget_bytes, num_blocks_for
from twinpool.engine.parallel import GroupConfig, RankGroup
from twinpool.engine.runner import TorchRunner


def group_config(config: WorkerConfig, *, rank: int, secret: Secret) -> GroupConfig:
    """Return how a rank computes together with the others."""
    return GroupConfig(
        size=config.tensor_parallel,
        secret=secret,
        device=device_of(config, rank=rank),
        start_timeout_s=config.start_s,
    )


def device_of(config: WorkerConfig, *, rank: int) -> str:
    """Return the device of a rank: of ranks that one process starts each has a GPU of its own, in order.

    One that is started elsewhere sees its own GPU and no other.
    """
    kind, _, number = config.device.partition(":")
    if kind == "cpu" or (number and not number.isdecimal()):
        return config.device  # whoever loads the model refuses nonsense
    return f"{kind}:{int(number or 0) + (rank if config.starts_ranks else 0)}"


def load_share(config: WorkerConfig, group: RankGroup) -> tuple[LoadedModel, KVCache]:
    """Load this rank's share of the model, and make a KV cache of as many blocks as all ranks have room for.

    For a process of its own: what it has loaded by then is there to stay, and no more looked through for
    garbage, which would stop tokens, transfers and heartbeats for 0.1 s and longer each time.

    Raises:
        ModelError: The checkpoint cannot be run.
        ConfigError: A setting cannot work: the device, the dtype, the memory, the number of ranks.
        RankLost: Another rank is gone.
    """
    device = device_of(config, rank=group.rank)
    loaded = load_model(Path(config.model), device=device, dtype=config.dtype, group=group)
    layout = loaded.spec.layout(block_tokens=config.engine.block_tokens, tp_size=group.size)
    num_blocks = group.minimum(num_blocks_for(layout, _budget_bytes(config, device)))
    cache = KVCache(layout, num_blocks, device, rank=group.rank)
    gc.freeze()
    return loaded, cache


@dataclass(frozen=True, slots=True)
class LeadingRank:
    """What computes, as rank 0 has it."""

    spec: ModelSpec
    cache: KVCache
    runner: TorchRunner
    group: RankGroup


def load_leading(config: WorkerConfig, lead: Callable[[], RankGroup]) -> LeadingRank:
    """Load rank 0's share.

    Args:
        config: Of the worker.
        lead: Waits for the other ranks.

    Raises:
        ServingError: As ``load_share``, and what ``lead`` raises.
    """
    group = lead()
    try:
        loaded, cache = load_share(config, group)
        return LeadingRank(loaded.spec, cache, TorchRunner(loaded, cache), group)
    except BaseException:
        group.close()  # nobody waits for this rank
        raise


async def start_transfers(
    cache: KVCache, clock: Clock, config: WorkerConfig, trust: Trust, *, rank: int
) -> TransferEnds:
    """Open every transport that a rank is to use.

    Raises:
        ConfigError: One does not exist, cannot be used here or cannot listen.
    """
    transfer = replace(config.transfer, listen=config.transfer.listen or f"{config.host}:0")
    identity = RankIdentity(
        worker_id=config.worker_id,
        epoch=config.generation,
        secret=trust.secret,
        tls=trust.tls,
        rank=rank,
    )
    return await start_ends(cache, clock, transfer, identity, names=chosen_transports(transfer.transports))


def _budget_bytes(config: WorkerConfig, device: str) -> int:
    """Return what the cache of one rank may take: as told, or its share of the memory that is free."""
    if config.kv_memory is not None:
        return parse_bytes(config.kv_memory) // config.tensor_parallel
    if device == "cpu":
        return default_budget_bytes(device) // (config.num_neighbours + config.tensor_parallel)
    return int(default_budget_bytes(device) * config.gpu_share)
