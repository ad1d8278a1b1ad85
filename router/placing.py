"""Room for one attempt: where the policy says, and away from the workers that failed this answer.

Takes no time and waits for nothing, so a simulator runs it too.
"""

from __future__ import annotations

from collections.abc import Callable

from router.claim import Claim
from router.policy import RoutingPolicy
from router.tries import Tries
from router.workers import WorkerHandle, WorkerPool
from twinpool.core.request import Request


class Placing:
    """Takes room on workers.

    Args:
        pool: The workers.
        policy: Chooses among them.
        on_freed: Called when the room of a claim went back.
    """

    def __init__(self, pool: WorkerPool, policy: RoutingPolicy, *, on_freed: Callable[[], None]) -> None:
        self._pool = pool
        self._policy = policy
        self._on_freed = on_freed

    def place(self, request: Request, tries: Tries) -> Claim | None:
        """Take room, or return None: the request should wait.

        After a failed transfer it may have been decided already which worker goes on, alone.
        """
        if (planned := tries.recomputation) is not None:
            worker = planned.worker
            if not worker.view(limit=0 if tries.is_full(worker) else worker.limit).has_room(request):
                return None
            return Claim(
                request, prefill=None, decode=worker, recomputes=planned.reason, on_freed=self._on_freed
            )
        for is_avoided in tries.avoidances():
            snapshot = self._pool.snapshot(is_avoided=is_avoided, is_full=tries.is_full)
            placement = self._policy.choose(request, snapshot)
            if placement is not None:
                return Claim(
                    request,
                    prefill=self._handle(placement.prefill),
                    decode=self._handle(placement.decode),
                    on_freed=self._on_freed,
                )
        return None

    def _handle(self, worker_id: str | None) -> WorkerHandle | None:
        return None if worker_id is None else self._pool.get(worker_id)
