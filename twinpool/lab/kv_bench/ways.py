"""Which transports can carry KV between two peers here, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_transfer.registry import names_between_processes, unavailable
from twinpool.core.errors import ConfigError

_GPUS_ONLY = ("cuda_ipc",)


def check_names(names: Sequence[str]) -> None:
    """Check transports that somebody has named.

    Raises:
        ConfigError: One does not exist, or reaches no other process.
    """
    for name in names:
        if name not in names_between_processes():
            raise ConfigError("--transports", f"{name} is none of {', '.join(names_between_processes())}")


def missing_ways(device: str) -> Mapping[str, str]:
    """Return why each transport that cannot be used for KV on ``device`` cannot, by its name."""
    reasons = {name: unavailable(name) for name in names_between_processes()}
    if device == "cpu":
        reasons |= {
            name: reasons[name] or "it moves KV between GPUs" for name in _GPUS_ONLY if name in reasons
        }
    return {name: reason for name, reason in reasons.items() if reason}
