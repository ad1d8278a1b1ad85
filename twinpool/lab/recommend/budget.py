"""What there is to spend, and every layout that spends it: none has room for one more of its workers."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.recommend.config import RecommendConfig, WorkerKind
from twinpool.lab.recommend.layout import Group, Layout, short_labels
from twinpool.lab.simulate.config import MOST_WORKERS

_ROUNDING = 1e-9  # of sums of prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """GPUs, money and power; 0 does not count."""

    gpus: int = 0
    cost: float = 0.0
    watts: float = 0.0

    def holds(self, groups: Sequence[Group]) -> bool:
        """Say whether so many workers can be had."""
        layout = Layout(groups=tuple(groups))
        return (
            (not self.gpus or layout.gpus <= self.gpus)
            and (not self.cost or layout.cost <= self.cost * (1.0 + _ROUNDING))
            and (not self.watts or layout.watts <= self.watts * (1.0 + _ROUNDING))
        )

    def filled(self, groups: Sequence[Group]) -> Layout | None:
        """Return the groups with as many workers in the last one as can be had; None if not one can.

        Also None if there is still room for a worker of another group: another layout has it.

        Raises:
            ConfigError: More can be had than a simulation takes.
        """
        *others, last = groups
        number = bisect_left(
            range(MOST_WORKERS + 1),
            True,
            key=lambda number: not self.holds([*others, replace(last, workers=number + 1)]),
        )
        if number > MOST_WORKERS:
            raise ConfigError(
                "recommend", f"more than {MOST_WORKERS:,} workers can be had, too many to simulate"
            )
        if not number:
            return None
        whole = [*others, replace(last, workers=number)]
        for place, group in enumerate(others):
            if self.holds([*whole[:place], replace(group, workers=group.workers + 1), *whole[place + 1 :]]):
                return None
        return Layout(groups=tuple(whole))


def list_layouts(config: RecommendConfig, ranks: Sequence[int]) -> Iterator[Layout]:
    """Yield every layout of ``config``: colocated ones, then two pools, then three.

    Args:
        ranks: Of a worker of each of ``config.kinds``.
    """
    budget = Budget(gpus=config.gpus, cost=config.budget, watts=config.watts)
    labels = short_labels([kind.profile for kind in config.kinds])
    kinds = list(zip(config.kinds, ranks, labels, strict=True))
    shapes = [(Role.COLOCATED,), (Role.PREFILL, Role.DECODE)]
    if config.has_mixed:
        shapes.append((Role.PREFILL, Role.DECODE, Role.COLOCATED))
    for roles in shapes:
        for chosen in itertools.product(kinds, repeat=len(roles)):
            yield from _ratios(budget, [_one(role, *kind) for role, kind in zip(roles, chosen, strict=True)])


def _one(role: Role, kind: WorkerKind, ranks: int, label: str) -> Group:
    return Group(role=role, workers=1, kind=kind, ranks=ranks, label=label)


def _ratios(budget: Budget, groups: list[Group], first: int = 0) -> Iterator[Layout]:
    """Yield each way to share the budget among the groups; those before ``first`` are as they are to be."""
    if first == len(groups) - 1:
        layout = budget.filled(groups)
        if layout is not None:
            yield layout
        return
    number = 1
    while budget.holds(
        with_number := [*groups[:first], replace(groups[first], workers=number), *groups[first + 1 :]]
    ):
        yield from _ratios(budget, with_number, first + 1)
        number += 1
