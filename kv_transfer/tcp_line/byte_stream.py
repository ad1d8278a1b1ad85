"""A connected socket on the event loop: reads into and writes from its user's memory.

asyncio's own streams copy what they are given.  Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from twinpool.core.errors import TransferError

_MAX_VIEWS = 512  # in one system call; IOV_MAX is 1024
_LINGER_S = 1.0


class StreamLost(TransferError):
    """The other end closed the connection, or is gone."""


class ByteStream:
    """One end.  One task reads; whoever likes writes.

    Args:
        end: Connected, and not blocking; the stream's own from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.fileno()
        self._loop = asyncio.get_running_loop()
        self._lost: StreamLost | None = None
        self._target = memoryview(b"")  # what is still to be read
        self._reading: asyncio.Future[None] | None = None
        self._is_watching = False  # for bytes to read
        self._is_torn = False
        self._on_unexpected: Callable[[], object] | None = None
        self._unsent: deque[memoryview | bytes] = deque()
        self._num_unsent = 0  # bytes
        self._is_blocked = False  # the peer takes nothing now
        self._sending: asyncio.Future[None] | None = None  # until everything has gone
        self._unsendable: StreamLost | None = None

    @property
    def is_whole(self) -> bool:
        """Whether both ways are open, and nobody gave up reading in the middle of something."""
        return self._lost is None and self._unsendable is None and not self._is_torn

    @property
    def is_drained(self) -> bool:
        """Whether all that was written is on its way."""
        return not self._num_unsent

    async def read_into(self, target: memoryview) -> None:
        """Fill ``target``.

        Raises:
            StreamLost: The peer said less, and will say no more.
        """
        self._on_unexpected = None
        self._target = target
        self._read_on()
        if self._target and self._lost is None:
            self._reading = self._loop.create_future()
            self._watch()
            try:
                await self._reading
            finally:
                self._is_torn = 0 < len(self._target) < len(target)
                self._reading = None
                self._target = memoryview(b"")
        if self._lost is not None:
            raise self._lost

    def write(self, *views: memoryview | bytes) -> None:
        """Send bytes after those that were written before; they are read until ``drained`` returns."""
        is_free = self.is_drained
        if self._lost is None and self._unsendable is None:
            self._unsent.extend(view for view in views if len(view))
            self._num_unsent += sum(map(len, views))
        if is_free:
            self._write_on()

    async def drained(self) -> None:
        """Return when all that was written is on its way.

        Raises:
            StreamLost: It never will be.
        """
        if not self.is_drained and not (self._lost or self._unsendable):
            if self._sending is None:
                self._sending = self._loop.create_future()
            await asyncio.shield(self._sending)
        error = self._lost or self._unsendable
        if error is not None:
            raise error

    def expect_nothing(self, on_unexpected: Callable[[], object]) -> None:
        """Call ``on_unexpected`` when the peer closes the connection or speaks before the next read."""
        self._on_unexpected = on_unexpected
        self._watch()

    def close(self) -> None:
        """Close it at once; nothing that was written is read any more.  Idempotent."""
        self._lose(StreamLost("the connection was closed at this end"))

    async def close_gently(self) -> None:
        """Close it once the peer had time to read what was written to it.

        A socket that is closed while the peer still speaks may take back what it has said itself.
        """
        scrap = memoryview(bytearray(2**16))
        with suppress(TimeoutError, StreamLost, OSError):
            async with asyncio.timeout(_LINGER_S):
                await self.drained()
                self._end.shutdown(socket.SHUT_WR)
                while True:
                    await self.read_into(scrap)
        self.close()

    def _receive(self, target: memoryview) -> int | None:
        """Read what is there, and return how much; None if there is nothing yet, 0 if there never will be."""
        try:
            return self._end.recv_into(target)
        except BlockingIOError:
            return None

    def _send(self) -> int | None:
        """Send some of what is to be sent, and return how much; None if the peer takes nothing now."""
        try:
            return self._end.sendmsg(list(islice(self._unsent, _MAX_VIEWS)))
        except BlockingIOError:
            return None

    def _watch(self) -> None:
        if not self._is_watching and self._lost is None:
            self._is_watching = True
            self._loop.add_reader(self._file, self._on_readable)

    def _on_readable(self) -> None:
        if self._reading is not None:
            self._read_on()
            if not self._target and not self._reading.done():
                self._reading.set_result(None)
        elif self._on_unexpected is None:  # what has come waits for somebody to read it
            self._is_watching = False
            self._loop.remove_reader(self._file)
        else:
            self._target = memoryview(bytearray(1))
            self._read_on()
            if self._lost is not None or not self._target:
                self._on_unexpected()

    def _read_on(self) -> None:
        try:
            while self._target:
                num_bytes = self._receive(self._target)
                if num_bytes is None:
                    return
                if num_bytes == 0:
                    raise ConnectionResetError("the peer closed the connection")
                self._target = self._target[num_bytes:]
        except OSError as error:
            self._lose(StreamLost(str(error)))

    def _write_on(self) -> None:
        try:
            while not self.is_drained:
                num_bytes = self._send()
                if num_bytes is None:
                    self._block()
                    return
                self._note_sent(num_bytes)
        except OSError as error:  # what the peer said before it left can still be read
            self._unsendable = StreamLost(str(error))
            self._forget_unsent()
        self._unblock()

    def _note_sent(self, num_bytes: int) -> None:
        self._num_unsent -= num_bytes
        if not self._num_unsent:
            self._unsent.clear()
            return
        while num_bytes:
            view = self._unsent[0]
            if num_bytes < len(view):
                self._unsent[0] = view[num_bytes:]
                return
            num_bytes -= len(view)
            self._unsent.popleft()

    def _forget_unsent(self) -> None:
        self._unsent.clear()
        self._num_unsent = 0

    def _block(self) -> None:
        if not self._is_blocked:
            self._is_blocked = True
            self._loop.add_writer(self._file, self._write_on)

    def _unblock(self) -> None:
        if self._is_blocked:
            self._is_blocked = False
            self._loop.remove_writer(self._file)
        if self._sending is not None:
            self._sending.set_result(None)
            self._sending = None

    def _lose(self, error: StreamLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        self._loop.remove_reader(self._file)
        self._forget_unsent()
        self._unblock()
        self._end.close()
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)
