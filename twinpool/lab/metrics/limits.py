"""How long an answer may take to be a good one."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.record import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that one request meets or not; both count, each includes its value, and None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None  # an answer of one token meets any

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ConfigError(f"limits.{name}", f"{value} is not above 0")

    def are_met_by(self, record: Record) -> bool:
        """Say whether the request was answered, and within both limits."""
        if record.error or record.first_token_s is None:
            return False
        is_first_in_time = self.ttft_s is None or _is_within(record.ttft_s, self.ttft_s)
        return is_first_in_time and (self.tpot_s is None or _is_within(record.tpot_s, self.tpot_s))


def _is_within(value: float | None, limit: float) -> bool:
    return value is None or value <= limit
