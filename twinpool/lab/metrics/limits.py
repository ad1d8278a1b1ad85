"""How long an answer may take to be a good one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that one request meets or not; both count, and each includes its value."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf  # an answer of one token meets any

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"limits.{name}", f"{getattr(self, name)} is not above 0")

    def are_met_by(self, record: Record) -> bool:
        """Say whether the request was answered, and within both limits."""
        if record.error or record.ttft_s is None or record.ttft_s > self.ttft_s:
            return False
        return record.tpot_s is None or record.tpot_s <= self.tpot_s
