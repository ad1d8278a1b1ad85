"""A slow link in front of any transport: bandwidth, latency and loss, for experiments on one machine.

Everything that one rank sends shares the link: two transfers of 64 MiB at once take twice as long as one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.transport import Channel, FrameSink, Transport
from twinpool.core.errors import ConfigError
from twinpool.core.ticket import Endpoint

_PACKET_BYTES = 1448  # payload of one TCP segment on Ethernet
_RESEND_S = 0.2  # the shortest time after which TCP sends a lost segment again (RFC 6298, as Linux has it)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """A link as the numbers of its data sheet."""

    bandwidth_bytes_s: float = 0.0  # 0: as fast as the transport is
    latency_s: float = 0.0  # one way
    loss: float = 0.0  # share of packets that have to be sent again
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s < 0:
            raise ConfigError("link.bandwidth_bytes_s", f"{self.bandwidth_bytes_s} is less than 0")
        if self.latency_s < 0:
            raise ConfigError("link.latency_s", f"{self.latency_s} is less than 0")
        if not 0.0 <= self.loss < 1.0:
            raise ConfigError("link.loss", f"{self.loss} is not in [0, 1)")


class ShapedTransport:
    """Sends over ``transport`` as if over a link; what it receives is not shaped.

    Args:
        transport: Carries the frames; closed with this.
        shape: Of the link.
    """

    def __init__(self, transport: Transport, shape: LinkShape) -> None:
        self.moves_tensors = transport.moves_tensors
        self._transport = transport
        self._link = _Link(shape)

    @property
    def endpoint(self) -> Endpoint:
        return self._transport.endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return self._transport.reaches(peer)

    async def start(self, sink: FrameSink) -> None:
        await self._transport.start(sink)

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> Channel:
        await asyncio.sleep(2 * self._link.shape.latency_s)  # to be admitted takes a round trip
        return _ShapedChannel(await self._transport.open(peer, hello, timeout_s=timeout_s), self._link)

    async def close(self) -> None:
        await self._transport.close()


class _Link:
    """When what is sent now leaves, and when it arrives."""

    def __init__(self, shape: LinkShape) -> None:
        self.shape = shape
        self._rng = random.Random(shape.seed)
        self._free_s = 0.0  # when all that was sent so far has left

    def send(self, num_bytes: int) -> tuple[float, float]:
        """Return when the last of ``num_bytes`` has left and when it is there, by the loop's clock."""
        shape = self.shape
        now_s = asyncio.get_running_loop().time()
        num_packets = -(-num_bytes // _PACKET_BYTES)
        # The number of packets that are lost, with the mean and the spread of a binomial one.
        mean = num_packets * shape.loss
        num_lost = max(0, round(self._rng.gauss(mean, (mean * (1 - shape.loss)) ** 0.5))) if mean else 0
        wire_bytes = num_bytes + num_lost * _PACKET_BYTES
        busy_s = wire_bytes / shape.bandwidth_bytes_s if shape.bandwidth_bytes_s else 0.0
        self._free_s = max(self._free_s, now_s) + busy_s
        return self._free_s, self._free_s + shape.latency_s + (_RESEND_S if num_lost else 0.0)


class _ShapedChannel:
    """Holds each message back until it would have arrived; order is kept."""

    def __init__(self, channel: Channel, link: _Link) -> None:
        self._channel = channel
        self._link = link
        self._under_way: deque[tuple[float, Sequence[Frame]]] = deque()
        self._changed = asyncio.Event()
        self._is_finished = False
        self._delivering = asyncio.create_task(self._deliver())

    async def send(self, frames: Sequence[Frame]) -> None:
        self._check()
        left_s, arrives_s = self._link.send(sum(frame.payload.nbytes for frame in frames))
        self._under_way.append((arrives_s, frames))
        self._changed.set()
        await _sleep_until(left_s)

    async def finish(self) -> None:
        self._is_finished = True
        self._changed.set()
        await asyncio.wait({self._delivering})
        await self.ended()

    async def ended(self) -> None:
        try:
            await self._channel.ended()
        finally:
            await asyncio.sleep(self._link.shape.latency_s)  # the way back of what the receiver says

    async def abort(self) -> None:
        self._delivering.cancel()
        await asyncio.wait({self._delivering})
        self._delivering.cancelled() or self._delivering.exception()  # the channel tells it too
        await self._channel.abort()

    def _check(self) -> None:
        if self._delivering.done():
            self._delivering.result()

    async def _deliver(self) -> None:
        while True:
            while not self._under_way:
                if self._is_finished:
                    await self._channel.finish()
                    return
                self._changed.clear()
                await self._changed.wait()
            arrives_s, frames = self._under_way.popleft()
            await _sleep_until(arrives_s)
            await self._channel.send(frames)


async def _sleep_until(time_s: float) -> None:
    await asyncio.sleep(max(0.0, time_s - asyncio.get_running_loop().time()))
