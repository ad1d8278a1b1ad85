"""Workers in one process that count their blocks and tickets and can die, freeze, refuse or stall.

Tokens are a function of all ids so far, so a lost, repeated or foreign token changes every later one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from router.config import RouterConfig
from router.router import Router
from router.workers import WorkerPool, WorkerPorts, WorkerState
from tests.toys import layout
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.errors import NoFreeBlocks, TransferRefused, WorkerDraining, WorkerLost
from twinpool.core.layout import KVLayout
from twinpool.core.ports import BlockCounts, Role, WorkerAudit, WorkerInfo, WorkerLoad
from twinpool.core.request import FinishReason, Request, TokenLogprob, TokenOutput
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport
from twinpool.core.timeline import RequestTimeline

Hook = Callable[[], Awaitable[None]]


def next_token(ids: tuple[int, ...]) -> int:
    """Return the token after ``ids``; every id and its place matter."""
    value = 7
    for token in ids:
        value = (value * 31 + token + 1) % 1009
    return value


def answer(request: Request) -> list[int]:
    """Return the ids of an undisturbed answer."""
    ids = request.prompt_ids
    for _ in range(request.sampling.max_tokens):
        ids += (next_token(ids),)
    return list(ids[len(request.prompt_ids) :])


@dataclass
class Reservation:
    """A ticket, on the side that holds the room."""

    request: Request
    num_blocks: int
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_resumed: bool = False


class FakeWorker:
    """All ports of one worker.

    ``hooks`` maps a phase (reserve, reserved, prefill, prefilled, resume, token, generate, release)
    to what happens there; "token" runs before each token of a stream.  ``forged`` replaces fields
    of its tickets, and ``tickets`` are those that were given to it.  ``cached_tokens`` is what it says
    of the prompts it computes.
    """

    def __init__(self, world: World, info: WorkerInfo) -> None:
        self.world = world
        self.info = info
        self.role = info.role  # that it knows of
        self.hooks: dict[str, Hook] = {}
        self.calls: list[str] = []
        self.requests: list[Request] = []
        self.forged: dict[str, Any] = {}
        self.tickets: list[KVTicket] = []
        self.cached_tokens = 0
        self.free_blocks = info.num_blocks
        self.reservations: dict[str, Reservation] = {}
        self.num_running = 0
        self.is_dead = False
        self.is_closed = False
        self.is_draining = False
        self.audit_error = 0
        self.thawed = asyncio.Event()
        self.thawed.set()

    # What a test does to it.

    def die(self) -> None:
        """End without a word: its join stream breaks and its connections are reset."""
        self.is_dead = True
        self.world.pool.left(self.info.worker_id, self.info.generation, "connection reset")

    def freeze(self) -> None:
        """Stop (SIGSTOP): sockets stay open, nothing answers."""
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    async def stall(self) -> None:
        """Wait for ever; a hook."""
        await asyncio.Event().wait()

    def says(self) -> WorkerInfo:
        """Return what it says when it joins."""
        return replace(self.info, role=self.role)

    # Ports.

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        async with self._running(request):
            await self._at("prefill")
            first = self._output(request, ())
            if ticket is not None:
                self.tickets.append(ticket)
                holder = self.world.workers[ticket.worker_id]
                reservation = holder.reservations.get(ticket.transfer_id)
                if reservation is None or ticket.epoch != holder.info.generation:
                    raise TransferRefused("no such transfer")
                reservation.arrived.set()
            await self._at("prefilled")
            return first

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        self.requests.append(request)
        await self._at("reserve")
        if self.is_draining:
            raise WorkerDraining("it drains")
        num_blocks = self._take(request.num_tokens + 1)
        ticket = KVTicket(
            transfer_id=f"{next(self.world.numbers):032x}",
            epoch=self.info.generation,
            request_id=request.request_id,
            worker_id=self.info.worker_id,
            sender_id=sender_id,
            ranks=self.info.ranks,
            layout=self.info.layout,
            num_tokens=request.num_tokens,
            cached_tokens=0,
            lease_s=30.0,
            expires_unix_s=time.time() + request.timeout_s,
        )
        self.reservations[ticket.transfer_id] = Reservation(request, num_blocks)
        await self._at("reserved")
        return replace(ticket, **self.forged)

    async def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        await self._at("resume")
        reservation = self.reservations.get(ticket.transfer_id)
        if reservation is None:
            raise TransferRefused("no such transfer")
        await reservation.arrived.wait()
        reservation.is_resumed = True
        ids = [first.token_id]
        request = reservation.request
        self.num_running += 1
        try:
            while True:
                await self._at("token")
                output = self._output(request, tuple(ids))
                ids.append(output.token_id)
                yield output
                if output.finish is not None:
                    return
        finally:
            self.num_running -= 1

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        ids: list[int] = []
        async with self._running(request):
            await self._at("generate")
            while True:
                await self._at("token")
                output = self._output(request, tuple(ids))
                ids.append(output.token_id)
                yield output
                if output.finish is not None:
                    return

    async def release(self, ticket: KVTicket) -> TransferReport:
        await self._at("release")
        reservation = self.reservations.pop(ticket.transfer_id, None)
        if reservation is None:
            return TransferReport()
        self.free_blocks += reservation.num_blocks
        if not reservation.arrived.is_set():
            return TransferReport()
        return TransferReport(
            kv_bytes=reservation.request.num_tokens * self.info.layout.token_bytes,
            num_frames=1,
            first_frame_s=0.25,
            complete_s=0.5,
            transport=self.info.ranks[0][0].transport,
        )

    async def status(self) -> WorkerLoad:
        return self.load()

    async def drain(self, *, timeout_s: float) -> bool:
        self.is_draining = True
        return self.num_running == 0

    async def audit(self) -> WorkerAudit:
        await self._at("audit")
        return WorkerAudit(
            worker_id=self.info.worker_id,
            role=self.role,
            blocks=BlockCounts(
                total=self.info.num_blocks,
                free=self.free_blocks,
                cached=0,
                owned=self.info.num_blocks - self.free_blocks + self.audit_error,
                draining=0,
            ),
            tickets=sum(not each.is_resumed for each in self.reservations.values()),
            transfers=0,
            sequences=self.num_running,
        )

    async def clear_cache(self) -> int:
        await self._at("clear_cache")
        return 3

    async def assign(self, role: Role) -> None:
        await self._at("assign")
        self.role = role

    async def close(self) -> None:
        self.is_closed = True

    def load(self) -> WorkerLoad:
        return WorkerLoad(
            running=self.num_running,
            free_blocks=self.free_blocks,
            draining=self.is_draining,
            counters={"steps_total": len(self.calls)},
        )

    # Inside.

    @asynccontextmanager
    async def _running(self, request: Request) -> AsyncIterator[None]:
        self.requests.append(request)
        num_blocks = self._take(request.num_tokens + 1)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self.free_blocks += num_blocks

    def _take(self, num_tokens: int) -> int:
        needed = self.info.layout.num_blocks(num_tokens)
        if needed > self.free_blocks:
            raise NoFreeBlocks(needed=needed, free=self.free_blocks, total=self.info.num_blocks)
        self.free_blocks -= needed
        return needed

    async def _at(self, phase: str) -> None:
        """Let time pass; whatever the test has planned for this phase happens now."""
        self.calls.append(phase)
        if (hook := self.hooks.get(phase)) is not None:
            await hook()
        await asyncio.sleep(0)
        await self.thawed.wait()
        if self.is_dead:
            raise WorkerLost(self.info.worker_id, "connection reset")

    def _output(self, request: Request, so_far: tuple[int, ...]) -> TokenOutput:
        ids = request.prompt_ids + request.output_ids + so_far
        index = len(request.output_ids) + len(so_far)
        asked = request.sampling.num_prompt_logprobs is not None and not so_far
        return TokenOutput(
            index=index,
            token_id=next_token(ids),
            finish=FinishReason.LENGTH if index + 1 == request.sampling.max_tokens else None,
            prompt_logprobs=(None, *(TokenLogprob(t, -1.0, 1) for t in ids[1:])) if asked else None,
            cached_tokens=0 if so_far else self.cached_tokens,
        )


class World:
    """A router with its workers, in one process."""

    def __init__(
        self,
        config: RouterConfig | None = None,
        *,
        clock: Clock | None = None,
        needs_prefill: bool = True,
    ) -> None:
        self.clock = clock or SystemClock()
        self.config = config or RouterConfig()
        self.workers: dict[str, FakeWorker] = {}
        self.all_workers: list[FakeWorker] = []
        self.numbers = itertools.count()
        self.pool = WorkerPool(
            self.config, clock=self.clock, connect=self._connect, needs_prefill=needs_prefill
        )
        self.router = Router(self.config, pool=self.pool, clock=self.clock)

    def join(self, role: Role, *, number: int = 0, generation: int = 1, **said: Any) -> FakeWorker:
        """Add a worker that is ready at once."""
        info = worker_info(role, number=number, generation=generation, **said)
        worker = FakeWorker(self, info)
        previous = self.workers.get(info.worker_id)
        self.workers[info.worker_id] = worker
        try:
            self.pool.joined(info)
        except Exception:
            if previous is not None:
                self.workers[info.worker_id] = previous
            raise
        self.all_workers.append(worker)
        self.pool.heard(info.worker_id, generation, worker.load())
        return worker

    def beat(self) -> None:
        """Let every worker that can speak say how it is."""
        for worker in list(self.workers.values()):
            if not worker.is_dead and worker.thawed.is_set():
                self.pool.heard(worker.info.worker_id, worker.info.generation, worker.load())

    async def until(self, worker_id: str, state: WorkerState) -> None:
        """Wait until the pool thinks so of a worker."""
        changed = asyncio.Event()
        self.pool.subscribe(changed.set)
        async with asyncio.timeout(10.0):
            while (handle := self.pool.get(worker_id)) is None or handle.state is not state:
                await changed.wait()
                changed.clear()

    def timeline(self, request: Request) -> RequestTimeline:
        return RequestTimeline(request.request_id, self.clock)

    async def ask(self, request: Request, *, tenant: str = "") -> list[int]:
        """Return the ids of the answer; their indexes were 0, 1, 2 and so on."""
        return await self.ask_with(request, self.timeline(request), tenant=tenant)

    async def ask_with(self, request: Request, timeline: RequestTimeline, *, tenant: str = "") -> list[int]:
        outputs = [output async for output in self.router.generate(request, timeline, tenant=tenant)]
        assert [output.index for output in outputs] == list(range(len(outputs)))
        return [output.token_id for output in outputs]

    def assert_at_rest(self) -> None:
        """Everything that was taken came back, on every worker that lives and in the router's books."""
        assert (self.router.num_queued, self.router.num_in_flight) == (0, 0)
        for handle in self.pool.handles:
            assert (handle.in_flight, handle.in_flight_tokens) == (0, 0), handle.worker_id
        for worker in self.all_workers:
            if not worker.is_dead:
                assert worker.reservations == {}, worker.info.worker_id
                assert worker.free_blocks == worker.info.num_blocks, worker.info.worker_id
                assert worker.num_running == 0, worker.info.worker_id

    def _connect(self, info: WorkerInfo) -> WorkerPorts:
        worker = self.workers[info.worker_id]
        return WorkerPorts(prefill=worker, decode=worker, worker=worker, connection=worker)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    """Let hearts beat and the pool look for silence; leave nothing behind."""
    await world.pool.start()

    async def beat_forever() -> None:
        while True:
            await asyncio.sleep(world.config.heartbeat_s)
            world.beat()

    beating = asyncio.create_task(beat_forever())
    try:
        yield world
    finally:
        beating.cancel()
        await asyncio.wait({beating})
        await world.router.close()
        await world.pool.close()


