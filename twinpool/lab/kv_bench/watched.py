"""A transport that tells when a channel has been opened: until then nothing is measured."""

from __future__ import annotations

import asyncio

from kv_transfer.hello import Hello
from kv_transfer.transport import Channel, FrameSink, Transport
from twinpool.core.ticket import Endpoint


class WatchedTransport:
    """Sends over ``transport``, and counts the channels that were opened."""

    def __init__(self, transport: Transport) -> None:
        self.moves_tensors = transport.moves_tensors
        self.opened = asyncio.Semaphore(0)  # released once for each channel
        self._transport = transport

    @property
    def endpoint(self) -> Endpoint:
        return self._transport.endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return self._transport.reaches(peer)

    async def start(self, sink: FrameSink) -> None:
        await self._transport.start(sink)

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> Channel:
        channel = await self._transport.open(peer, hello, timeout_s=timeout_s)
        self.opened.release()
        return channel

    async def close(self) -> None:
        await self._transport.close()
