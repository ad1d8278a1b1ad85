"""Between workers of one process: frames go through a queue, under the same rules as on a network.

No byte is copied on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from kv_transfer.config import TransferConfig
from kv_transfer.credit import Credit
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.intake import take_in
from kv_transfer.transport import FrameSink
from twinpool.core.errors import ConfigError, TransferError
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import TLSFiles


class LoopbackTransport:
    """Listens in a hub, and opens channels to others that do."""

    moves_tensors = False

    def __init__(self, config: TransferConfig, hub: Hub) -> None:
        self._hub = hub
        self._credit_bytes = config.credit_bytes
        self._endpoint = Endpoint("loopback", config.listen or self._hub.new_address())
        if self._hub.find(self._endpoint.address) is not None:
            raise ConfigError("transfer.listen", f"{self._endpoint.address} is taken")
        self._hub.listen(self._endpoint.address, self)
        self._sink: FrameSink | None = None
        self._channels: set[_LoopbackChannel] = set()  # in both directions

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def start(self, sink: FrameSink) -> None:
        self._sink = sink

    def reaches(self, peer: Endpoint) -> bool:
        return self._hub.find(peer.address) is not None

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> _LoopbackChannel:
        listener: LoopbackTransport | None = self._hub.find(peer.address)
        if listener is None or listener._sink is None:
            raise TransferError(f"nobody listens at {peer.address}")
        listener._sink.admit(hello, transport="loopback")
        channel = _LoopbackChannel(listener._sink, hello, listener._credit_bytes)
        for transport in (self, listener):
            transport._channels.add(channel)
            channel.on_end(transport._channels.discard)
        return channel

    async def close(self) -> None:
        self._hub.leave(self._endpoint.address, self)
        for channel in list(self._channels):
            await channel.cut(f"{self._endpoint.address} has closed")


class _LoopbackChannel:
    """Both ends of one transfer."""

    def __init__(self, sink: FrameSink, hello: Hello, credit_bytes: int) -> None:
        self._messages: asyncio.Queue[Sequence[Frame] | None] = asyncio.Queue()  # None: all was sent
        self._credit = Credit()
        self._credit.grant(credit_bytes)
        self._cut_reason = "the transfer was aborted"
        self._intake = asyncio.create_task(take_in(sink, hello, self._received(), self._grant))
        self.on_end(lambda channel: self._credit.close())

    def on_end(self, callback: Callable[[_LoopbackChannel], None]) -> None:
        self._intake.add_done_callback(lambda task: callback(self))

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._credit.take(sum(frame.payload.nbytes for frame in frames))
        if self._intake.done():
            await self.ended()
        else:
            self._messages.put_nowait([replace(frame, checksum=frame.seal()) for frame in frames])

    async def finish(self) -> None:
        self._messages.put_nowait(None)
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait({self._intake})
        if self._intake.cancelled():
            raise TransferError(self._cut_reason)
        self._intake.result()

    async def abort(self) -> None:
        self._intake.cancel()
        await asyncio.wait({self._intake})
        self._intake.cancelled() or self._intake.exception()

    async def cut(self, reason: str) -> None:
        self._cut_reason = reason
        await self.abort()

    async def _received(self) -> AsyncGenerator[Sequence[Frame], None]:
        while (frames := await self._messages.get()) is not None:
            yield frames

    async def _grant(self, num_bytes: int) -> None:
        self._credit.grant(num_bytes)


def unavailable() -> str:
    """Return why this machine cannot use it: it always can."""
    return ""


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> LoopbackTransport:
    """Create a worker's loopback transport; ``config.listen`` is a name in ``hub``.

    Raises:
        ConfigError: The name is taken.
    """
    return LoopbackTransport(config, hub)
