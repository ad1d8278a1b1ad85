"""The time for which a worker has one role, and the requests that run there under it.

A worker that is to have another role lets its requests end.  Those that take too long are told to go on
elsewhere: every wait on the tenure ends with ``Reassigned`` then, and the next attempt begins after the last
token.  The worker itself is well, so what it holds for them is released as always.
"""

from __future__ import annotations

from router.guard import Guard, Watched
from twinpool.core.errors import WorkerLost


class Reassigned(WorkerLost):
    """The worker gets another role, and what it ran goes on elsewhere; nobody failed."""

    def __init__(self, worker_id: str, tenure: Tenure) -> None:
        super().__init__(worker_id, "it gets another role")
        self.tenure = tenure


class Tenure:
    """Fails as its worker does, and when it is over; has books of its own.

    Args:
        worker_id: Whose tenure it is.
        worker: That worker.
    """

    def __init__(self, worker_id: str, worker: Watched) -> None:
        self._worker_id = worker_id
        self._worker = worker
        self._guards: set[Guard] = set()
        self._is_over = False
        self.num_moved = 0  # attempts that it ended
        self.in_flight = 0  # requests of this router that have not ended
        self.in_flight_tokens = 0

    def end(self) -> None:
        """Let everything that runs under it go on elsewhere."""
        self._is_over = True
        for guard in list(self._guards):
            guard.trip(Reassigned(self._worker_id, self))

    def take(self, *, num_tokens: int) -> None:
        """Write down that a request of ``num_tokens`` begins."""
        self.in_flight += 1
        self.in_flight_tokens += num_tokens

    def give_back(self, *, num_tokens: int) -> None:
        """Undo one ``take``; the caller does so exactly once."""
        assert self.in_flight >= 1 and self.in_flight_tokens >= num_tokens, "more was given back than taken"
        self.in_flight -= 1
        self.in_flight_tokens -= num_tokens

    def watch(self, guard: Guard) -> None:
        """Trip ``guard`` when the worker is lost or frozen, or this is over.

        Raises:
            WorkerLost: It is so already.
        """
        if self._is_over:
            raise Reassigned(self._worker_id, self)
        self._worker.watch(guard)
        self._guards.add(guard)

    def unwatch(self, guard: Guard) -> None:
        self._guards.discard(guard)
        self._worker.unwatch(guard)
