"""A transport whose frames are damaged on their way, in every way a wire can."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.transport import Channel, FrameSink, Transport
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import Endpoint

HARMLESS = ("duplicate", "reorder")
HARMFUL = ("flip", "truncate", "swap payloads", "swap layers", "shift", "lose", "stale epoch")
KINDS = (*HARMLESS, *HARMFUL)


class ManglingTransport:
    """Sends over ``transport``; each channel damages its transfer once, as ``kind`` says when it is opened.

    Attributes:
        kind: What happens to the next transfer; None leaves it whole.
        num_done: Transfers that were damaged so far.
    """

    def __init__(self, transport: Transport, rng: random.Random) -> None:
        self.moves_tensors = transport.moves_tensors
        self.kind: str | None = None
        self.num_done = 0
        self._transport = transport
        self._rng = rng

    @property
    def endpoint(self) -> Endpoint:
        return self._transport.endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return self._transport.reaches(peer)

    async def start(self, sink: FrameSink) -> None:
        await self._transport.start(sink)

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> Channel:
        channel = await self._transport.open(peer, hello, timeout_s=timeout_s)
        kind, self.kind = self.kind, None
        return channel if kind is None else _ManglingChannel(channel, kind, self)

    async def close(self) -> None:
        await self._transport.close()

    def mangle(self, frames: Sequence[Frame], kind: str) -> list[Frame]:
        """Return the frames of one message after their way."""
        frames = [replace(frame, checksum=frame.seal()) for frame in frames]  # whole before
        mangled, at = list(frames), self._rng.randrange(len(frames))
        other = self._rng.choice([i for i in range(len(frames)) if i != at]) if len(frames) > 1 else at
        frame = frames[at]
        data = bytearray(b"".join(frame.payload.views()))
        match kind:
            case "duplicate":
                mangled.insert(self._rng.randrange(len(frames) + 1), frame)
            case "reorder":
                self._rng.shuffle(mangled)
            case "flip":
                data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
                mangled[at] = replace(frame, payload=HostPayload([memoryview(data)]))
            case "truncate":
                kept = self._rng.randrange(len(data))
                mangled[at] = replace(frame, payload=HostPayload([memoryview(data)[:kept]]))
            case "swap payloads":
                mangled[at], mangled[other] = (
                    replace(frame, payload=frames[other].payload),
                    replace(frames[other], payload=frame.payload),
                )
            case "swap layers":
                mangled[at], mangled[other] = (
                    replace(frame, layer=frames[other].layer),
                    replace(frames[other], layer=frame.layer),
                )
            case "shift":
                mangled[at] = replace(frame, first_token=frame.first_token + self._rng.choice([-1, 1]))
            case "lose":
                del mangled[at]
            case "stale epoch":
                mangled[at] = replace(frame, epoch=frame.epoch - 1)
        self.num_done += 1
        return mangled


class _ManglingChannel:
    """Damages the first message that is large enough."""

    def __init__(self, channel: Channel, kind: str, wire: ManglingTransport) -> None:
        self._channel = channel
        self._kind: str | None = kind
        self._wire = wire

    async def send(self, frames: Sequence[Frame]) -> None:
        if self._kind is not None and (len(frames) > 1 or "swap" not in self._kind):
            kind, self._kind = self._kind, None
            frames = self._wire.mangle(frames, kind)
        await self._channel.send(frames)

    async def finish(self) -> None:
        await self._channel.finish()

    async def ended(self) -> None:
        await self._channel.ended()

    async def abort(self) -> None:
        await self._channel.abort()
