"""Room that one attempt holds on its workers, in this router's books and, once reserved, in blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from router.tenure import Tenure
from router.workers import WorkerHandle
from twinpool.core.ports import Role
from twinpool.core.request import Request
from twinpool.core.ticket import KVTicket


class Claim:
    """What one attempt holds; all of it goes back exactly once.

    Args:
        request: The attempt's request.
        prefill: Who computes the prompt; None if ``decode`` does.
        decode: Who generates; None if the first token is the whole answer.
        recomputes: The class of the error whose failed transfer this attempt does without; "" in any other.
        on_freed: Called after room went back.
    """

    def __init__(
        self,
        request: Request,
        *,
        prefill: WorkerHandle | None,
        decode: WorkerHandle | None,
        recomputes: str = "",
        on_freed: Callable[[], None],
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.recomputes = recomputes
        # Set when a ticket is asked for.  A task of its own: if the attempt is cancelled between
        # the worker's answer and its arrival here, the ticket is still known and released.
        self.reserving: asyncio.Future[KVTicket] | None = None
        self.ticket: KVTicket | None = None  # room that was given, by a ticket that is right
        self.reserved_s = 0.0  # on the request's timeline
        self.asked: tuple[WorkerHandle, ...] = ()  # who is to blame if the current wait fails
        self.has_answered = False  # a token came: whatever ends the attempt now is a failure, no refusal
        # A worker may have another role before this attempt is over.
        self._is_colocated = decode is not None and decode.info.role is Role.COLOCATED
        self._num_tokens = request.num_tokens + 1
        self._on_freed = on_freed
        self._tenures = {
            handle: handle.take(num_tokens=self._num_tokens)
            for handle in (prefill, decode)
            if handle is not None
        }
        self._holding = list(self._tenures)

    @property
    def path(self) -> str:
        """How the attempt runs, as clients and timelines spell it."""
        if self.prefill is not None:
            return "disaggregated"
        assert self.decode is not None, "a claim without a worker"
        return "colocated" if self._is_colocated else "local"

    def under(self, handle: WorkerHandle) -> Tenure:
        """Return what a wait on one of its workers is to watch."""
        return self._tenures[handle]

    def end_prefill(self) -> None:
        """Give back the room on the prefill worker: the prompt is computed."""
        if self.prefill in self._holding:
            self._holding.remove(self.prefill)
            self._give_back(self.prefill)
            self._on_freed()

    def close(self) -> None:
        """Give back what is left."""
        if self._holding:
            holding, self._holding = self._holding, []
            for handle in holding:
                self._give_back(handle)
            self._on_freed()

    def _give_back(self, handle: WorkerHandle) -> None:
        handle.give_back(self._tenures[handle], num_tokens=self._num_tokens)
