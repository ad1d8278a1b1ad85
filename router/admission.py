"""The waiting line as coroutines see it: wait for room with a deadline, and leave nothing behind.

Who gets room when is decided in ``waiting_line``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from router.waiting_line import MAX_MISSES, Turn, WaitingLine
from twinpool.core.clock import Clock

__all__ = ["MAX_MISSES", "Admission", "Closable", "Turn"]


class Closable(Protocol):
    """Room that was taken."""

    def close(self) -> None:
        """Give it back; a second call changes nothing."""
        ...


ClaimT = TypeVar("ClaimT", bound=Closable)


class Admission(Generic[ClaimT]):
    """Requests that wait for room.

    Args:
        max_queued: One more new request is refused at once.
        overtake_s: One that has waited longer is not passed over any more.
        clock: Read when a request begins to wait and when it is passed over.
    """

    def __init__(self, *, max_queued: int, overtake_s: float, clock: Clock) -> None:
        self._line: WaitingLine[ClaimT] = WaitingLine(
            max_queued=max_queued, overtake_s=overtake_s, clock=clock
        )

    @property
    def num_queued(self) -> int:
        """Requests that wait now."""
        return self._line.num_queued

    def arrive(self, tenant: str) -> Turn:
        """Return a place behind everybody who is there."""
        return self._line.arrive(tenant)

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
        if (claim := self._line.enter(turn, place)) is not None:
            return claim
        granted: asyncio.Future[ClaimT] = asyncio.get_running_loop().create_future()
        waiter = self._line.wait(turn, place, granted)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(granted)
        except BaseException:
            self._line.leave(waiter)
            if granted.done() and granted.exception() is None:
                granted.result().close()
            else:
                granted.cancel()
            raise

    def wake(self) -> None:
        """Offer room to the waiters, in fair order."""
        self._line.wake()
