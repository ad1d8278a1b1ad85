"""Which workers fit on which machines of a cluster, and what to say of those that do not.

Knows resources as numbers; Ray's placement groups make the real choice of machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_WORDS = {"CPU": "CPUs", "GPU": "GPUs"}
Room: TypeAlias = "Mapping[str, float]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one worker needs, by Ray's resource names."""

    worker_id: str
    resources: Mapping[str, float]  # of each rank
    num_ranks: int = 1
    on_one_machine: bool = True  # all ranks

    @property
    def parts(self) -> tuple[Mapping[str, float], ...]:
        """What must be on one machine each."""
        if not self.on_one_machine:
            return (self.resources,) * self.num_ranks
        return ({name: amount * self.num_ranks for name, amount in self.resources.items()},)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine of the cluster."""

    total: Mapping[str, float]
    available: Mapping[str, float]


def place(needs: Sequence[Need], machines: Sequence[Machine]) -> tuple[tuple[Need, ...], dict[str, str]]:
    """Split ``needs`` into those that fit now, first come first served, and the reasons of the others.

    Each worker goes on the first machine with room, so a cluster may hold one more with a cleverer
    choice; who does not fit is asked again at the next call.

    Returns:
        The needs that fit together, and why each other one does not, by worker id.
    """
    rooms: Sequence[Room] = [machine.available for machine in machines]
    fitting, reasons = [], {}
    for need in needs:
        left = _without(need.parts, rooms)
        if left is None:
            reasons[need.worker_id] = _reason(need, machines)
        else:
            rooms = left
            fitting.append(need)
    return tuple(fitting), reasons


def _without(parts: Sequence[Room], rooms: Sequence[Room]) -> Sequence[Room] | None:
    """Return what is left of ``rooms`` once each part took the first that holds it; None if none does."""
    left = list(rooms)
    for part in parts:
        index = next((index for index, room in enumerate(left) if _fits(part, room)), None)
        if index is None:
            return None
        room = left[index]
        left[index] = dict(room) | {name: room.get(name, 0.0) - amount for name, amount in part.items()}
    return left


def _fits(part: Room, room: Room) -> bool:
    return all(amount <= room.get(name, 0.0) + 1e-9 for name, amount in part.items())


def _reason(need: Need, machines: Sequence[Machine]) -> str:
    if not machines:
        return f"{need.worker_id} cannot be placed: the cluster has no machine"
    part = need.parts[0]
    if len(need.parts) > 1 and any(_fits(part, machine.available) for machine in machines):
        return f"{need.worker_id} needs {need.num_ranks} x {_spelled(part)}, there is room for fewer"
    for name, amount in part.items():
        word = _WORDS.get(name, name)
        in_cluster = sum(machine.total.get(name, 0.0) for machine in machines)
        largest = max(machine.total.get(name, 0.0) for machine in machines)
        free = sum(machine.available.get(name, 0.0) for machine in machines)
        if amount > in_cluster:
            return f"{need.worker_id} needs {amount:g} {word}, the cluster has {in_cluster:g}"
        if amount > largest:
            return f"{need.worker_id} needs {amount:g} {word} on one machine, the largest has {largest:g}"
        if all(amount > machine.available.get(name, 0.0) + 1e-9 for machine in machines):
            return (
                f"{need.worker_id} needs {amount:g} {word}, {free:g} of the cluster's {in_cluster:g} are free"
            )
    return f"{need.worker_id} needs {_spelled(part)} on one machine, no machine has all of them free"


def _spelled(part: Room) -> str:
    return ", ".join(f"{amount:g} {_WORDS.get(name, name)}" for name, amount in part.items())
