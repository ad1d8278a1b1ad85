"""Each worker in turn, whatever its load; one without room is passed over."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import Placement, RoutingPolicy, Snapshot, WorkerView, place
from twinpool.core.request import Request


class RoundRobin:
    """Picks the worker that was picked longest ago."""

    def __init__(self) -> None:
        self._picks = 0
        self._picked: dict[str, int] = {}  # worker id -> number of its last pick

    def choose(self, request: Request, snapshot: Snapshot) -> Placement | None:
        return place(request, snapshot, pick=self._pick)

    def _pick(self, workers: Sequence[WorkerView]) -> WorkerView:
        chosen = min(workers, key=lambda worker: self._picked.get(worker.worker_id, 0))
        self._picks += 1
        self._picked[chosen.worker_id] = self._picks
        return chosen


def create() -> RoutingPolicy:
    return RoundRobin()
