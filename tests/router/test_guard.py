"""Guard: a wait ends with the error of what it waits for, and a cancellation from outside stays one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from router.guard import Deadline, Guard, guarded_stream
from twinpool.core.clock import ManualClock, SystemClock
from twinpool.core.errors import DeadlineExceeded, WorkerLost


class Source:
    """Something that can fail."""

    def __init__(self) -> None:
        self.guards: set[Guard] = set()

    def watch(self, guard: Guard) -> None:
        self.guards.add(guard)

    def unwatch(self, guard: Guard) -> None:
        self.guards.remove(guard)

    def fail(self) -> None:
        for guard in list(self.guards):
            guard.trip(WorkerLost("decode-0", "gone"))


def test_a_failure_ends_the_wait_and_the_task_is_not_cancelled_afterwards() -> None:
    async def main() -> None:
        source = Source()
        asyncio.get_running_loop().call_later(0.01, source.fail)
        with pytest.raises(WorkerLost, match="gone"), Guard(source, timeout_s=5.0):
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        assert source.guards == set()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_failure_caused_by_the_waiting_task_itself_is_noticed() -> None:
    async def main() -> None:
        source = Source()
        with pytest.raises(WorkerLost), Guard(source, timeout_s=5.0):
            source.fail()
            await asyncio.Event().wait()
        with Guard(source, timeout_s=5.0):
            source.fail()
        await asyncio.sleep(0)  # the trip came too late to cancel anybody

    asyncio.run(main())


def test_the_time_is_over() -> None:
    async def main() -> None:
        with pytest.raises(DeadlineExceeded), Guard(timeout_s=0.01):
            await asyncio.Event().wait()
        with pytest.raises(DeadlineExceeded), Guard(timeout_s=0.0):
            pass

    asyncio.run(main())


def test_a_cancellation_from_outside_stays_a_cancellation() -> None:
    async def main() -> None:
        source = Source()

        async def wait() -> None:
            with Guard(source, timeout_s=5.0):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        source.fail()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(main())


def test_an_error_of_the_block_itself_wins() -> None:
    async def main() -> None:
        source = Source()
        with pytest.raises(KeyError), Guard(source, timeout_s=5.0):
            source.fail()
            raise KeyError("mine")

    asyncio.run(main())


def test_a_stream_is_guarded_while_it_is_waited_for_and_not_while_it_is_read() -> None:
    async def main() -> None:
        first_only, always = Source(), Source()
        is_closed = asyncio.Event()

        async def numbers() -> AsyncGenerator[int, None]:
            try:
                yield 1
                yield 2
                await asyncio.Event().wait()
            finally:
                is_closed.set()

        deadline = Deadline(SystemClock(), timeout_s=5.0)
        stream = guarded_stream(numbers(), always, also_first=(first_only,), deadline=deadline)
        assert await anext(stream) == 1
        assert (first_only.guards, always.guards) == (set(), set())
        assert await anext(stream) == 2
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert (len(first_only.guards), len(always.guards)) == (0, 1)
        always.fail()
        with pytest.raises(WorkerLost):
            await waiting
        assert is_closed.is_set()

    asyncio.run(main())


def test_a_deadline_comes_nearer_with_its_clock() -> None:
    clock = ManualClock(100.0)
    deadline = Deadline(clock, timeout_s=3.0)

    clock.advance(2.0)

    assert deadline.left_s() == 1.0
    clock.advance(2.0)
    assert deadline.left_s() == -1.0
