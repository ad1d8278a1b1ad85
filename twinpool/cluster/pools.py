"""Keeps the running workers equal to the wanted ones: who to start, who to stop, who waits and why.

    wanted, no life   -> start it, unless it waits: after failures (backoff) or for room on a machine
    life, not wanted  -> stop it: it drains
    life, other role  -> leave it, if it took the role while it ran; stop it, if it never heard of it
    life ended        -> forget the life; the next one has a larger generation
                         one that drained, whoever asked it to, has not failed

Knows no Ray, no process and no clock of its own; ``Machines`` starts and stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from twinpool.cluster.roster import Member
from twinpool.core.clock import Clock
from twinpool.core.ports import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One run of one worker, from its start to its end."""

    worker_id: str  # pool and number, as in prefill-0
    pool: Role  # which it was made for: its ranks, its room
    role: Role  # at its start
    generation: int  # larger than that of every earlier life of any worker


class Phase(StrEnum):
    """Where a life is."""

    STARTING = "starting"
    RUNNING = "running"  # the router took it
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeState:
    """What is known of a life."""

    phase: Phase = Phase.STARTING
    detail: str = ""  # what it does while it starts; why it ended
    is_drained: bool = False  # it had joined, and ended as one that was asked to, by whomever
    pid: int | None = None
    host: str = ""
    meeting: str = ""  # where the other ranks of the worker are to come, once it waits for them


class Machines(Protocol):
    """Where workers run.  No call waits for a worker."""

    def start(self, lives: Sequence[Life]) -> Mapping[str, str]:
        """Start what there is room for; return why the others cannot start, by worker id."""
        ...

    def stop(self, life: Life) -> None:
        """Let it drain and end, by force if it takes too long.  Idempotent."""
        ...

    def state(self, life: Life) -> LifeState:
        """Tell where a life is; one that ended stays ``ENDED``."""
        ...

    def forget(self, worker_id: str) -> None:
        """Take note that a worker has ended and is not wanted any more: its room may go to others."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long a worker that keeps failing waits for its next start."""

    first_s: float = 1.0  # after the second failure in a row; the first restart is at once
    max_s: float = 30.0
    healthy_s: float = 60.0  # a life that ran for so long ends the row of failures

    def delay_s(self, num_failures: int) -> float:
        """Return the wait after ``num_failures`` failures in a row."""
        if num_failures <= 1:
            return 0.0
        return float(min(self.max_s, self.first_s * 2.0 ** min(num_failures - 2, 30)))


_BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """One worker as `twinpool status` shows it."""

    worker_id: str
    role: Role
    state: str  # starting, running, stopping, waiting
    generation: int | None  # of the life that runs
    detail: str  # why it waits, or what it does
    num_failures: int  # lives that ended otherwise than by draining since the deployment started
    last_failure: str = ""  # why the latest of them ended
    pid: int | None = None
    host: str = ""


