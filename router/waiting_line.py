"""Who waits for room, in which order: bounded, fair between tenants, and free of asyncio.

Knows nothing of workers.  A request brings ``place``, which takes room at once or says None; the line calls
it in fair order whenever something changed, and tells the request's ``Answer`` what came of it.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, Protocol, TypeVar

from twinpool.core.clock import Clock
from twinpool.core.errors import QueueFull, ServingError

MAX_MISSES = 16  # so many waiters may be passed over before a look at the line ends

RoomT = TypeVar("RoomT")
RoomT_contra = TypeVar("RoomT_contra", contravariant=True)


class Answer(Protocol[RoomT_contra]):
    """What a waiter is told once; an ``asyncio.Future`` is one."""

    def done(self) -> bool:
        """Whether it was told, or does not want to know any more."""
        ...

    def set_result(self, result: RoomT_contra, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request's place in the line; a request that comes back after a failure keeps it."""

    tenant: str
    number: int  # order of arrival
    was_admitted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Waiter(Generic[RoomT]):
    """One request in the line."""

    turn: Turn
    place: Callable[[], RoomT | None]
    answer: Answer[RoomT]
    since_s: float


class WaitingLine(Generic[RoomT]):
    """Requests that wait for room.

    Args:
        max_queued: One more new request is refused at once.
        overtake_s: One that has waited longer is not passed over any more.
        clock: Read when a request begins to wait and when it is passed over.
    """

    def __init__(self, *, max_queued: int, overtake_s: float, clock: Clock) -> None:
        self._max_queued = max_queued
        self._overtake_s = overtake_s
        self._clock = clock
        self._lines: OrderedDict[str, list[Waiter[RoomT]]] = OrderedDict()  # tenants, next one first
        self._num_arrived = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._lines.values()))

    def arrive(self, tenant: str) -> Turn:
        """Return a place behind everybody who is there."""
        self._num_arrived += 1
        return Turn(tenant=tenant, number=self._num_arrived)

    def enter(self, turn: Turn, place: Callable[[], RoomT | None]) -> RoomT | None:
        """Take room at once if nobody waits and there is some.

        Raises:
            ServingError: Raised by ``place``.
        """
        if self._lines or (room := place()) is None:
            return None
        turn.was_admitted = True
        return room

    def wait(self, turn: Turn, place: Callable[[], RoomT | None], answer: Answer[RoomT]) -> Waiter[RoomT]:
        """Wait for room; ``answer`` may be told before this returns.

        Raises:
            QueueFull: The line is at its limit, and the request is not one that comes back.
        """
        if not turn.was_admitted and self.num_queued >= self._max_queued:
            raise QueueFull(f"{self.num_queued} requests wait already")
        waiter = Waiter(turn, place, answer, self._clock.now_s())
        insort(self._lines.setdefault(turn.tenant, []), waiter, key=lambda each: each.turn.number)
        self.wake()
        return waiter

    def leave(self, waiter: Waiter[RoomT]) -> None:
        """Wait no longer.  Idempotent."""
        line = self._lines.get(waiter.turn.tenant)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._lines[waiter.turn.tenant]

    def wake(self) -> None:
        """Offer room to the waiters: one of each tenant in turn, in order of arrival within a tenant.

        One that finds none is passed over by those behind it, so that a small request does not
        wait for the room of a large one; but not for longer than ``overtake_s``.
        """
        if not self._lines:
            return
        misses = 0
        for waiter in self._in_fair_order():
            if waiter.answer.done():
                continue
            try:
                room = waiter.place()
            except ServingError as error:
                self.leave(waiter)
                waiter.answer.set_exception(error)
                continue
            if room is not None:
                self.leave(waiter)
                if waiter.turn.tenant in self._lines:
                    self._lines.move_to_end(waiter.turn.tenant)
                waiter.turn.was_admitted = True
                waiter.answer.set_result(room)
                continue
            misses += 1
            if misses == MAX_MISSES or self._clock.now_s() - waiter.since_s > self._overtake_s:
                return

    def _in_fair_order(self) -> Iterator[Waiter[RoomT]]:
        """Yield the first waiter of each tenant, then the second of each, and so on, as they wait now.

        Who looks at a few only pays for these, and for copies: the lines change while they are gone through.
        """
        for abreast in zip_longest(*map(tuple, self._lines.values())):
            for waiter in abreast:
                if waiter is not None:
                    yield waiter