def fast_config(**changes: object) -> RouterConfig:
    """Limits for tests: a heartbeat of 10 ms, a worker is frozen after 300 ms."""
    values: dict[str, object] = {
        "heartbeat_s": 0.01,
        "lost_after_s": 0.3,
        "queue_timeout_s": 5.0,
        "release_timeout_s": 1.0,
        "audit_timeout_s": 0.2,
        **changes,
    }
    return RouterConfig(**values)  # type: ignore[arg-type]


def worker_info(
    role: Role,
    *,
    number: int = 0,
    generation: int = 1,
    num_blocks: int = 32,
    kv: KVLayout | None = None,
    fingerprint: dict[str, str] | None = None,
) -> WorkerInfo:
    """A worker called after its role and number."""
    return WorkerInfo(
        worker_id=f"{role.value}-{number}",
        role=role,
        address=f"fake:{role.value}-{number}",
        pid=1000 + number,
        host="localhost",
        generation=generation,
        model="toy",
        fingerprint=fingerprint or {"model": "toy"},
        layout=kv or layout(),
        num_blocks=num_blocks,
        max_model_tokens=256,
        ranks=tuple(
            (Endpoint("shm", f"/{role.value}-{number}.{rank}"), Endpoint("grpc", f"fake:{number}.{rank}"))
            for rank in range((kv or layout()).tp_size)
        ),
    )


def disaggregated(config: RouterConfig | None = None, *, num_prefill: int = 1, num_decode: int = 1) -> World:
    """Prefill and decode workers, all ready."""
    world = World(config or fast_config())
    for i in range(num_prefill):
        world.join(Role.PREFILL, number=i)
    for i in range(num_decode):
        world.join(Role.DECODE, number=i)
    return world


def colocated(config: RouterConfig | None = None, *, num_workers: int = 1) -> World:
    """Colocated workers, all ready."""
    world = World(config or fast_config(), needs_prefill=False)
    for i in range(num_workers):
        world.join(Role.COLOCATED, number=i)
    return world
