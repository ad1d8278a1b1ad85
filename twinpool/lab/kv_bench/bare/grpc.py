"""The bare link of grpc: raw bytes over one stream, cut beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

import grpc.aio

from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import DONE, LIMIT_S, LinkSize, Receiving, Sending, some_bytes

_SERVICE, _METHOD = "twinpool.v1.Bare", "Move"
_KIB = 2**10
_GRACE_S = 1.0
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_http_proxy", 0),
)
_Context = grpc.aio.ServicerContext[bytes, bytes]


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """Return what is worth trying; larger messages than these are slower."""
    sizes = (256 * _KIB, 512 * _KIB, 1024 * _KIB, 2048 * _KIB, 4096 * _KIB)
    return [size for size in sizes if size < num_bytes] or (num_bytes,)


async def listen(host: str, size: LinkSize) -> Receiving:
    server = grpc.aio.server(options=_OPTIONS)
    end = _Receiving(server, size)
    handler = grpc.stream_stream_rpc_method_handler(end.take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    end.address = f"{host}:{server.add_insecure_port(f'{host}:0')}"
    await server.start()
    return end


async def connect(address: str, size: LinkSize) -> Sending:
    channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}", None, None)(None)
    return _Sending(channel, call, size)


class _Receiving:
    def __init__(self, server: grpc.aio.Server, size: LinkSize) -> None:
        self.address = ""
        self._server = server
        self._num_bytes = size.num_bytes
        self._left = asyncio.Event()

    async def take(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        num_received = 0
        try:
            async for data in requests:
                num_received += len(data)
                if num_received == self._num_bytes:
                    num_received = 0
                    yield DONE
        finally:
            self._left.set()

    async def run(self) -> None:
        await self._left.wait()

    async def close(self) -> None:
        await self._server.stop(_GRACE_S)


class _Sending:
    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
        size: LinkSize,
    ) -> None:
        data = some_bytes(size.num_bytes).tobytes()
        self._messages = [data[start:stop] for start, stop in size.pieces()]
        self._channel = channel
        self._call = call

    async def move(self) -> float:
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(LIMIT_S):
                for message in self._messages:
                    await self._call.write(message)
                if await self._call.read() != DONE:
                    raise TransferError("the bare link broke")
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise TransferError(f"the bare link broke: {error}") from None
        return time.perf_counter() - started_s

    async def close(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()
        await self._channel.close(_GRACE_S)
