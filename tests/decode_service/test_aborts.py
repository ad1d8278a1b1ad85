"""Requests that are given up at random moments: blocks add up at all times, and all are free in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from tests.decode_service.toy_worker import ToyWorker, adds_up, pair
from tests.engine.fake_runner import expected_output
from tests.patience import eventually
from tests.toys import request
from tests.trust import ROUTER, worker_door
from twinpool.core.clock import SystemClock
from twinpool.core.errors import NoFreeBlocks, ServingError
from twinpool.core.ports import DecodePort, PrefillPort
from twinpool.core.request import Request
from twinpool.rpc.clients import DecodeClient, PrefillClient, WorkerChannel
from twinpool.rpc.server import WorkerServer


async def answer(prefill: PrefillPort, decode: DecodePort, asked: Request) -> list[int]:
    """Serve one request as the router would."""
    ticket = await decode.reserve(asked, sender_id="prefill")
    try:
        first = await prefill.prefill(asked, ticket)
        got = [first.token_id]
        async with aclosing(decode.resume(ticket, first)) as outputs:
            async for output in outputs:
                got.append(output.token_id)
        return got
    finally:
        await asyncio.shield(asyncio.ensure_future(decode.release(ticket)))


@asynccontextmanager
async def over_grpc(worker: ToyWorker) -> AsyncIterator[tuple[PrefillClient, DecodeClient]]:
    """Serve a worker on a free port."""
    server = WorkerServer(
        prefill=worker.prefill, decode=worker.decode, worker=worker.control, door=worker_door(worker_id="w0")
    )
    await server.start()
    channel = WorkerChannel(server.address, "w0", trust=ROUTER)
    try:
        yield PrefillClient(channel), DecodeClient(channel, SystemClock())
    finally:
        await channel.close()
        await server.stop(grace_s=0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_remote", [False, True])
def test_requests_given_up_at_random_leave_nothing(seed: int, is_remote: bool) -> None:
    async def run() -> tuple[int, int]:
        rng = random.Random(seed)
        num_cancelled = num_answered = 0

        async def one(number: int) -> None:
            nonlocal num_cancelled, num_answered
            prompt = tuple(rng.randrange(90) for _ in range(rng.randrange(1, 60)))
            asked = request(prompt, request_id=f"r{number}", max_tokens=rng.randrange(2, 20))
            gives_up_after = rng.randrange(12) if rng.random() < 0.6 else None  # steps of both engines
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            answering = asyncio.ensure_future(answer(prefill_port, decode_port, asked))
            if gives_up_after is not None:
                end = num_steps() + gives_up_after
                await eventually(lambda: answering.done() or num_steps() >= end)
                answering.cancel()
            try:
                assert await answering == expected_output(asked)
                num_answered += 1
            except asyncio.CancelledError:
                num_cancelled += 1
            except NoFreeBlocks:
                pass

        def num_steps() -> int:
            return len(prefill.runner.plans) + len(decode.runner.plans)

        async with AsyncExitStack() as stack:
            prefill, decode = await stack.enter_async_context(pair())
            prefill_port: PrefillPort = prefill.prefill
            decode_port: DecodePort = decode.decode
            if is_remote:
                prefill_port, _ = await stack.enter_async_context(over_grpc(prefill))
                _, decode_port = await stack.enter_async_context(over_grpc(decode))
            prefill.brake.step_s = decode.brake.step_s = 0.002
            running = [asyncio.ensure_future(one(number)) for number in range(60)]
            while not all(task.done() for task in running):
                for worker in (prefill, decode):
                    assert adds_up((await worker.control.audit()).blocks)
                await asyncio.sleep(0.005)
            await asyncio.gather(*running)
            assert await prefill.gets_clean()
            assert await decode.gets_clean()
        return num_cancelled, num_answered

    num_cancelled, num_answered = asyncio.run(run())
    assert num_cancelled > 0
    assert num_answered > 0


def test_a_released_ticket_in_mid_transfer_spoils_no_later_request() -> None:
    async def run() -> None:
        async with pair() as (prefill, decode):
            prefill.brake.step_s = 0.005
            num_cut = 0
            for number in range(12):
                asked = request(tuple(range(number, 60)), request_id=f"r{number}")
                ticket = await decode.decode.reserve(asked, sender_id="prefill")
                calling = asyncio.ensure_future(prefill.prefill.prefill(asked, ticket))
                await asyncio.sleep(0.001 * number)
                await decode.decode.release(ticket)
                asked = request(tuple(range(50, 80)), request_id=f"s{number}")
                assert await answer(prefill.prefill, decode.decode, asked) == expected_output(asked)
                try:
                    await calling
                except ServingError:
                    num_cut += 1
            assert num_cut > 0
            assert await prefill.gets_clean()
            assert await decode.gets_clean()

    asyncio.run(run())
