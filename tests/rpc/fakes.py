"""Ports that do as they are told, and remember what was asked of them and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from tests.rpc.words import AUDIT, TICKET
from tests.trust import ROUTER, worker_door
from twinpool.core.clock import SystemClock
from twinpool.core.errors import LayoutMismatch
from twinpool.core.ports import Role, WorkerAudit, WorkerInfo, WorkerLoad
from twinpool.core.request import FinishReason, Request, TokenOutput
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.rpc.clients import DecodeClient, PrefillClient, WorkerChannel, WorkerClient
from twinpool.rpc.server import WorkerServer

CALLS = ("prefill", "reserve", "resume", "generate", "release", "audit")
LAST = TokenOutput(index=3, token_id=103, finish=FinishReason.LENGTH)


class FakeWorker:
    """All three ports.

    ``error`` is raised by each call.  A call in ``held`` waits: a single answer before it is given, a
    stream after two tokens, and then it is in ``waiting``.  ``log`` has a line for each beginning, and
    each end that was a cancellation.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.held: set[str] = set()
        self.waiting: set[str] = set()
        self.log: list[str] = []
        self.requests: list[Request] = []
        self.tickets: list[KVTicket] = []
        self.senders: list[str] = []
        self.load = WorkerLoad()
        self.outputs: tuple[TokenOutput, ...] = (
            *(TokenOutput(index=i, token_id=100 + i) for i in range(3)),
            LAST,
        )

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        await self._begin("prefill", request)
        if ticket is not None:
            self.tickets.append(ticket)
        return self.outputs[0]

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        await self._begin("reserve", request)
        self.senders.append(sender_id)
        return replace(TICKET, request_id=request.request_id, sender_id=sender_id)

    def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        self.tickets.append(ticket)
        return self._stream("resume", self.outputs[first.index + 1 :])

    def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        self.requests.append(request)
        return self._stream("generate", self.outputs)

    async def release(self, ticket: KVTicket) -> TransferReport:
        await self._begin("release", None)
        self.tickets.append(ticket)
        return TransferReport(kv_bytes=5, complete_s=0.25, transport="grpc")

    async def status(self) -> WorkerLoad:
        return self.load

    async def drain(self, *, timeout_s: float) -> bool:
        await self._begin(f"drain {timeout_s}", None)
        return True

    async def audit(self) -> WorkerAudit:
        await self._begin("audit", None)
        return AUDIT

    async def clear_cache(self) -> int:
        await self._begin("clear_cache", None)
        return 11

    async def assign(self, role: Role) -> None:
        await self._begin(f"assign {role}", None)

    async def _begin(self, name: str, request: Request | None) -> None:
        self.log.append(name)
        if request is not None:
            self.requests.append(request)
        if self.error is not None:
            raise self.error
        if name in self.held:
            await self._wait(name)

    async def _stream(self, name: str, outputs: tuple[TokenOutput, ...]) -> AsyncGenerator[TokenOutput, None]:
        self.log.append(name)
        try:
            for number, output in enumerate(outputs):
                if number == 2 and self.error is not None:
                    raise self.error
                if number == min(2, len(outputs) - 1) and name in self.held:
                    self.waiting.add(name)
                    await asyncio.Event().wait()
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.log.append(f"{name} aborted")
            raise

    async def _wait(self, name: str) -> None:
        try:
            while name in self.held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.log.append(f"{name} aborted")
            raise


class Served:
    """A fake worker behind a real server, with its clients."""

    def __init__(self, worker: FakeWorker, server: WorkerServer, channel: WorkerChannel) -> None:
        self.worker = worker
        self.server = server
        self.channel = channel
        self.prefill = PrefillClient(channel)
        self.decode = DecodeClient(channel, SystemClock())
        self.control = WorkerClient(channel)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    """Serve a fake worker on a free port."""
    worker = FakeWorker()
    server = WorkerServer(prefill=worker, decode=worker, worker=worker, door=worker_door())
    await server.start()
    channel = WorkerChannel(server.address, "decode-0", trust=ROUTER)
    try:
        yield Served(worker, server, channel)
    finally:
        await channel.close()
        await server.stop(grace_s=0.0)


class FakeMembers:
    """The router's list of workers; ``refuse`` turns everybody away."""

    def __init__(self) -> None:
        self.refuse = False
        self.log: list[tuple[str, str, int]] = []
        self.infos: list[WorkerInfo] = []
        self.loads: list[WorkerLoad] = []
        self.reasons: list[str] = []

    def joined(self, info: WorkerInfo) -> None:
        if self.refuse:
            raise LayoutMismatch("head_dim: 4 here, 8 there")
        self.log.append(("joined", info.worker_id, info.generation))
        self.infos.append(info)

    def heard(self, worker_id: str, generation: int, load: WorkerLoad) -> None:
        self.loads.append(load)

    def left(self, worker_id: str, generation: int, reason: str) -> None:
        self.log.append(("left", worker_id, generation))
        self.reasons.append(reason)
