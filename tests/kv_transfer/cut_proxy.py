"""A TCP proxy that spoils what goes through it: late, cut short, flipped, frozen or refused.

Knows nothing of what the bytes mean.  Everything can be set at any time and holds from then on;
"upstream" is the direction from who connects to the target.
"""

from __future__ import annotations

import asyncio


class CutProxy:
    """Stands between a client and ``target``, a ``host:port``.

    Attributes:
        delay_s: How long each piece waits before it goes on, in both directions.
        flip_at_bit: Which of the upstream bits from now on is flipped, once; None for none.
        cut_after_bytes: After how many more upstream bytes every connection is reset; None for never.
        is_refusing: New connections are reset.
        passed_bytes: Upstream bytes that went through since the start.
        heard: Set it to a bytearray, and what passes upstream is kept there.
        num_flipped: Bits flipped since the start.
        num_connections: Connections made since the start.
    """

    def __init__(self, target: str) -> None:
        self.delay_s = 0.0
        self.flip_at_bit: int | None = None
        self.cut_after_bytes: int | None = None
        self.is_refusing = False
        self.passed_bytes = 0
        self.heard: bytearray | None = None
        self.num_flipped = 0
        self.num_connections = 0
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._moving = asyncio.Event()
        self._moving.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CutProxy:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *reason: object) -> None:
        self._server.close()
        self.reset()
        self.thaw()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    @property
    def address(self) -> str:
        """Where clients connect to."""
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def freeze(self) -> None:
        """Let nothing through, in either direction, while all connections stay open."""
        self._moving.clear()

    def thaw(self) -> None:
        """Let everything through again, what was held back first."""
        self._moving.set()

    def reset(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self.num_connections += 1
        writers = {writer}
        try:
            if self.is_refusing:
                return
            there, back = await asyncio.open_connection(self._host, self._port)
            writers.add(back)
            self._writers |= writers
            await asyncio.gather(self._upstream(reader, back), self._downstream(there, writer))
        except OSError:
            pass  # one side is gone; so is the other now
        finally:
            self._handlers.discard(task)
            self._writers -= writers
            for each in writers:
                each.transport.abort()

    async def _upstream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await self._next(reader):
            data = self._spoiled(data)
            self.passed_bytes += len(data)
            if self.heard is not None:
                self.heard += data
            writer.write(data)
            await writer.drain()
            if self.cut_after_bytes == 0:
                self.cut_after_bytes = None
                self.reset()
        writer.write_eof()

    async def _downstream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await self._next(reader):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        data = await reader.read(65536)
        await asyncio.sleep(self.delay_s)
        await self._moving.wait()
        return data

    def _spoiled(self, data: bytes) -> bytes:
        if self.cut_after_bytes is not None:
            data = data[: self.cut_after_bytes]
            self.cut_after_bytes -= len(data)
        if self.flip_at_bit is not None:
            if self.flip_at_bit < 8 * len(data):
                spoiled = bytearray(data)
                spoiled[self.flip_at_bit // 8] ^= 1 << self.flip_at_bit % 8
                self.flip_at_bit = None
                self.num_flipped += 1
                return bytes(spoiled)
            self.flip_at_bit -= 8 * len(data)
        return data
