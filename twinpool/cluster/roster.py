"""Which workers a deployment wants, by name: what it starts, and what each is to be.

A worker is made for one pool, which decides its ranks, its room and its dtype and stays what it is.  Its role
is that pool's at first and may change while it runs.  Who came to a role last leaves it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from twinpool.core.ports import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker that is wanted."""

    worker_id: str  # its pool and a number, as in prefill-0
    pool: Role
    role: Role
    changed_generation: int = 0  # of the life that took its role while it ran; 0: none did


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """All workers that are wanted, as processes tell each other."""

    workers: tuple[Member, ...] = ()


class Roster:
    """The workers of one deployment, in the order in which they came to their roles.

    Args:
        workers: How many of each role there are at first.
    """

    def __init__(self, workers: Mapping[Role, int]) -> None:
        self._members: dict[str, Member] = {}
        self._retired: set[str] = set()  # ids that are not given again
        for role, count in workers.items():
            self.scale(role, count)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members.values())

    def count(self, role: Role) -> int:
        """Return how many workers have a role."""
        return len(self._of(role))

    def scale(self, role: Role, count: int) -> None:
        """Want ``count`` workers of ``role``; new ones are of its pool, by the lowest free numbers."""
        assert count >= 0, f"{count} workers"
        for member in self._of(role)[count:]:
            del self._members[member.worker_id]
            if member.role is not member.pool:  # the life that drains must not be taken for a new worker's
                self._retired.add(member.worker_id)
        number = 0
        while self.count(role) < count:
            if (worker_id := f"{role}-{number}") not in self._members.keys() | self._retired:
                self._members[worker_id] = Member(worker_id=worker_id, pool=role, role=role)
            number += 1

    def assign(self, worker_id: str, role: Role, *, generation: int) -> None:
        """Write down that a life of a worker took another role; one that is not wanted is left alone."""
        member = self._members.pop(worker_id, None)
        if member is not None:
            self._members[worker_id] = replace(member, role=role, changed_generation=generation)

    def _of(self, role: Role) -> list[Member]:
        return [member for member in self._members.values() if member.role is role]
