"""The receiver's half of connections: one part after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from kv_transfer.config import MAX_MESSAGE_BYTES, TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.intake import take_in
from kv_transfer.messages import MAX_HELLO_BYTES, credit_reply, end_reply, hello_from_bytes, unpack
from kv_transfer.tcp_line.byte_stream import ByteStream, StreamLost
from kv_transfer.tcp_line.lengths import read_length, read_small, write_with_length
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferDamaged, TransferError

_FORGOTTEN_S = 120.0  # a connection that its sender left unused for so long is closed
_NUM_BUFFERS = 4  # kept for the next messages


class Incoming:
    """Takes in what comes over all connections of one transport.

    Args:
        sink: Takes the frames.
        config: Credit, and how long a sender may take to say who it is.
    """

    def __init__(self, sink: FrameSink, config: TransferConfig) -> None:
        self._sink = sink
        self._config = config
        self._buffers: list[memoryview] = []  # to be read into; new memory would have to be faulted in

    async def first_hello(self, stream: ByteStream) -> Hello:
        """Read who a new peer is.

        Raises:
            TransferDamaged: It does not say.
            StreamLost: It left.
        """
        return await _read_hello(stream, await read_length(stream))

    async def take(self, stream: ByteStream, hello: Hello, *, on_admitted: Callable[[], object]) -> None:
        """Take in parts, beginning with the one of ``hello``, until the connection is of no more use.

        Raises:
            TransferDamaged: The peer says what no sender says.
            StreamLost: It left.
            TimeoutError: It was silent for too long.
        """
        while await self._take_part(stream, hello, on_admitted):
            length = 0
            try:
                async with asyncio.timeout(_FORGOTTEN_S):
                    while not length:  # the sender may say that it has sent everything when that is known
                        length = await read_length(stream)
            except asyncio.CancelledError:  # this worker closes; the last part's end may not have left yet
                await stream.close_gently()
                raise
            async with asyncio.timeout(self._config.connect_timeout_s):
                hello = await _read_hello(stream, length)

    async def _take_part(self, stream: ByteStream, hello: Hello, on_admitted: Callable[[], object]) -> bool:
        """Take in one part; return whether another one can follow."""

        async def grant(num_bytes: int) -> None:
            write_with_length(stream, credit_reply(num_bytes))
            await stream.drained()

        try:
            self._sink.admit(hello, transport="tcp")
            on_admitted()
            # Not awaited: from here on only the intake may end, which tells the sink.
            write_with_length(stream, credit_reply(self._config.credit_bytes))
            await take_in(self._sink, hello, self._frames(stream, hello), grant)
        except TransferError as error:
            write_with_length(stream, end_reply(error))
            await stream.close_gently()
            return False
        write_with_length(stream, end_reply(None))
        return stream.is_whole

    async def _frames(self, stream: ByteStream, hello: Hello) -> AsyncGenerator[Sequence[Frame], None]:
        buffer = self._buffers.pop() if self._buffers else memoryview(b"")
        try:
            while length := await read_length(stream):
                if length > MAX_MESSAGE_BYTES:
                    raise TransferDamaged(f"a message of {length} bytes is larger than {MAX_MESSAGE_BYTES}")
                if length > len(buffer):
                    buffer = np.empty(length, np.uint8).data
                await stream.read_into(buffer[:length])
                yield unpack(buffer[:length], hello)
        except StreamLost as error:
            raise TransferError(f"the sender stopped: {error}") from None
        finally:
            if len(self._buffers) < _NUM_BUFFERS:
                self._buffers.append(buffer)


async def _read_hello(stream: ByteStream, length: int) -> Hello:
    return hello_from_bytes(await read_small(stream, length, limit=MAX_HELLO_BYTES))
