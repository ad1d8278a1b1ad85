"""The sender's half of a connection, for one part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from kv_transfer.config import MAX_MESSAGE_BYTES
from kv_transfer.credit import Credit
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.messages import header_of, hello_to_bytes, read_reply
from kv_transfer.tcp_line.byte_stream import ByteStream, StreamLost
from kv_transfer.tcp_line.idle import IdleStreams
from kv_transfer.tcp_line.lengths import NOTHING, read_length, read_small, write_with_length
from twinpool.core.errors import TransferError

_MAX_REPLY_BYTES = 2**16


class TcpChannel:
    """The sender's half of a connection, for one part."""

    def __init__(self, stream: ByteStream, address: str, idle: IdleStreams) -> None:
        self._stream = stream
        self._address = address
        self._idle = idle
        self._is_done = False
        self._credit = Credit()
        self._met = asyncio.Event()
        self._replies = asyncio.create_task(self._read_replies())
        self._replies.add_done_callback(self._note_end)

    def on_end(self, callback: Callable[[TcpChannel], object]) -> None:
        """Call back once the receiver will say no more."""
        self._replies.add_done_callback(lambda task: callback(self))

    async def meet(self, hello: Hello) -> None:
        """Name the part and wait for the first credit."""
        write_with_length(self._stream, hello_to_bytes(hello))
        await self._met.wait()
        if self._replies.done():
            await self.ended()

    async def send(self, frames: Sequence[Frame]) -> None:
        size = sum(frame.payload.nbytes for frame in frames)
        await self._credit.take(size)
        if self._replies.done():
            await self.ended()
            return
        header = header_of(frames)
        if len(header) + size > MAX_MESSAGE_BYTES:
            raise TransferError(f"a message of {size} bytes is larger than {MAX_MESSAGE_BYTES}")
        views = (view for frame in frames for view in frame.payload.views())
        write_with_length(self._stream, header, *views)
        with suppress(StreamLost):  # what the receiver has said before it left tells more
            await self._stream.drained()
            return
        await self.ended()

    async def finish(self) -> None:
        if not self._is_done:
            write_with_length(self._stream, NOTHING)
        await self.ended()
        if not self._is_done:
            self._is_done = True
            self._idle.keep(self._address, self._stream)

    async def ended(self) -> None:
        await asyncio.wait({self._replies})
        if self._replies.cancelled():
            raise TransferError("the transfer was aborted")
        self._replies.result()

    async def abort(self) -> None:
        self._replies.cancel()
        await asyncio.wait({self._replies})
        if not self._is_done:
            self._stream.close()

    async def _read_replies(self) -> None:
        """Pass on credit until the receiver ends the transfer; return when it is whole."""
        while True:
            length = await read_length(self._stream)
            reply = await read_small(self._stream, length, limit=_MAX_REPLY_BYTES)
            credit_bytes = read_reply(reply, address=self._address)
            if credit_bytes is None:
                return
            self._credit.grant(credit_bytes)
            self._met.set()

    def _note_end(self, replies: asyncio.Task[None]) -> None:
        self._credit.close()
        self._met.set()
        if not replies.cancelled():
            replies.exception()
