"""A layout that is looked at: which workers stand in which pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from twinpool.core.ports import Role
from twinpool.lab.recommend.config import WorkerKind
from twinpool.lab.simulate.config import ROLE_LETTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal workers of one role.

    Attributes:
        ranks: Of each worker, one GPU each.
        label: Tells the kind from others; empty if there is one kind only.
    """

    role: Role
    workers: int
    kind: WorkerKind
    ranks: int
    label: str = ""

    @property
    def gpus(self) -> int:
        return self.workers * self.ranks

    @property
    def name(self) -> str:
        return f"{self.workers}{ROLE_LETTERS[self.role]}" + (f"({self.label})" if self.label else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Groups of different roles: one colocated, a prefill and a decode pool, or all three."""

    groups: tuple[Group, ...]

    @property
    def name(self) -> str:
        """As in ``2P2D``, or ``2P(tp4)+1D(tp8)``."""
        joint = "+" if any(group.label for group in self.groups) else ""
        return joint.join(group.name for group in self.groups)

    @property
    def is_colocated(self) -> bool:
        return len(self.groups) == 1

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    @property
    def cost(self) -> float:
        return sum(group.gpus * group.kind.cost for group in self.groups)

    @property
    def watts(self) -> float:
        return sum(group.gpus * group.kind.watts for group in self.groups)


def short_labels(profiles: Sequence[str]) -> list[str]:
    """Return of each name the parts that not all have, as in ``h100-tp4``; of a single name nothing."""
    if len(profiles) == 1:
        return [""]
    stems = [PurePath(name).stem if name.endswith((".yaml", ".yml")) else name for name in profiles]
    parts = [stem.split("-") for stem in stems]
    common = set(parts[0]).intersection(*parts[1:])
    labels = ["-".join(part for part in own if part not in common) or "tp1" for own in parts]
    return labels if len(set(labels)) == len(labels) else list(profiles)
