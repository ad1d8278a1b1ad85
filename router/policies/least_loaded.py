"""The worker with the fewest tokens; equally loaded ones in turn.

A worker's load is the larger of what this router gave it and what the worker says it holds.  The
latter is a heartbeat old and counts in eighths of the pool, so that the trace of a request that
just ended does not break a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import Placement, RoutingPolicy, Snapshot, Turns, WorkerView, place
from twinpool.core.request import Request

STEPS = 8


class LeastLoaded:
    """Picks the least loaded worker."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: Request, snapshot: Snapshot) -> Placement | None:
        return place(request, snapshot, pick=self._pick)

    def _pick(self, workers: Sequence[WorkerView]) -> WorkerView:
        return self._turns.pick(workers, key=_load)


def create() -> RoutingPolicy:
    return LeastLoaded()


def _load(worker: WorkerView) -> float:
    """Return the used share of the worker's pool."""
    given = worker.in_flight_tokens / (worker.num_blocks * worker.block_tokens)
    held = (worker.num_blocks - worker.free_blocks) * STEPS // worker.num_blocks / STEPS
    return max(given, held)
