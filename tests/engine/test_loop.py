"""EngineLoop: coroutines ask, one thread runs, and whatever ends, everybody who waits is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tests.engine.fake_runner import FakeRunner, expected_output, next_token
from tests.engine.world import engine, nothing_is_held, prompt
from twinpool.core.clock import ManualClock
from twinpool.core.errors import (
    DeadlineExceeded,
    InternalError,
    NoFreeBlocks,
    PromptTooLong,
    RequestCancelled,
    WorkerDraining,
)
from twinpool.core.request import TokenOutput
from twinpool.engine.engine import Engine
from twinpool.engine.loop import EngineLoop, SequenceHandle
from twinpool.engine.plan import BatchPlan

TIMEOUT_S = 20.0  # a test that hangs fails


class Gate:
    """Holds the engine thread at the start of a step, after ``num_free_steps``, until it is opened."""

    def __init__(self, *, num_free_steps: int = 0) -> None:
        self._num_free_steps = num_free_steps
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, plan: BatchPlan) -> None:
        if self._num_free_steps:
            self._num_free_steps -= 1
            return
        self.entered.set()
        assert self.opened.wait(TIMEOUT_S), "nobody opened the gate"


@asynccontextmanager
async def running(world: Engine, clock: ManualClock | None = None) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(world, clock or ManualClock())
    await loop.start()
    try:
        yield loop
    finally:
        await loop.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await test()

    asyncio.run(main())


async def wait(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, TIMEOUT_S)


async def collect(handle: SequenceHandle) -> list[TokenOutput]:
    async with aclosing(handle.outputs()) as outputs:
        return [output async for output in outputs]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


def test_twenty_answers_at_once_are_those_of_one_at_a_time() -> None:
    async def test() -> None:
        async with running(engine(FakeRunner(), num_blocks=20)) as loop:
            requests = [prompt(3 + i, request_id=f"r{i}", max_tokens=10) for i in range(20)]
            handles = [await loop.submit(request) for request in requests]
            answers = await asyncio.gather(*(collect(handle) for handle in handles))

            assert [[o.token_id for o in answer] for answer in answers] == [*map(expected_output, requests)]
            audit = await loop.audit()
            assert (audit.sequences, audit.blocks.owned) == (0, 0)
            assert loop.load().counters["finished_length"] == 20

    run(test)
    assert engine_threads() == []


def test_a_refusal_reaches_the_caller_and_leaves_nothing() -> None:
    async def test() -> None:
        async with running(engine(FakeRunner(), num_blocks=4)) as loop:
            with pytest.raises(PromptTooLong):
                await loop.submit(prompt(100))
            await loop.reserve(prompt(10))
            with pytest.raises(NoFreeBlocks):
                await loop.reserve(prompt(10))

            assert (await loop.audit()).sequences == 1

    run(test)


def test_a_prompt_that_leaves_tells_its_layers_then_gives_one_token_and_keeps_its_blocks() -> None:
    async def test() -> None:
        runner = FakeRunner(num_layers=2)
        async with running(engine(runner, max_chunk_tokens=5)) as loop:
            written: list[tuple[int, int, tuple[int, ...]]] = []
            event_loop_thread = threading.get_ident()

            def on_written(layer: int, num_tokens: int) -> None:
                assert threading.get_ident() == event_loop_thread
                written.append((layer, num_tokens, handle.blocks))

            request = prompt(8)
            handle = await loop.submit(request, on_written=on_written)
            assert written == []  # never before the caller holds the handle
            (first,) = await collect(handle)

            assert first.token_id == expected_output(request)[0]
            blocks = handle.blocks
            assert written == [(0, 5, blocks), (1, 5, blocks), (0, 8, blocks), (1, 8, blocks)]
            assert runner.read(blocks, 8) == list(request.prompt_ids)
            assert (await loop.audit()).blocks.owned == 2
            await loop.drained(handle)
            await loop.drained(handle)
            assert nothing_is_held((await loop.audit()).blocks)

    run(test)


def test_a_reserved_sequence_decodes_once_its_kv_is_there() -> None:
    async def test() -> None:
        runner = FakeRunner()
        async with running(engine(runner)) as loop:
            request = prompt(7, max_tokens=5)
            handle = await loop.reserve(request)
            runner.fill(handle.blocks, request.prompt_ids)
            first = TokenOutput(index=0, token_id=next_token(request.prompt_ids))
            await loop.arrived(handle, first)
            answer = await collect(handle)

            assert [first.token_id, *(o.token_id for o in answer)] == expected_output(request)
            await loop.drained(handle)
            assert nothing_is_held((await loop.audit()).blocks)

    run(test)


def test_a_reservation_that_is_over_cannot_arrive() -> None:
    async def test() -> None:
        async with running(engine(FakeRunner())) as loop:
            handle = await loop.reserve(prompt(7))
            await loop.abort(handle)
            assert (await loop.audit()).blocks.draining == 2
            with pytest.raises(RequestCancelled, match="draining"):
                await loop.arrived(handle, TokenOutput(index=0, token_id=1))
            await loop.drained(handle)
            with pytest.raises(RequestCancelled, match="the reservation is over"):
                await loop.arrived(handle, TokenOutput(index=0, token_id=1))

            assert (await loop.audit()).sequences == 0

    run(test)


def test_a_consumer_that_leaves_aborts_its_sequence() -> None:
    async def test() -> None:
        gate = Gate(num_free_steps=1)
        async with running(engine(FakeRunner(before_step=gate), num_blocks=100)) as loop:
            handle = await loop.submit(prompt(3, max_tokens=300))
            async with aclosing(handle.outputs()) as outputs:
                await anext(outputs)
            gate.opened.set()

            assert await loop.wait_idle(timeout_s=TIMEOUT_S)
            assert loop.load().counters["aborted"] == 1
            assert nothing_is_held((await loop.audit()).blocks)

    run(test)


def test_a_cancelled_consumer_aborts_its_sequence() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(engine(FakeRunner(before_step=gate))) as loop:
            handle = await loop.submit(prompt(3))
            consumer = asyncio.create_task(collect(handle))
            await wait(gate.entered)
            consumer.cancel()
            with pytest.raises(asyncio.CancelledError):
                await consumer
            gate.opened.set()

            assert await loop.wait_idle(timeout_s=TIMEOUT_S)
            assert loop.load().counters["aborted"] == 1

    run(test)


def test_an_abort_from_elsewhere_ends_the_wait_of_the_consumer() -> None:
    async def test() -> None:
        async with running(engine(FakeRunner(), num_blocks=100)) as loop:
            reservation = await loop.reserve(prompt(3))
            consumer = asyncio.create_task(collect(reservation))
            await loop.abort(reservation)
            await loop.abort(reservation)

            with pytest.raises(RequestCancelled):
                await consumer

    run(test)


@pytest.mark.parametrize("kind", ["submit", "submit with destination", "reserve"])
def test_a_cancelled_request_to_the_engine_leaves_nothing(kind: str) -> None:
    async def test() -> None:
        gate = Gate()
        async with running(engine(FakeRunner(before_step=gate), num_blocks=100)) as loop:
            await loop.submit(prompt(3, request_id="busy", max_tokens=2))
            await wait(gate.entered)
            writes: list[int] = []
            calls: dict[str, Callable[[], Awaitable[SequenceHandle]]] = {
                "submit": lambda: loop.submit(prompt(3, max_tokens=50)),
                "submit with destination": lambda: loop.submit(
                    prompt(3), on_written=lambda layer, num_tokens: writes.append(layer)
                ),
                "reserve": lambda: loop.reserve(prompt(3)),
            }
            call = asyncio.ensure_future(calls[kind]())
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            gate.opened.set()

            assert await loop.wait_idle(timeout_s=TIMEOUT_S)
            assert nothing_is_held((await loop.audit()).blocks)
            assert writes == []

    run(test)


def test_deadlines_are_kept_without_any_traffic() -> None:
    async def test() -> None:
        clock = ManualClock()
        async with running(engine(FakeRunner(), clock=clock), clock) as loop:
            handle = await loop.reserve(prompt(7, timeout_s=5.0))
            await asyncio.sleep(0.02)  # the step after the command is over: only the sweep is left
            clock.advance(5.0)
            with pytest.raises(DeadlineExceeded):
                await collect(handle)

            assert (await loop.audit()).blocks.draining == 2

    run(test)


def test_load_and_stall_can_be_read_while_the_engine_hangs() -> None:
    async def test() -> None:
        clock = ManualClock()
        gate = Gate()
        async with running(engine(FakeRunner(before_step=gate), clock=clock), clock) as loop:
            clock.advance(60.0)
            assert loop.load().stalled_s == 0.0  # idle is not stalled
            handle = await loop.submit(prompt(3))
            await wait(gate.entered)
            clock.advance(7.0)

            assert loop.load().stalled_s == 7.0
            gate.opened.set()
            await collect(handle)
            await loop.audit()
            load = loop.load()
            assert (load.stalled_s, load.running, load.queued, load.free_blocks) == (0.0, 0, 0, 8)

    run(test)


def test_busy_is_the_time_in_steps_that_ran_something() -> None:
    async def test() -> None:
        clock = ManualClock()
        runner = FakeRunner(before_step=lambda plan: clock.advance(0.25))
        async with running(engine(runner, clock=clock), clock) as loop:
            clock.advance(60.0)
            await collect(await loop.submit(prompt(3, max_tokens=4)))
            clock.advance(60.0)
            await loop.audit()
            await loop.audit()

            assert loop.load().counters["busy_us"] == 4 * 250_000

    run(test)


def test_a_draining_loop_refuses_finishes_and_becomes_idle() -> None:
    async def test() -> None:
        gate = Gate()
        async with running(engine(FakeRunner(before_step=gate))) as loop:
            handle = await loop.submit(prompt(3))
            loop.start_draining()

            assert loop.load().draining
            with pytest.raises(WorkerDraining):
                await loop.submit(prompt(3))
            with pytest.raises(WorkerDraining):
                await loop.reserve(prompt(3))
            await wait(gate.entered)
            assert not await loop.wait_idle(timeout_s=0.01)
            gate.opened.set()
            assert len(await collect(handle)) == 4
            assert await loop.wait_idle(timeout_s=TIMEOUT_S)

    run(test)


def test_closing_ends_the_thread_and_everything_that_is_open() -> None:
    async def test() -> None:
        loop = EngineLoop(engine(FakeRunner()), ManualClock())
        await loop.start()
        reservation = await loop.reserve(prompt(3))
        consumer = asyncio.create_task(collect(reservation))
        idle = asyncio.create_task(loop.wait_idle(timeout_s=TIMEOUT_S))
        await asyncio.sleep(0)
        await loop.close()
        await loop.close()

        with pytest.raises(WorkerDraining):
            await consumer
        with pytest.raises(WorkerDraining):
            await idle
        with pytest.raises(WorkerDraining):
            await loop.submit(prompt(3))
        await loop.abort(reservation)
        await loop.drained(reservation)

    run(test)
    assert engine_threads() == []


def test_closing_does_not_wait_for_a_step_that_never_ends() -> None:
    gate = Gate()

    async def test() -> None:
        loop = EngineLoop(engine(FakeRunner(before_step=gate)), ManualClock())
        await loop.start()
        handle = await loop.submit(prompt(3))
        consumer = asyncio.create_task(collect(handle))
        await wait(gate.entered)
        await loop.close(timeout_s=0.01)

        with pytest.raises(WorkerDraining):
            await consumer

    run(test)
    threads = engine_threads()
    gate.opened.set()  # its event loop is gone by now: it ends by itself
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert engine_threads() == []


class _Broken(FakeRunner):
    """Answers a plan with too few results: a bug that no single request can be blamed for."""

    def run(self, plan: BatchPlan, on_layer: Any) -> tuple[Any, ...]:
        return super().run(plan, on_layer)[1:]


def test_an_engine_thread_that_dies_tells_everybody() -> None:
    async def test() -> None:
        clock = ManualClock()
        async with running(engine(_Broken(), clock=clock), clock) as loop:
            reservation = await loop.reserve(prompt(3, request_id="innocent"))
            handle = await loop.submit(prompt(3))
            with pytest.raises(InternalError, match="the engine died: AssertionError"):
                await collect(handle)
            with pytest.raises(InternalError):
                await collect(reservation)
            assert "1 items gave 0 results" in str(await loop.failed())
            with pytest.raises(InternalError):
                await loop.submit(prompt(3))
            await loop.abort(reservation)
            clock.advance(9.0)

            load = loop.load()
            assert load.draining
            assert load.stalled_s == 9.0

    run(test)
    assert engine_threads() == []


def test_a_listener_that_fails_ends_its_own_sequence_only() -> None:
    async def test() -> None:
        async with running(engine(FakeRunner())) as loop:

            def on_written(layer: int, num_tokens: int) -> None:
                raise ZeroDivisionError

            broken = await loop.submit(prompt(7, request_id="broken"), on_written=on_written)
            good = await loop.submit(prompt(7, request_id="good"))

            with pytest.raises(InternalError, match="on_written failed: ZeroDivisionError"):
                await collect(broken)
            assert len(await collect(good)) == 4
            await loop.drained(broken)
            assert nothing_is_held((await loop.audit()).blocks)

    run(test)
