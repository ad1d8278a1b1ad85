"""What a worker says of itself: the WorkerPort over an engine and the two services' books."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from twinpool.core.errors import WorkerDraining
from twinpool.core.ports import Role, WorkerAudit, WorkerLoad
from twinpool.engine.loop import EngineLoop


class WorkerService:
    """The WorkerPort of a worker.

    Args:
        loop: Asked for the engine's state.
        worker_id: Told in audits.
        role: Told in audits, until another is assigned.
        num_tickets: Tells how many reservations wait to be resumed.
        num_transfers: Tells how many transfers are not over, in both directions and on all ranks.
        counters: Tells totals beside the engine's own; read with each status.
    """

    def __init__(
        self,
        loop: EngineLoop,
        *,
        worker_id: str,
        role: Role,
        num_tickets: Callable[[], int],
        num_transfers: Callable[[], Awaitable[int]],
        counters: Callable[[], Mapping[str, int]],
    ) -> None:
        self._loop = loop
        self._worker_id = worker_id
        self._role = role
        self._num_tickets = num_tickets
        self._num_transfers = num_transfers
        self._counters = counters

    @property
    def role(self) -> Role:
        """What the router uses this worker for."""
        return self._role

    def load(self) -> WorkerLoad:
        """Return the state of this moment without waiting for the engine, as heartbeats need it."""
        load = self._loop.load()
        return replace(load, counters={**load.counters, **self._counters()})

    async def status(self) -> WorkerLoad:
        return self.load()

    async def drain(self, *, timeout_s: float) -> bool:
        self._loop.start_draining()
        return await self._loop.wait_idle(timeout_s=timeout_s)

    async def audit(self) -> WorkerAudit:
        books = await self._loop.audit()
        return WorkerAudit(
            worker_id=self._worker_id,
            role=self._role,
            blocks=books.blocks,
            tickets=self._num_tickets(),
            transfers=await self._num_transfers(),
            sequences=books.sequences,
        )

    async def clear_cache(self) -> int:
        return await self._loop.clear_cache()

    async def assign(self, role: Role) -> None:
        if self._loop.load().draining:
            raise WorkerDraining("this worker ends and takes no other role")
        self._role = role
