"""Each worker in turn, whatever its load; one without room is passed over."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy import Placement, RoutingPolicy, Snapshot, Turns, WorkerView, place
from twinpool.core.request import Request


class RoundRobin:
    """Picks the worker that was picked longest ago."""

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: Request, snapshot: Snapshot) -> Placement | None:
        return place(request, snapshot, pick=self._pick)

    def _pick(self, workers: Sequence[WorkerView]) -> WorkerView:
        return self._turns.pick(workers, key=lambda _: 0.0)


def create() -> RoutingPolicy:
    return RoundRobin()
