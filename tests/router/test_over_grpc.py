"""The router with workers behind real sockets: the same answers, and a server that stops is survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from router.connect import connect_over_grpc
from router.router import Router
from router.workers import WorkerPool
from tests.router.fakes import FakeWorker, World, answer, fast_config, worker_info
from tests.toys import request
from tests.trust import ROUTER, WORKER, registry_door, worker_door
from twinpool.core.ports import Role
from twinpool.rpc.join import join
from twinpool.rpc.registry import RegistryConfig, RegistryServer
from twinpool.rpc.server import WorkerServer

QUESTION = request(tuple(range(5, 42)), max_tokens=8)


@dataclass
class Served:
    """A fake worker behind a socket of its own, joined to the router."""

    worker: FakeWorker
    server: WorkerServer
    joining: asyncio.Task[None]

    async def stop(self) -> None:
        self.joining.cancel()
        await self.server.stop(grace_s=0.0)
        await asyncio.wait({self.joining})


@asynccontextmanager
async def served(roles: list[tuple[Role, int]]) -> AsyncIterator[tuple[World, dict[str, Served]]]:
    """A world whose router reaches its workers over gRPC."""
    world = World(fast_config(heartbeat_s=0.05, lost_after_s=2.0))
    world.pool = WorkerPool(world.config, clock=world.clock, connect=connect_over_grpc(world.clock, ROUTER))
    world.router = Router(world.config, pool=world.pool, clock=world.clock)
    registry = RegistryServer(world.pool, door=registry_door(), config=RegistryConfig(heartbeat_s=0.05))
    await registry.start()
    await world.pool.start()
    all_served: dict[str, Served] = {}
    all_spoke = asyncio.Event()

    def on_change() -> None:
        if sum(handle.load is not None for handle in world.pool.handles) == len(roles):
            all_spoke.set()

    world.pool.subscribe(on_change)
    for role, number in roles:
        worker = FakeWorker(world, worker_info(role, number=number))
        server = WorkerServer(prefill=worker, decode=worker, worker=worker, door=worker_door())
        await server.start()
        worker.info = replace(worker.info, address=server.address)
        world.workers[worker.info.worker_id] = worker
        world.all_workers.append(worker)
        joining = asyncio.create_task(join(registry.address, worker.says, worker.load, trust=WORKER))
        all_served[worker.info.worker_id] = Served(worker, server, joining)
    try:
        async with asyncio.timeout(10.0):
            await all_spoke.wait()
        yield world, all_served
    finally:
        await world.router.close()
        await world.pool.close()
        for each in all_served.values():
            await each.stop()
        await registry.stop()


def test_answers_over_sockets_are_the_same_and_leave_nothing() -> None:
    async def main() -> None:
        async with served([(Role.PREFILL, 0), (Role.DECODE, 0)]) as (world, _):
            assert await asyncio.gather(*(world.ask(QUESTION) for _ in range(4))) == [answer(QUESTION)] * 4
            books = await world.router.audit()
            assert books["ok"] is True
            world.assert_at_rest()

    asyncio.run(main())


def test_a_client_that_leaves_frees_the_ticket_on_the_other_side() -> None:
    async def main() -> None:
        async with served([(Role.PREFILL, 0), (Role.DECODE, 0)]) as (world, _):
            for num_read in (1, 3):
                question = request(QUESTION.prompt_ids, max_tokens=200)
                async with aclosing(world.router.generate(question, world.timeline(question))) as outputs:
                    for _ in range(num_read):
                        await anext(outputs)
                assert world.workers["decode-0"].reservations == {}

    asyncio.run(main())


def test_a_decode_server_that_stops_in_mid_stream_is_survived() -> None:
    async def main() -> None:
        async with served([(Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1)]) as (world, all_served):
            stopping: list[asyncio.Task[None]] = []

            for each in all_served.values():

                async def stop_at_third(each: Served = each) -> None:
                    if not stopping and each.worker.calls.count("token") == 3:
                        stopping.append(asyncio.create_task(each.stop()))
                        await each.worker.stall()

                each.worker.hooks["token"] = stop_at_third
            timeline = world.timeline(QUESTION)
            assert await world.ask_with(QUESTION, timeline) == answer(QUESTION)
            await asyncio.gather(*stopping)
            assert [e.detail["reason"] for e in timeline.events if e.name == "retry"] == ["WorkerLost"]
            assert len(world.pool.handles) == 2

    asyncio.run(main())
