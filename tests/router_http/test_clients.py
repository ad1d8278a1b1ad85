"""merged and while_connected: everything is closed when it is over, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.types import Message

from router.http.clients import MAX_AHEAD, MAX_AT_ONCE, in_time, merged, while_connected
from twinpool.core.errors import InternalError, RequestCancelled, Unavailable


class Sources:
    """Counts what is open and what was given."""

    def __init__(self) -> None:
        self.num_open = 0
        self.most_open = 0
        self.num_given = 0

    async def count(self, number: int, *, fails: bool = False) -> AsyncGenerator[int, None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for item in range(number):
                await asyncio.sleep(0)
                self.num_given += 1
                yield item
            if fails:
                raise InternalError("failed")
        finally:
            await asyncio.sleep(0)
            self.num_open -= 1


@pytest.mark.parametrize("num_sources", [1, 3])
def test_each_sources_items_come_in_its_order(num_sources: int) -> None:
    async def run() -> tuple[list[tuple[int, int]], int]:
        sources = Sources()
        items = [item async for item in merged([sources.count(5) for _ in range(num_sources)])]
        return items, sources.num_open

    items, num_open = asyncio.run(run())

    for index in range(num_sources):
        assert [item for source, item in items if source == index] == [0, 1, 2, 3, 4]
    assert num_open == 0


@pytest.mark.parametrize("num_sources", [1, 3])
def test_closing_early_closes_every_source(num_sources: int) -> None:
    async def run() -> tuple[int, int]:
        sources = Sources()
        async with aclosing(merged([sources.count(10**6) for _ in range(num_sources)])) as items:
            async for _ in items:
                break
        return sources.num_open, len(asyncio.all_tasks())

    assert asyncio.run(run()) == (0, 1)


def test_one_error_ends_all() -> None:
    async def run() -> int:
        sources = Sources()
        with pytest.raises(InternalError, match="failed"):
            async for _ in merged([sources.count(10**6), sources.count(3, fails=True)]):
                pass
        return sources.num_open

    assert asyncio.run(run()) == 0


def test_sources_wait_for_a_consumer_that_does_not_keep_up() -> None:
    async def run() -> int:
        sources = Sources()
        async with aclosing(merged([sources.count(10**6), sources.count(10**6)])) as items:
            await anext(items)
            await asyncio.sleep(0.05)
            for _ in range(10 * MAX_AHEAD):
                await asyncio.sleep(0)
            return sources.num_given

    assert asyncio.run(run()) <= MAX_AHEAD + 3


def test_only_so_many_sources_run_at_once_and_all_of_them_run_to_their_end() -> None:
    async def run() -> tuple[int, int, int]:
        sources = Sources()
        items = merged([sources.count(3) for _ in range(3 * MAX_AT_ONCE)])
        given = [item async for item in items]
        return len(given), sources.most_open, sources.num_open

    assert asyncio.run(run()) == (9 * MAX_AT_ONCE, MAX_AT_ONCE, 0)


def test_work_stops_before_the_news_of_a_client_that_left_is_told() -> None:
    async def run() -> list[str]:
        ends: list[str] = []
        left = asyncio.Event()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            left.set()
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                ends.append("stopped")

        with pytest.raises(RequestCancelled, match="the client left"):
            await while_connected(receive, work())
        return ends

    assert asyncio.run(run()) == ["stopped"]


def test_a_stopping_server_is_unavailable_to_its_clients() -> None:
    async def run() -> None:
        async def receive() -> Message:
            return await asyncio.Future()

        task = asyncio.create_task(while_connected(receive, asyncio.sleep(3600)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(Unavailable, match="the server stops"):
            await task

    asyncio.run(run())


def test_a_send_that_takes_too_long_gives_the_client_up() -> None:
    async def send(message: Message) -> None:
        await asyncio.sleep(3600)

    with pytest.raises(RequestCancelled, match=r"has read nothing for 0\.01 s"):
        asyncio.run(in_time(send, 0.01)({"type": "http.response.body"}))
