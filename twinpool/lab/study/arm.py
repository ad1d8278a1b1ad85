"""One way to divide the same workers: so many for prompts and so many for answers, or all for both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role

_RATIO = re.compile(r"(\d{1,4}):(\d{1,4})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Either prefill and decode workers, or colocated ones."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    @property
    def name(self) -> str:
        """``1:2`` or ``colocated``; all arms of a study have as many workers."""
        return "colocated" if self.colocated else f"{self.prefill}:{self.decode}"

    @property
    def workers(self) -> int:
        return self.prefill + self.decode + self.colocated

    @property
    def pools(self) -> dict[Role, int]:
        """How many workers each pool has; a pool without any is left out."""
        all_pools = {
            Role.PREFILL: self.prefill,
            Role.DECODE: self.decode,
            Role.COLOCATED: self.colocated,
        }
        return {role: workers for role, workers in all_pools.items() if workers}

    def roles(self) -> tuple[Role, ...]:
        """Return the role of each worker, prefill workers first."""
        return tuple(role for role, workers in self.pools.items() for _ in range(workers))


def read_arms(ratios: Sequence[str], *, workers: int, colocated: bool) -> tuple[Arm, ...]:
    """Return the arms that ``1:3``, ``2:2`` and so on name, and the colocated one last.

    Raises:
        ConfigError: A ratio is none, stands twice, or has not ``workers`` workers; or there is no arm.
    """
    if workers < 1:
        raise ConfigError("study.workers", f"{workers} is less than 1")
    arms = []
    for ratio in ratios:
        match = _RATIO.fullmatch(ratio.strip())
        if match is None:
            raise ConfigError("study.ratios", f"{ratio!r} is not PREFILL:DECODE, as in 1:3")
        arm = Arm(prefill=int(match[1]), decode=int(match[2]))
        if not (arm.prefill and arm.decode):
            raise ConfigError("study.ratios", f"{ratio} leaves a pool without workers")
        if arm.workers != workers:
            raise ConfigError("study.ratios", f"{ratio} has {arm.workers} workers, and there are {workers}")
        if arm in arms:
            raise ConfigError("study.ratios", f"{arm.name} stands twice")
        arms.append(arm)
    if colocated:
        arms.append(Arm(colocated=workers))
    if not arms:
        raise ConfigError("study.ratios", "names no arm, and colocated is off")
    return tuple(arms)


def all_ratios(workers: int) -> tuple[str, ...]:
    """Return every ratio of so many workers, that with one prefill worker first."""
    return tuple(f"{prefill}:{workers - prefill}" for prefill in range(1, workers))
