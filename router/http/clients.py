"""Work that is done for a client that may leave, and answers of several choices at once.

Knows ASGI messages and generators; knows nothing of what is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Receive

from twinpool.core.errors import RequestCancelled, Unavailable

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[None, None, T]) -> T:
    """Do ``work``; stop it as soon as the client leaves, and return only when it has stopped.

    Call it after the whole request body was received.

    Raises:
        RequestCancelled: The client left.
        Unavailable: The server stops; nothing else cancels the task of a request.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestCancelled("the client left")
    except asyncio.CancelledError:
        raise Unavailable("the server stops") from None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Run all sources at once; yield their items with the index of the source, each source in its order.

    Every source runs in one task from its first item to its last.  The first error ends all of them, and
    so does closing this generator: when it is over, every source is closed.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return

    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(index, source, arrived)) for index, source in enumerate(sources)]
    for pump in pumps:
        pump.add_done_callback(arrived.put_nowait)
    try:
        running = len(pumps)
        while running:
            got = await arrived.get()
            if isinstance(got, asyncio.Task):
                running -= 1
                got.result()
            else:
                yield got
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, source: AsyncGenerator[T, None], arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]]
) -> None:
    async with aclosing(source) as items:
        async for item in items:
            arrived.put_nowait((index, item))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
