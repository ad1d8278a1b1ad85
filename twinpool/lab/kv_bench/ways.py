"""Which transports can carry KV between two peers here, and why others cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kv_transfer.registry import transport_names, unavailable
from twinpool.core.errors import ConfigError

_ONE_PROCESS = ("loopback",)
_GPUS_ONLY = ("cuda_ipc",)


def measurable() -> tuple[str, ...]:
    """Return the transports of this build that reach another process."""
    return tuple(name for name in transport_names() if name not in _ONE_PROCESS)


def check_names(names: Sequence[str]) -> None:
    """Check transports that somebody has named.

    Raises:
        ConfigError: One does not exist, or reaches no other process.
    """
    for name in names:
        if name not in measurable():
            raise ConfigError("--transports", f"{name} is none of {', '.join(measurable())}")


def missing_ways(device: str) -> Mapping[str, str]:
    """Return why each transport that cannot be used for KV on ``device`` cannot, by its name."""
    reasons = {name: unavailable(name) for name in measurable()}
    if device == "cpu":
        reasons |= {
            name: reasons[name] or "it moves KV between GPUs" for name in _GPUS_ONLY if name in reasons
        }
    return {name: reason for name, reason in reasons.items() if reason}
