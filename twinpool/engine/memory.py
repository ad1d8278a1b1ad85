"""How much memory the KV cache may take, and how many blocks that is."""

from __future__ import annotations

import re

import psutil
import torch

from twinpool.core.errors import ConfigError
from twinpool.core.layout import KVLayout

CPU_FRACTION = 0.25  # of what is available: several workers and a page cache full of weights live there too
GPU_FRACTION = 0.9  # of what is free once the weights are loaded; the rest is for activations

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str, *, field: str = "--kv-memory") -> int:
    """Read a size as in ``512MiB``, ``2GB``, ``1.5GiB`` or ``1048576``.

    Args:
        text: A number and a unit; upper and lower case mean the same.
        field: What the error blames.

    Raises:
        ConfigError: It is no size, or less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text, flags=re.ASCII)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(field, f"{text!r} is no size such as 512MiB, 2GB or 1.5GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 1:
        raise ConfigError(field, f"{text!r} is less than one byte")
    return size


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
    num_blocks = budget_bytes // layout.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            field, f"{budget_bytes} bytes hold {num_blocks} blocks of {layout.block_bytes}, needed are 2"
        )
    return num_blocks
