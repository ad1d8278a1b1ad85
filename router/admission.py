"""The waiting line: bounded, fair between tenants, and empty of whoever no longer waits.

Knows nothing of workers.  A request brings ``place``, which takes room at once or says None; the
line calls it in fair order whenever something changed.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from twinpool.core.clock import Clock
from twinpool.core.errors import QueueFull, ServingError

MAX_MISSES = 16  # so many waiters may be passed over before a look at the line ends


class Closable(Protocol):
    """Room that was taken."""

    def close(self) -> None:
        """Give it back; a second call changes nothing."""
        ...


ClaimT = TypeVar("ClaimT", bound=Closable)


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request's place in the line; a request that comes back after a failure keeps it."""

    tenant: str
    number: int  # order of arrival
    was_admitted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter(Generic[ClaimT]):
    turn: Turn
    place: Callable[[], ClaimT | None]
    granted: asyncio.Future[ClaimT]
    since_s: float


class Admission(Generic[ClaimT]):
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
        self._lines: OrderedDict[str, list[_Waiter[ClaimT]]] = OrderedDict()  # tenants, next one first
        self._num_arrived = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait now."""
        return sum(len(line) for line in self._lines.values())

    def arrive(self, tenant: str) -> Turn:
        """Return a place behind everybody who is there."""
        self._num_arrived += 1
        return Turn(tenant=tenant, number=self._num_arrived)

    async def enter(self, turn: Turn, place: Callable[[], ClaimT | None], *, timeout_s: float) -> ClaimT:
        """Wait until ``place`` finds room and return what it took.

        Cancelled or too late, the request leaves nothing behind, also when room was found for it
        in the same moment.

        Raises:
            QueueFull: The line is at its limit, and the request is not one that comes back.
            TimeoutError: There was no room in time.
            ServingError: Raised by ``place``.
        """
        if timeout_s <= 0.0:
            raise TimeoutError
        if not self._lines and (claim := place()) is not None:
            turn.was_admitted = True
            return claim
        if not turn.was_admitted and self.num_queued >= self._max_queued:
            raise QueueFull(f"{self.num_queued} requests wait already")
        granted: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(turn, place, granted, self._clock.now_s())
        insort(self._lines.setdefault(turn.tenant, []), waiter, key=lambda each: each.turn.number)
        self.wake()
        try:
            async with asyncio.timeout(timeout_s):
                claim = await asyncio.shield(granted)
        except BaseException:
            self._remove(waiter)
            if granted.done() and granted.exception() is None:
                granted.result().close()
            else:
                granted.cancel()
            raise
        turn.was_admitted = True
        return claim

    def wake(self) -> None:
        """Offer room to the waiters: one of each tenant in turn, in order of arrival within a tenant.

        One that finds none is passed over by those behind it, so that a small request does not
        wait for the room of a large one; but not for longer than ``overtake_s``.
        """
        misses = 0
        for waiter in list(self._in_fair_order()):
            if waiter.granted.done():
                continue
            try:
                claim = waiter.place()
            except ServingError as error:
                self._remove(waiter)
                waiter.granted.set_exception(error)
                continue
            if claim is not None:
                self._remove(waiter)
                if waiter.turn.tenant in self._lines:
                    self._lines.move_to_end(waiter.turn.tenant)
                waiter.granted.set_result(claim)
                continue
            misses += 1
            if misses == MAX_MISSES or self._clock.now_s() - waiter.since_s > self._overtake_s:
                return

    def _in_fair_order(self) -> Iterator[_Waiter[ClaimT]]:
        """Yield the first waiter of each tenant, then the second of each, and so on."""
        longest = max(map(len, self._lines.values()), default=0)
        for i in range(longest):
            for line in self._lines.values():
                if i < len(line):
                    yield line[i]

    def _remove(self, waiter: _Waiter[ClaimT]) -> None:
        line = self._lines.get(waiter.turn.tenant)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._lines[waiter.turn.tenant]
