"""WorkerService: what a worker says of itself is what its parts say."""

from __future__ import annotations

import asyncio

from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.toys import request
from twinpool.core.clock import SystemClock
from twinpool.core.ports import BlockCounts, Role, WorkerAudit
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.loop import EngineLoop
from twinpool.engine.worker import WorkerService


async def started() -> tuple[EngineLoop, WorkerService]:
    engine = Engine(
        FakeRunner(),
        config=EngineConfig(block_tokens=4),
        limits=EngineLimits(num_blocks=8, max_model_tokens=64, vocab_size=VOCAB_SIZE),
        clock=SystemClock(),
    )
    loop = EngineLoop(engine, SystemClock())
    await loop.start()

    async def num_transfers() -> int:
        return 3

    service = WorkerService(
        loop,
        worker_id="w0",
        role=Role.DECODE,
        num_tickets=lambda: 2,
        num_transfers=num_transfers,
        counters=lambda: {"transfer_frames": 11},
    )
    return loop, service


def test_an_audit_holds_the_books_of_engine_and_services() -> None:
    async def run() -> WorkerAudit:
        loop, service = await started()
        await loop.reserve(request(tuple(range(5))))
        audit = await service.audit()
        await loop.close()
        return audit

    blocks = BlockCounts(total=8, free=6, cached=0, owned=2, draining=0)
    assert asyncio.run(run()) == WorkerAudit(
        worker_id="w0", role=Role.DECODE, blocks=blocks, tickets=2, transfers=3, sequences=1
    )


def test_the_counters_of_engine_and_services_are_told_together() -> None:
    async def run() -> None:
        loop, service = await started()
        counters = (await service.status()).counters
        assert counters["transfer_frames"] == 11
        assert set(loop.load().counters) < set(counters)
        await loop.close()

    asyncio.run(run())


def test_a_drain_that_does_not_end_in_time_says_so_and_goes_on() -> None:
    async def run() -> None:
        loop, service = await started()
        held = await loop.reserve(request())
        assert await service.drain(timeout_s=0.05) is False
        assert service.load().draining
        await loop.abort(held)
        await loop.drained(held)
        assert await service.drain(timeout_s=10.0) is True
        await loop.close()

    asyncio.run(run())
