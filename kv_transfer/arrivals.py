"""Connections that come in at a port, each served by a task of its own; strangers keep nobody else out.

Knows nothing of what is said on them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from twinpool.core.errors import TransferError, Untrusted
from twinpool.core.seldom import SeldomLog

_MOST_STRANGERS = 64
_RETRY_S = 0.05  # while this process has no room for one more

_log = logging.getLogger(__name__)

Known = Callable[[], None]
Serve = Callable[[socket.socket, Known], Awaitable[None]]


class Strangers:
    """Tasks of those who have not shown a right to be here; the oldest gives way to a new one."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # the oldest first: it had the most time

    def add(self, task: asyncio.Task[None]) -> None:
        """Note somebody new; the oldest is cancelled if there are too many."""
        self._tasks[task] = None
        if len(self._tasks) > _MOST_STRANGERS:
            next(iter(self._tasks)).cancel()

    def discard(self, task: asyncio.Task[None]) -> None:
        """Note that one is a stranger no more, or gone.  Idempotent."""
        self._tasks.pop(task, None)


class Arrivals:
    """Takes connections at a socket from now on, until it is closed.

    Args:
        listener: Listens, and does not block; closed with this.
        serve: Serves a connection.  It has the socket from its call on and bounds the time that a stranger
            may take; it calls its second argument once the peer is none.
    """

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        self._listener = listener
        self._serve = serve
        self._serving: set[asyncio.Task[None]] = set()
        self._strangers = Strangers()
        self._news = SeldomLog(_log)
        self._accepting = asyncio.create_task(self._accept(), name="arrivals")

    def close(self) -> None:
        """Take no more connections, and cancel those that are served.  Idempotent."""
        if self._listener.fileno() == -1:
            return
        self._accepting.cancel()
        for task in self._serving:
            task.cancel()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    async def closed(self) -> None:
        """Wait until nothing is served any more."""
        await asyncio.gather(self._accepting, *self._serving, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # this process has too many files open
                self._news.tell("nobody can connect: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._served(end))
            self._serving.add(task)
            self._strangers.add(task)
            task.add_done_callback(partial(self._note_end, end))

    async def _served(self, end: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._serve(end, lambda: self._strangers.discard(task))
        except (OSError, TransferError, Untrusted) as error:  # TimeoutError is an OSError
            self._news.tell("a connection has ended: %s", str(error) or "its peer said nothing")
            end.close()

    def _note_end(self, end: socket.socket, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._strangers.discard(task)
        if task.cancelled():  # perhaps before it began
            end.close()
        elif task.exception() is not None:
            end.close()
            _log.error("a connection was ended by a bug", exc_info=task.exception())
