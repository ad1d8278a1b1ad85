"""Work that is done for a client that may leave, and answers of several choices at once.

Knows ASGI messages and generators; knows nothing of what is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import TypeVar

from starlette.types import Message, Receive, Send

from twinpool.core.errors import RequestCancelled, Unavailable

MAX_AHEAD = 256  # items that the sources of one client may be ahead of what it reads
MAX_AT_ONCE = 32  # sources of one client that run together, so that it cannot fill the router's queue alone

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


def in_time(send: Send, timeout_s: float) -> Send:
    """Return a ``send`` that gives a client up which does not read for ``timeout_s``.

    Raises (the returned function):
        RequestCancelled: The client did not read.
    """

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await send(message)
        except TimeoutError:
            raise RequestCancelled(f"the client has read nothing for {timeout_s:g} s") from None

    return send_in_time


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Run the sources together; yield their items with the index of the source, each source in its order.

    Every source runs in one task from its first item to its last, and waits while the consumer does not
    keep up.  At most MAX_AT_ONCE run at a time, the first ones first.  The first error ends all of them,
    and so does closing this generator: when it is over, every source is closed.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return

    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    room, turns = asyncio.Semaphore(MAX_AHEAD), asyncio.Semaphore(MAX_AT_ONCE)
    pumps = [asyncio.create_task(_pump(i, source, arrived, room, turns)) for i, source in enumerate(sources)]
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
                room.release()
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    source: AsyncGenerator[T, None],
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]],
    room: asyncio.Semaphore,
    turns: asyncio.Semaphore,
) -> None:
    async with aclosing(source) as items, turns:
        async for item in items:
            await room.acquire()
            arrived.put_nowait((index, item))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
