"""Which workers fit on which machines of a cluster, and what to say of those that do not.

Knows resources as numbers; Ray's placement groups make the real choice of machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_WORDS = {"CPU": "CPUs", "GPU": "GPUs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one worker needs, by Ray's resource names."""

    worker_id: str
    resources: Mapping[str, float]


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
    rooms = [dict(machine.available) for machine in machines]
    fitting, reasons = [], {}
    for need in needs:
        room = next((room for room in rooms if _missing(need, room) is None), None)
        if room is None:
            reasons[need.worker_id] = _reason(need, machines)
            continue
        for name, amount in need.resources.items():
            room[name] = room.get(name, 0.0) - amount
        fitting.append(need)
    return tuple(fitting), reasons


def _missing(need: Need, room: Mapping[str, float]) -> str | None:
    for name, amount in need.resources.items():
        if amount > room.get(name, 0.0) + 1e-9:
            return name
    return None


def _reason(need: Need, machines: Sequence[Machine]) -> str:
    if not machines:
        return f"{need.worker_id} cannot be placed: the cluster has no machine"
    for name, amount in need.resources.items():
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
    wanted = ", ".join(f"{amount:g} {_WORDS.get(name, name)}" for name, amount in need.resources.items())
    return f"{need.worker_id} needs {wanted} on one machine, no machine has all of them free"
