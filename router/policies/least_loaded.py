"""The worker with the fewest tokens; equally loaded ones in turn.

A worker's load is the larger of what this router gave it and what the worker says it holds.  The
latter is a heartbeat old and counts in eighths of the pool, so that the trace of a request that
just ended does not break a tie.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import Placement, RoutingPolicy, Snapshot, WorkerView, place
from twinpool.core.request import Request

STEPS = 8


class LeastLoaded:
    """Picks the least loaded worker."""

    def __init__(self) -> None:
        self._picks = 0
        self._picked: dict[str, int] = {}  # worker id -> number of its last pick

    def choose(self, request: Request, snapshot: Snapshot) -> Placement | None:
        return place(request, snapshot, pick=self._pick)

    def _pick(self, workers: Sequence[WorkerView]) -> WorkerView:
        chosen = min(workers, key=self._rank)
        self._picks += 1
        self._picked[chosen.worker_id] = self._picks
        return chosen

    def _rank(self, worker: WorkerView) -> tuple[float, int]:
        return (_load(worker), self._picked.get(worker.worker_id, 0))


def create() -> RoutingPolicy:
    return LeastLoaded()


def _load(worker: WorkerView) -> float:
    """Return the used share of the worker's pool."""
    given = worker.in_flight_tokens / (worker.num_blocks * worker.block_tokens)
    held = (worker.num_blocks - worker.free_blocks) * STEPS // worker.num_blocks / STEPS
    return max(given, held)
