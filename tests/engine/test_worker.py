"""WorkerService: what a worker says of itself is what its parts say."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.toys import request
from twinpool.core.clock import SystemClock
from twinpool.core.errors import WorkerDraining
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


def test_the_cache_is_forgotten_and_what_runs_keeps_its_own() -> None:
    async def run() -> None:
        loop, service = await started()
        held = await loop.reserve(request(tuple(range(5))))
        async with aclosing((await loop.submit(request(tuple(range(9)), max_tokens=1))).outputs()) as outputs:
            assert [output.index async for output in outputs] == [0]
        assert (await service.audit()).blocks == BlockCounts(total=8, free=4, cached=2, owned=2, draining=0)

        assert await service.clear_cache() == 2

        assert (await service.audit()).blocks == BlockCounts(total=8, free=6, cached=0, owned=2, draining=0)
        await loop.abort(held)
        await loop.drained(held)
        await loop.close()

    asyncio.run(run())


def test_a_role_that_was_assigned_is_told_in_audits_and_one_that_ends_takes_none() -> None:
    async def run() -> None:
        loop, service = await started()
        await service.assign(Role.PREFILL)
        assert (service.role, (await service.audit()).role) == (Role.PREFILL, Role.PREFILL)
        loop.start_draining()
        with pytest.raises(WorkerDraining, match="this worker ends and takes no other role"):
            await service.assign(Role.DECODE)
        assert service.role is Role.PREFILL
        await loop.close()

    asyncio.run(run())
