"""Who is there: workers that joined, how they are, and what this router has running on each.

Knows nothing of sockets: joins, heartbeats and losses are told to it, and ``connect`` makes the
ports.  Every wait on a worker is guarded by its handle, so that a loss ends all of them at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol
from weakref import WeakKeyDictionary

from router.config import Fallback, RouterConfig
from router.exchange import Exchange
from router.fit import check_fit, check_ranks
from router.guard import Guard
from router.policy import Snapshot, WorkerView
from router.tenure import Tenure
from twinpool.core.clock import Clock
from twinpool.core.errors import ConfigError, WorkerLost
from twinpool.core.ports import DecodePort, PrefillPort, Role, WorkerInfo, WorkerLoad, WorkerPort
from twinpool.core.tasks import OwnedTasks

DISCONNECT_TIMEOUT_S = 2.0  # for closing connections when the router stops


class WorkerState(StrEnum):
    """What the router thinks of a worker."""

    JOINING = "joining"  # has not said how it is
    READY = "ready"
    STALLED = "stalled"  # speaks, but its engine has work and takes no step
    DRAINING = "draining"  # finishes what it has
    CHANGING = "changing"  # finishes what it has; then it has another role
    FROZEN = "frozen"  # silent; ready again when it speaks
    LOST = "lost"  # gone for good; a successor has a larger generation


class Closing(Protocol):
    """A connection."""

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """A worker as the router can ask it."""

    prefill: PrefillPort
    decode: DecodePort
    worker: WorkerPort
    connection: Closing


Listener = Callable[[], None]


class WorkerHandle:
    """One life of one worker, and this router's books about it.

    Args:
        info: What it said when it joined.
        ports: How to ask it.
        now_s: When it joined.
        limit: Most requests given to it at once.
        stalled_after_s: Work without a step for so long makes it not ready.
    """

    def __init__(
        self, info: WorkerInfo, ports: WorkerPorts, *, now_s: float, limit: int, stalled_after_s: float
    ) -> None:
        self.info = info
        self.worker_id = info.worker_id
        self.ports = ports
        self.limit = limit
        self._max_request_tokens = info.max_request_tokens
        self.load: WorkerLoad | None = None  # None: it has only joined
        self.last_heard_s = now_s
        self.num_heard = 0  # heartbeats; a request that failed here waits for the next one
        self.num_changes = 0  # heartbeats and ended requests; a request refused here waits for the next one
        self._received: WeakKeyDictionary[WorkerHandle, Exchange] = WeakKeyDictionary()
        self._free_blocks = 0
        self._stalled_after_s = stalled_after_s
        self._guards: set[Guard] = set()
        self._failure: WorkerLost | None = None
        self._is_gone = False
        self.has_successor = False  # it gave way to a later life of the same worker
        self.tenure = Tenure(info.worker_id, self)  # of its present role
        self.becomes: Role | None = None  # its next role, while it empties for it
        self._view: WorkerView | None = None  # what was told last; None: the books have changed since

    @property
    def in_flight(self) -> int:
        """Requests of this router that have not ended here, but for those that are to go on elsewhere."""
        return self.tenure.in_flight

    @property
    def in_flight_tokens(self) -> int:
        return self.tenure.in_flight_tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that were free at the last heartbeat, less what was taken and plus what ended since."""
        return min(max(self._free_blocks, 0), self.info.num_blocks)

    @property
    def state(self) -> WorkerState:
        if self._is_gone:
            return WorkerState.LOST
        if self._failure is not None:
            return WorkerState.FROZEN
        if self.load is None:
            return WorkerState.JOINING
        if self.load.draining:
            return WorkerState.DRAINING
        if self.becomes is not None:
            return WorkerState.CHANGING
        if self.load.stalled_s > self._stalled_after_s:
            return WorkerState.STALLED
        return WorkerState.READY

    def heard(self, load: WorkerLoad, *, now_s: float) -> None:
        """Take a heartbeat; it thaws a frozen worker."""
        self.load = load
        self.last_heard_s = now_s
        self.num_heard += 1
        self.num_changes += 1
        self._free_blocks = load.free_blocks
        self._view = None
        if not self._is_gone:
            self._failure = None

    def freeze(self, reason: str) -> None:
        """Fail everything that waits on this worker, until it speaks again."""
        self._failure = WorkerLost(self.worker_id, reason)
        for guard in list(self._guards):
            guard.trip(WorkerLost(self.worker_id, reason))

    def lose(self, reason: str) -> None:
        """Fail everything that waits on this worker, for good."""
        self._is_gone = True
        self.freeze(reason)

    def give_way(self) -> None:
        """As ``lose``, to a later life of the same worker; nobody failed."""
        self.has_successor = True
        self.lose("a later life of it joined")

    def end_tenure(self) -> Tenure:
        """Let every request that runs here go on elsewhere; return what they were under."""
        ended, self.tenure = self.tenure, Tenure(self.worker_id, self)
        self._view = None
        ended.end()
        return ended

    def take(self, *, num_tokens: int) -> Tenure:
        """Write down that a request of ``num_tokens`` is about to take room; return what it runs under."""
        self.tenure.take(num_tokens=num_tokens)
        self._free_blocks -= self.info.layout.num_blocks(num_tokens)
        self._view = None
        return self.tenure

    def give_back(self, tenure: Tenure, *, num_tokens: int) -> None:
        """Undo the ``take`` that returned ``tenure``; the caller does so exactly once."""
        tenure.give_back(num_tokens=num_tokens)
        self.num_changes += 1
        self._free_blocks += self.info.layout.num_blocks(num_tokens)
        self._view = None

    def exchange_with(self, sender: WorkerHandle) -> Exchange:
        """Return the book on the KV that this worker gets from ``sender``, this life of it."""
        return self._received.setdefault(sender, Exchange())

    @property
    def exchanges(self) -> dict[str, Exchange]:
        """The books on all senders that are there, by their ids."""
        return {
            sender.worker_id: exchange
            for sender, exchange in self._received.items()
            if sender.state is not WorkerState.LOST
        }

    def view(self, *, limit: int) -> WorkerView:
        """Return what a routing policy may know of this worker."""
        if self._view is None or self._view.limit != limit:
            self._view = WorkerView(
                worker_id=self.worker_id,
                in_flight=self.tenure.in_flight,
                limit=limit,
                in_flight_tokens=self.tenure.in_flight_tokens,
                free_blocks=self.free_blocks,
                num_blocks=self.info.num_blocks,
                block_tokens=self.info.layout.block_tokens,
                max_request_tokens=self._max_request_tokens,
            )
        return self._view

    def watch(self, guard: Guard) -> None:
        """Trip ``guard`` when the worker is lost or frozen.

        Raises:
            WorkerLost: It is so already.
        """
        if self._failure is not None:
            raise WorkerLost(self.worker_id, self._failure.reason)
        self._guards.add(guard)

    def unwatch(self, guard: Guard) -> None:
        self._guards.discard(guard)


