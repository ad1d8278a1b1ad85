"""A worker gets another role while it runs: it takes nothing new, empties, and begins anew.

    begin    the worker gets no new request
    empty    what runs ends within the order's time, or goes on elsewhere, from the last token on;
             then the worker's own books must be empty too
    clear    its prefix cache, if asked
    assign   the worker is told, so that it joins as what it is if it joins again; from here on it is that

Whatever fails before the last step leaves the worker in its old role.  One change runs at a time: two that
were each harmless could together leave nobody to decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from router.config import RouterConfig
from router.guard import Guard
from router.metrics import RouterMetrics
from router.tenure import Tenure
from router.workers import WorkerHandle, WorkerPool, WorkerState
from twinpool.core.clock import Clock
from twinpool.core.errors import DeadlineExceeded, InvalidRequest, ServingError, Unavailable, WorkerLost
from twinpool.core.ports import Role, WorkerAudit
from twinpool.core.tasks import OwnedTasks

_LOOK_EVERY_S = 0.05  # at a worker that empties

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrder:
    """What an operator wants of a worker."""

    worker_id: str
    role: Role
    timeout_s: float = 30.0  # for what runs to end by itself; then it goes on elsewhere
    clear_cache: bool = False
    is_forced: bool = False  # also if nobody could answer meanwhile or afterwards


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """What came of it."""

    worker_id: str
    generation: int  # of the life that took the role
    was: Role
    role: Role
    num_moved: int  # requests that went on elsewhere
    freed_blocks: int | None  # of the prefix cache; None: it was not to be cleared
    took_s: float


OnChanged = Callable[[RoleChange], Awaitable[None]]


def roles_of_others(pool: WorkerPool, handle: WorkerHandle) -> Collection[Role]:
    """Return the roles of everybody else who is ready."""
    return {
        other.info.role for other in pool.handles if other is not handle and other.state is WorkerState.READY
    }


def check_change(pool: WorkerPool, handle: WorkerHandle, role: Role) -> None:
    """Refuse what would leave nobody to answer.

    Raises:
        InvalidRequest: It would.
    """
    others = roles_of_others(pool, handle)
    then, name = {*others, role}, handle.worker_id
    if not then & {Role.DECODE, Role.COLOCATED}:
        raise InvalidRequest("worker", f"{name} as {role} would leave no decode worker")
    if not pool.can_answer_with(then):
        raise InvalidRequest("worker", f"{name} as {role} would leave no prefill worker")
    if pool.can_answer and not pool.can_answer_with(others):
        raise InvalidRequest("worker", f"while {name} changes its role nobody could answer")


class RoleChanger:
    """Changes the roles of the workers of a pool, one after the other.

    Args:
        pool: The workers.
        config: Limits.
        clock: Tells how long a change took.
        metrics: Count what came of each change.
    """

    def __init__(
        self, pool: WorkerPool, *, config: RouterConfig, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._pool = pool
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._turn = asyncio.Lock()
        self._tasks = OwnedTasks()

    async def change(self, order: RoleOrder, *, on_changed: OnChanged) -> RoleChange:
        """Give a worker another role; a caller that leaves does not stop it.

        A worker that has the role already is left alone, but for its cache.

        Args:
            order: What is wanted.
            on_changed: Called as soon as the worker has its new role, before the next change begins.

        Raises:
            InvalidRequest: There is no such worker, or nobody could answer without it.
            Unavailable: The worker is not ready, did not become empty, or was lost on the way; it has its
                old role, as its next life will.
        """
        outcome = await self._tasks.finish(self._in_turn(order, on_changed))
        if isinstance(outcome, ServingError):
            raise outcome
        return outcome

    async def close(self) -> None:
        """End what is under way; the worker keeps its old role."""
        await self._tasks.close()

    async def _in_turn(self, order: RoleOrder, on_changed: OnChanged) -> RoleChange | ServingError:
        wait_s = self._config.queue_timeout_s
        try:
            async with asyncio.timeout(wait_s):
                await self._turn.acquire()
        except TimeoutError:
            return Unavailable(f"another worker changes its role and did not end within {wait_s:g} s")
        try:
            return await self._change(order, on_changed)
        except ServingError as error:
            return error
        finally:
            self._turn.release()

    async def _change(self, order: RoleOrder, on_changed: OnChanged) -> RoleChange:
        handle, began_s = self._find(order.worker_id), self._clock.now_s()
        was = handle.info.role
        num_moved, freed_blocks = 0, None
        if was is order.role:
            if order.clear_cache:
                freed_blocks = await self._ask(handle, handle.ports.worker.clear_cache)
        else:
            if not order.is_forced:
                check_change(self._pool, handle, order.role)
            self._pool.begin_change(handle, order.role)
            try:
                num_moved = await self._empty(handle, order)
                if order.clear_cache:
                    freed_blocks = await self._ask(handle, handle.ports.worker.clear_cache)
                await self._assign(handle, order.role)
            except WorkerLost as error:
                self._metrics.role_changed(order.role, "failed")
                text = f"{order.worker_id} was lost on the way to {order.role}: {error.reason}"
                raise Unavailable(f"{text}; its next life is {was} as before") from error
            except BaseException:
                self._metrics.role_changed(order.role, "failed")
                raise
            finally:
                self._pool.end_change(handle)
            self._metrics.role_changed(order.role, "changed")
        change = RoleChange(
            worker_id=order.worker_id,
            generation=handle.info.generation,
            was=was,
            role=order.role,
            num_moved=num_moved,
            freed_blocks=freed_blocks,
            took_s=self._clock.now_s() - began_s,
        )
        if was is not order.role:
            await on_changed(change)
        return change

    def _find(self, worker_id: str) -> WorkerHandle:
        handle = self._pool.get(worker_id)
        if handle is None:
            there = ", ".join(each.worker_id for each in self._pool.handles) or "none"
            raise InvalidRequest("worker", f"{worker_id} is not here; the workers are {there}")
        if handle.state is not WorkerState.READY:
            raise Unavailable(f"{worker_id} is {handle.state.value}, not ready")
        return handle

    async def _empty(self, handle: WorkerHandle, order: RoleOrder) -> int:
        """Wait until the worker holds nothing; return how many requests had to go on elsewhere."""
        if await self._is_empty(handle, handle.tenure, within_s=order.timeout_s):
            return 0
        num_running, role = handle.in_flight, handle.info.role
        if num_running and not self._pool.can_answer_with(roles_of_others(self._pool, handle)):
            raise Unavailable(
                f"{order.worker_id} still has {num_running} in flight after {order.timeout_s:g} s, and "
                f"nobody else could go on; it is {role} as before"
            )
        ended = handle.end_tenure()
        settle_s = self._config.role_settle_s
        # A client that reads nothing keeps its request in our books, but not on the worker once that is done.
        if not (
            await self._is_empty(handle, ended, within_s=settle_s)
            or _is_clean(await self._ask(handle, handle.ports.worker.audit))
        ):
            raise Unavailable(
                f"{order.worker_id} still holds something of its requests {settle_s:g} s after they went "
                f"elsewhere; it is {role} as before"
            )
        return ended.num_moved

    async def _is_empty(self, handle: WorkerHandle, tenure: Tenure, *, within_s: float) -> bool:
        """Wait until our books of a tenure and the worker's own are empty; return whether they are."""
        try:
            with Guard(handle, timeout_s=within_s):
                while tenure.in_flight or not _is_clean(await handle.ports.worker.audit()):  # noqa: ASYNC110
                    await asyncio.sleep(_LOOK_EVERY_S)
        except DeadlineExceeded:
            return False
        return True

    async def _assign(self, handle: WorkerHandle, role: Role) -> None:
        try:
            await self._ask(handle, lambda: handle.ports.worker.assign(role))
        except ServingError:
            # It may have heard it although no answer came.
            with suppress(ServingError):
                await self._ask(handle, lambda: handle.ports.worker.assign(handle.info.role))
            raise
        self._pool.assign(handle, role)

    async def _ask(self, handle: WorkerHandle, call: Callable[[], Awaitable[T]]) -> T:
        """Return an answer that a worker gives at once.

        Raises:
            WorkerLost: None came.
        """
        try:
            with Guard(handle, timeout_s=self._config.audit_timeout_s):
                return await call()
        except DeadlineExceeded:
            raise WorkerLost(
                handle.worker_id, f"no answer within {self._config.audit_timeout_s:g} s"
            ) from None


def _is_clean(audit: WorkerAudit) -> bool:
    """Return whether nothing of any request is left on a worker."""
    blocks = audit.blocks
    is_held = blocks.owned or blocks.draining or audit.tickets or audit.transfers or audit.sequences
    return not is_held and blocks.free + blocks.cached == blocks.total
