"""Connections to one server: each carries one exchange at a time, and is used again if the server lets it.

Knows HTTP's framing and nothing of what is asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from twinpool.lab.bench.response import Malformed, Response
from twinpool.lab.bench.target import Target

_MOST_UNREAD = 256  # pieces of one stream


class Exchange(Protocol):
    """One request and what comes back, until ``ended``, or until ``ConnectionPool.give_up`` is told of it."""

    request: bytes

    def started(self, now_s: float) -> None:
        """A connection is there or is being opened; it comes again if the connection was an old one."""
        ...

    def response(self) -> Response:
        """Return what is to be fed with the bytes that come; a new one for each connection."""
        ...

    def received(self, now_s: float) -> None:
        """What the response is fed with next came at this time."""
        ...

    def ended(self, error: str, now_s: float, reason: str = "") -> None:
        """Say that it is over; ``error`` is empty, or one of connect, disconnected and malformed."""
        ...


class Connection(asyncio.Protocol):
    """One connection of a pool.

    The pieces of a stream are stamped as they come and read together a while later, at its end at the latest:
    to read one takes a few microseconds, and to come back to the reading code for each one takes many.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._now_s = asyncio.get_running_loop().time
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._response = Response(_drop)
        self._unread: list[tuple[float, bytes]] = []
        self._is_stream = False
        self._is_used = False  # an exchange has ended on it
        self._has_received = False  # anything in this exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "TCP gives a stream"
        self._transport = transport

    def begin(self, exchange: Exchange) -> None:
        """Send the request of an exchange; there is no other."""
        assert self._transport is not None and self._exchange is None, "the connection is in use"
        self._exchange, self._response = exchange, exchange.response()
        self._is_stream = self._has_received = False
        self._transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        self._unread.append((self._now_s(), data))
        if self._is_stream and len(self._unread) < _MOST_UNREAD and not _may_end(data):
            return
        if self._exchange is None:  # nobody asked
            self.abort()
            return
        now_s = self._unread[-1][0]
        problem = self._read(self._exchange)
        if problem:
            self._end("malformed", now_s, problem)
            self.abort()
        elif self._response.is_ended:
            may_follow = self._response.may_follow
            self._end("", now_s)
            if may_follow:
                self._pool.free(self)
            else:
                self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is not None:
            problem = self._read(exchange)
            self._response.close()
            if self._is_used and not self._has_received:
                # The server closed it between two requests, as it may at any time: RFC 9112, 9.3.1.
                self._exchange = None
                self._pool.begin_anew(exchange)
            elif self._response.is_ended:
                self._end("", self._now_s())
            else:
                self._end("malformed" if problem else "disconnected", self._now_s(), problem)
        self._pool.lost(self)

    def abort(self) -> None:
        """Close at once; an exchange that goes on knows all that came, and is told nothing any more."""
        if self._exchange is not None:
            self._read(self._exchange)
            self._exchange = None
        self._pool.lost(self)
        if self._transport is not None:
            self._transport.abort()

    def _read(self, exchange: Exchange) -> str:
        """Read what came; return why it cannot be read, or nothing."""
        unread, self._unread = self._unread, []
        self._has_received = self._has_received or bool(unread)
        try:
            for now_s, data in unread:
                exchange.received(now_s)
                self._response.feed(data)
        except (Malformed, ValueError) as error:
            return str(error) or "no reason"
        self._is_stream = self._response.is_chunked
        return ""

    def _end(self, error: str, now_s: float, reason: str = "") -> None:
        exchange, self._exchange = self._exchange, None
        assert exchange is not None, "an exchange ends once"
        self._is_used, self._is_stream = True, False
        self._pool.forget(exchange)
        exchange.ended(error, now_s, reason)


def _may_end(data: bytes) -> bool:
    """Say whether a piece can be the last one of a chunked body; of a short one the end may be cut in two."""
    return data.endswith(b"\r\n\r\n") or len(data) < len(b"0\r\n\r\n")


def _drop(data: bytes) -> None:
    """Take what nobody asked for."""


class ConnectionPool:
    """Gives each exchange a connection: an idle one, a new one, or the next free one if there are too many.

    Args:
        target: Where they lead.
        most: Connections at one time.
        connect_timeout_s: To open one.
    """

    def __init__(self, target: Target, *, most: int, connect_timeout_s: float) -> None:
        self._target = target
        self._most = most
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._address = target.host  # once one is open: where it leads, so that no name is looked up again
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # the one that was used last is the last
        self._carried: dict[Exchange, Connection] = {}
        self._opening: dict[Exchange, asyncio.Task[None]] = {}
        self._waiting: deque[Exchange] = deque()

    def begin(self, exchange: Exchange) -> None:
        """Send an exchange's request as soon as there is a connection; returns at once."""
        if self._idle:
            connection, _ = self._idle.popitem()
            exchange.started(self._loop.time())
            self._carry(exchange, connection)
        elif len(self._open) + len(self._opening) < self._most:
            self.begin_anew(exchange)
        else:
            self._waiting.append(exchange)

    def begin_anew(self, exchange: Exchange) -> None:
        """Send an exchange's request over a connection of its own."""
        self._carried.pop(exchange, None)
        exchange.started(self._loop.time())
        self._opening[exchange] = self._loop.create_task(self._connect(exchange))

    def give_up(self, exchange: Exchange) -> None:
        """Close the connection of an exchange, which is told nothing any more."""
        if exchange in self._carried:
            self._carried.pop(exchange).abort()
        elif exchange in self._opening:
            self._opening.pop(exchange).cancel()
            self._next()
        elif exchange in self._waiting:
            self._waiting.remove(exchange)

    def free(self, connection: Connection) -> None:
        """Take back a connection whose exchange has ended."""
        self._idle[connection] = None
        self._next()

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed; this may be told twice."""
        if connection in self._open:
            self._open.remove(connection)
            self._idle.pop(connection, None)
            self._next()

    def forget(self, exchange: Exchange) -> None:
        """Forget an exchange that has ended by itself."""
        self._carried.pop(exchange, None)

    async def close(self) -> None:
        """Close everything; exchanges that go on are told nothing any more."""
        self._waiting.clear()
        opening = list(self._opening.values())
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        for connection in list(self._open):
            connection.abort()

    def _carry(self, exchange: Exchange, connection: Connection) -> None:
        self._carried[exchange] = connection
        connection.begin(exchange)

    def _next(self) -> None:
        if self._waiting:
            self.begin(self._waiting.popleft())

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    self._address,
                    self._target.port,
                    ssl=self._target.tls,
                    server_hostname=None if self._target.tls is None else self._target.host,
                )
        except (OSError, TimeoutError) as error:
            self._opening.pop(exchange, None)
            reason = str(error) or f"not within {self._connect_timeout_s} s"
            exchange.ended("connect", self._loop.time(), reason)
            self._next()
            return
        self._opening.pop(exchange, None)
        self._address = transport.get_extra_info("peername")[0]
        self._open.add(connection)
        self._carry(exchange, connection)
