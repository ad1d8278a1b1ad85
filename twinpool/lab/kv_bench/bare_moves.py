"""The bare link of one transport as the prefill peer uses it."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from twinpool.core.config import unbind
from twinpool.lab.kv_bench.bare.link import LinkSize, Sending, bare_link
from twinpool.lab.kv_bench.samples import Sample
from twinpool.lab.kv_bench.talk import Talk
from twinpool.lab.shaper import LinkShape

_NUM_TRIES = 3  # of each piece size


class BareMoves:
    """An open link.

    Args:
        talk: With the other peer.
        sending: The link.
        size: What it moves.
        shape: Of the link that transfers go over, whose time is added by arithmetic.
    """

    def __init__(self, talk: Talk, sending: Sending, size: LinkSize, shape: LinkShape) -> None:
        self.size = size
        self._talk = talk
        self._sending = sending
        self._shape = shape

    async def move(self) -> Sample:
        """Move the bytes once."""
        await self._talk.call("mark")
        cpu_s = time.process_time()
        seconds = await self._sending.move()
        cpu_s = time.process_time() - cpu_s
        used = await self._talk.call("used")
        return Sample(seconds=self._shaped_s(seconds), sender_cpu_s=cpu_s, receiver_cpu_s=used["cpu_s"])

    def _shaped_s(self, seconds: float) -> float:
        shape = self._shape
        if shape.bandwidth_bytes_s:
            seconds = max(seconds, self.size.num_bytes / shape.bandwidth_bytes_s)
        return seconds + 2 * shape.latency_s  # there, and the answer back


async def open_best(
    stack: AsyncExitStack, talk: Talk, transport: str, *, num_bytes: int, shape: LinkShape
) -> BareMoves | None:
    """Open the bare link of a transport with the piece size with which it is fastest; None if it has none.

    Raises:
        TransferError: It broke.
    """
    link = bare_link(transport)
    if link is None:
        return None
    tried: dict[int, float] = {}
    for piece_bytes in link.piece_sizes(num_bytes):
        size = LinkSize(num_bytes=num_bytes, piece_bytes=piece_bytes)
        async with AsyncExitStack() as trying:
            sending = await _open(trying, talk, transport, size)
            tried[piece_bytes] = min([await sending.move() for _ in range(_NUM_TRIES)])
    size = LinkSize(num_bytes=num_bytes, piece_bytes=min(tried, key=tried.__getitem__))
    sending = await _open(stack, talk, transport, size)
    await sending.move()
    return BareMoves(talk, sending, size, shape)


async def _open(stack: AsyncExitStack, talk: Talk, transport: str, size: LinkSize) -> Sending:
    link = bare_link(transport)
    assert link is not None
    answer = await talk.call("open bare", transport=transport, **unbind(size))
    stack.push_async_callback(talk.call, "close bare")
    sending = await link.connect(str(answer["address"]), size)
    stack.push_async_callback(sending.close)
    return sending
