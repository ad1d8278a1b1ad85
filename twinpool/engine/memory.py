"""How much memory the KV cache may take, and how many blocks that is."""

from __future__ import annotations

import psutil
import torch

from twinpool.core.errors import ConfigError
from twinpool.core.layout import KVLayout

CPU_FRACTION = 0.25  # of what is available: several workers and a page cache full of weights live there too
GPU_FRACTION = 0.9  # of what is free once the weights are loaded; the rest is for activations


def default_budget_bytes(device: str) -> int:
    """Return the share of the memory now free on a device that a KV cache takes if nobody says otherwise.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; asked after the weights are loaded.
    """
    if device == "cpu":
        return int(psutil.virtual_memory().available * CPU_FRACTION)
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    return int(free * GPU_FRACTION)


def num_blocks_for(layout: KVLayout, budget_bytes: int, *, field: str = "--kv-memory") -> int:
    """Return how many blocks a budget pays for.

    Raises:
        ConfigError: It does not pay for two, one to finish a sequence and one to begin the next.
    """
    num_blocks = budget_bytes // layout.rank_block_bytes
    if num_blocks < 2:
        raise ConfigError(
            field, f"{budget_bytes} bytes hold {num_blocks} blocks of {layout.rank_block_bytes}, needed are 2"
        )
    return num_blocks