class WorkerPool:
    """The workers of one model.

    Args:
        config: Limits.
        clock: Judges silence.
        connect: Makes the ports of a worker; does not wait.
        needs_prefill: Whether the deployment is to have prefill workers; a colocated one is not.  Follows the
            roles that workers get later.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock,
        connect: Callable[[WorkerInfo], WorkerPorts],
        needs_prefill: bool = True,
    ) -> None:
        self.needs_prefill = needs_prefill
        self._config = config
        self._clock = clock
        self._connect = connect
        self._handles: dict[str, WorkerHandle] = {}
        self._listeners: list[Listener] = []
        self._sweeping = OwnedTasks()
        self._disconnecting = OwnedTasks()
        self._swept_s = clock.now_s()
        self._log = logging.getLogger("twinpool.router")

    # Told by the registry.

    def joined(self, info: WorkerInfo) -> None:
        """Take a worker in.

        Raises:
            LayoutMismatch: It does not fit the workers that are there; the message names the setting.
            ConfigError: A later life of the same worker is there already, or it does not name its ranks.
        """
        old = self._handles.get(info.worker_id)
        if old is not None and old.info.generation >= info.generation:
            raise ConfigError(
                f"worker {info.worker_id}",
                f"generation {info.generation} is not later than the one here, {old.info.generation}",
            )
        check_ranks(info)
        for other in self._handles.values():
            if other is not old:
                check_fit(other.info, info)
        ports = self._connect(info)
        if old is not None:
            old.give_way()
            self._let_go(old, "gives way to a later life of it")
        self._handles[info.worker_id] = WorkerHandle(
            info,
            ports,
            now_s=self._clock.now_s(),
            limit=self._limit(info.role),
            stalled_after_s=self._config.stalled_after_s,
        )
        self._note(info, "joined")

    def heard(self, worker_id: str, generation: int, load: WorkerLoad) -> None:
        """Take a heartbeat; one of an earlier life or of a stranger changes nothing."""
        handle = self._current(worker_id, generation)
        if handle is None:
            return
        was_frozen = handle.state is WorkerState.FROZEN
        handle.heard(load, now_s=self._clock.now_s())
        if was_frozen:
            self._note(handle.info, "speaks again")
        else:
            self._tell()

    def left(self, worker_id: str, generation: int, reason: str) -> None:
        """Forget a worker that said good-bye or whose join stream broke."""
        handle = self._current(worker_id, generation)
        if handle is not None:
            del self._handles[worker_id]
            what = "left" if handle.state is WorkerState.DRAINING else f"is lost: {reason}"
            handle.lose(reason)
            self._let_go(handle, what)

    # Told by who changes roles.

    def begin_change(self, handle: WorkerHandle, role: Role) -> None:
        """Give a worker nothing new: it is to have ``role`` once it is empty."""
        handle.becomes = role
        self._note(handle.info, f"is to become {role}")

    def assign(self, handle: WorkerHandle, role: Role) -> None:
        """Use an empty worker for something else from now on."""
        assert handle.in_flight == 0, "requests of its old role run there"
        self._note(handle.info, f"becomes {role}")
        handle.info = replace(handle.info, role=role)
        handle.limit = self._limit(role)
        roles = {each.info.role for each in self._handles.values()}
        if Role.PREFILL in roles:
            self.needs_prefill = True
        elif roles == {Role.COLOCATED}:
            self.needs_prefill = False

    def end_change(self, handle: WorkerHandle) -> None:
        """Give a worker requests again, in whatever role it has."""
        handle.becomes = None
        self._tell()

    # Asked by the router.

    @property
    def handles(self) -> tuple[WorkerHandle, ...]:
        """Every member, in the order in which they joined, frozen ones included."""
        return tuple(self._handles.values())

    @property
    def is_ready(self) -> bool:
        """Whether a request can be answered the way the deployment was configured."""
        return self._is_ready_with(self._ready_roles())

    @property
    def can_answer(self) -> bool:
        """Whether a request can be answered at all, a fallback included."""
        return self.can_answer_with(self._ready_roles())

    def can_answer_with(self, roles: Collection[Role]) -> bool:
        """Return whether workers of these roles could answer a request, a fallback included."""
        is_local_enough = self._config.fallback is Fallback.LOCAL and Role.DECODE in roles
        return self._is_ready_with(roles) or is_local_enough

    @property
    def max_request_tokens(self) -> int | None:
        """The largest request, prompt and answer together, that every member can hold; None if empty."""
        return min((handle.info.max_request_tokens for handle in self._handles.values()), default=None)

    def get(self, worker_id: str) -> WorkerHandle | None:
        return self._handles.get(worker_id)

    def snapshot(
        self, *, is_avoided: Callable[[WorkerHandle], bool], is_full: Callable[[WorkerHandle], bool]
    ) -> Snapshot:
        """Return the ready workers as a routing policy sees them.

        Args:
            is_avoided: Such a worker is left out, as if it were not there.
            is_full: Such a worker is shown, but without room.
        """
        views: defaultdict[Role, list[WorkerView]] = defaultdict(list)
        for handle in self._handles.values():
            if handle.state is WorkerState.READY and not is_avoided(handle):
                limit = 0 if is_full(handle) else handle.limit
                views[handle.info.role].append(handle.view(limit=limit))
        return Snapshot(
            prefill=tuple(views[Role.PREFILL]),
            decode=tuple(views[Role.DECODE]),
            colocated=tuple(views[Role.COLOCATED]),
            is_local_allowed=self._config.fallback is Fallback.LOCAL or not self.needs_prefill,
        )

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` whenever something changed from now on; it must not wait."""
        self._listeners.append(listener)

    async def wait_ready(self, *, timeout_s: float) -> bool:
        """Wait until ``is_ready``; return whether that came true in time."""
        changed = asyncio.Event()
        self._listeners.append(changed.set)
        try:
            async with asyncio.timeout(timeout_s):
                while not self.is_ready:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return False
        finally:
            self._listeners.remove(changed.set)
        return True

    # Its own life.

    async def start(self) -> None:
        """Begin to look for silent workers."""
        self._swept_s = self._clock.now_s()
        self._sweeping.start(self._sweep_forever())

    async def close(self) -> None:
        """Fail what waits, close every connection and stop."""
        for handle in self.handles:
            self.left(handle.worker_id, handle.info.generation, "the router stops")
        await asyncio.sleep(0)  # lets tripped guards cancel their waits before the connections go
        await self._sweeping.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCONNECT_TIMEOUT_S):
                await self._disconnecting.wait()
        await self._disconnecting.close()

    def sweep(self) -> None:
        """Freeze the workers that were silent for too long.

        If this router itself was stopped or starved, heartbeats may lie unread in its sockets; the
        time it missed is not held against the workers.
        """
        now_s = self._clock.now_s()
        missed_s = now_s - self._swept_s - self._sweep_every_s
        self._swept_s = now_s
        for handle in self.handles:
            if missed_s > self._config.heartbeat_s:
                handle.last_heard_s = min(now_s, handle.last_heard_s + missed_s)
            silent_s = now_s - handle.last_heard_s
            if silent_s > self._config.lost_after_s and handle.state is not WorkerState.FROZEN:
                handle.freeze(f"silent for {silent_s:.1f} s")
                self._note(handle.info, f"is frozen, silent for {silent_s:.1f} s")

    @property
    def _sweep_every_s(self) -> float:
        return self._config.lost_after_s / 8

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_every_s)
            self.sweep()

    def _limit(self, role: Role) -> int:
        return self._config.prefill_depth if role is Role.PREFILL else self._config.max_running_per_worker

    def _is_ready_with(self, roles: Collection[Role]) -> bool:
        if Role.COLOCATED in roles:
            return True
        return Role.DECODE in roles and (Role.PREFILL in roles or not self.needs_prefill)

    def _ready_roles(self) -> set[Role]:
        return {handle.info.role for handle in self._handles.values() if handle.state is WorkerState.READY}

    def _current(self, worker_id: str, generation: int) -> WorkerHandle | None:
        handle = self._handles.get(worker_id)
        return handle if handle is not None and handle.info.generation == generation else None

    def _let_go(self, handle: WorkerHandle, what: str) -> None:
        self._disconnecting.start(handle.ports.connection.close())
        self._note(handle.info, what)

    def _note(self, info: WorkerInfo, what: str) -> None:
        self._log.info("worker %s (%s) %s", info.worker_id, info.role, what)
        self._tell()

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()