class Pools:
    """The wanted workers of one deployment and the lives that serve them.

    Args:
        wanted: The workers.
        machines: Starts and stops them.
        clock: For backoff.
        first_generation: Larger than any generation an earlier controller gave.
        start_timeout_s: A life that does not reach the router in time is stopped and counts as failed.
        backoff: How failing workers wait.
    """

    def __init__(
        self,
        wanted: Sequence[Member],
        machines: Machines,
        clock: Clock,
        *,
        first_generation: int,
        start_timeout_s: float,
        backoff: Backoff = _BACKOFF,
    ) -> None:
        self._wanted = {member.worker_id: member for member in wanted}
        self._machines = machines
        self._clock = clock
        self._next_generation = first_generation
        self._backoff = backoff
        self._start_timeout_s = start_timeout_s
        self._slots: dict[str, _Slot] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is wanted and nothing runs."""
        return not self._slots and not self._wanted

    def want(self, members: Sequence[Member]) -> None:
        """Want these workers from the next tick on; others drain."""
        self._wanted = {member.worker_id: member for member in members}

    def replace(self, worker_id: str) -> None:
        """Drain a worker and start its next life when it ended; an unknown one is left alone."""
        slot = self._slots.get(worker_id)
        if slot is not None and slot.life is not None:
            self._stop(slot)

    def tick(self) -> None:
        """Do what is due; call it about twice a second."""
        now_s = self._clock.now_s()
        for slot in self._slots.values():
            self._look_at(slot, now_s)
        for worker_id, slot in list(self._slots.items()):
            member = self._wanted.get(worker_id)
            if member is not None:
                slot.member = member
            if slot.life is None and member is None:
                del self._slots[worker_id]
                self._machines.forget(worker_id)
            elif slot.life is not None and (member is None or _is_outdated(slot.life, member)):
                self._stop(slot)
        for worker_id, member in self._wanted.items():
            self._slots.setdefault(worker_id, _Slot(member))
        self._start([slot for slot in self._slots.values() if slot.may_start(now_s)], now_s)

    def report(self) -> tuple[WorkerReport, ...]:
        """Return every wanted or still running worker, in the order in which they were first wanted."""
        return tuple(self._report(slot) for slot in self._slots.values())

    def _look_at(self, slot: _Slot, now_s: float) -> None:
        if slot.life is None:
            return
        state = self._machines.state(slot.life)
        if state.phase is Phase.ENDED:
            self._ended(slot, state, now_s)
        elif state.phase is Phase.RUNNING and slot.running_since_s is None:
            slot.running_since_s = now_s
        elif state.phase is Phase.STARTING and now_s - slot.started_s > self._start_timeout_s:
            slot.late = True
            self._machines.stop(slot.life)

    def _ended(self, slot: _Slot, state: LifeState, now_s: float) -> None:
        joined_s = slot.running_since_s
        if joined_s is not None and now_s - joined_s >= self._backoff.healthy_s:
            slot.failures_in_row = 0
        if slot.late or not (slot.stopping or state.is_drained):
            slot.failures_in_row += 1
            slot.num_failures += 1
            slot.not_before_s = now_s + self._backoff.delay_s(slot.failures_in_row)
            late = f"did not join the router within {self._start_timeout_s:g} s; " if slot.late else ""
            slot.detail = slot.last_failure = late + state.detail
        slot.life, slot.running_since_s, slot.stopping, slot.late = None, None, False, False

    def _stop(self, slot: _Slot) -> None:
        assert slot.life is not None
        slot.stopping = True
        self._machines.stop(slot.life)

    def _start(self, slots: Sequence[_Slot], now_s: float) -> None:
        lives = []
        for slot in slots:
            lives.append(
                Life(
                    worker_id=slot.member.worker_id,
                    pool=slot.member.pool,
                    role=slot.member.role,
                    generation=self._next_generation,
                )
            )
            self._next_generation += 1
        why_not = self._machines.start(lives) if lives else {}
        for slot, life in zip(slots, lives, strict=True):
            if life.worker_id in why_not:
                slot.detail = why_not[life.worker_id]
            else:
                slot.life, slot.started_s = life, now_s

    def _report(self, slot: _Slot) -> WorkerReport:
        life = slot.life
        state = LifeState(detail=slot.detail) if life is None else self._machines.state(life)
        phase = "stopping" if slot.stopping else state.phase.value
        return WorkerReport(
            worker_id=slot.member.worker_id,
            role=slot.member.role,
            state="waiting" if life is None else phase,
            generation=None if life is None else life.generation,
            detail=state.detail,
            num_failures=slot.num_failures,
            last_failure=slot.last_failure,
            pid=state.pid,
            host=state.host,
        )


def _is_outdated(life: Life, member: Member) -> bool:
    """Whether a life was started in a role that the worker had given up by then, so that nobody told it."""
    return life.role is not member.role and life.generation > member.changed_generation


@dataclass(slots=True)
class _Slot:
    member: Member  # as it was last wanted
    life: Life | None = None
    started_s: float = 0.0
    running_since_s: float | None = None
    stopping: bool = False  # we asked it to end
    late: bool = False  # we asked because it never reached the router
    not_before_s: float = 0.0
    failures_in_row: int = 0
    num_failures: int = 0
    detail: str = ""
    last_failure: str = ""

    def may_start(self, now_s: float) -> bool:
        return self.life is None and now_s >= self.not_before_s
