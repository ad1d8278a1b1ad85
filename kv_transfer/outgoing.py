"""One part of a transfer as its sender sees it: streams KV to where a ticket points while it is computed.

    opening -> streaming (as ``written`` tells) -> finishing -> confirmed
       `------------ failed, or aborted ------------'

Reads the store only between ``written`` and the end of ``wait`` or ``abort``, one message at a time:
the memory held for a part is one message plus what the receiver gave credit for, however long the
prompt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from math import inf
from typing import Protocol

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.transport import Channel
from twinpool.core.clock import Clock
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.layout import wire_bytes
from twinpool.core.ports import KVRange, KVStore
from twinpool.core.ticket import KVTicket

_SIGNS_PER_LEASE = 4


class PartEnd(Enum):
    """How a part ended for its sender."""

    CONFIRMED = auto()  # the receiver proved that it has everything
    FAILED = auto()
    ABORTED = auto()


class OpenChannel(Protocol):
    """``Transport.open`` for one part; also tells whether the channel takes tensors."""

    def __call__(self, *, timeout_s: float) -> Awaitable[tuple[Channel, bool]]: ...


class OutgoingPart:
    """Sends tokens ``[ticket.cached_tokens, ticket.num_tokens)`` of every layer, once.

    Args:
        ticket: Of the decode worker that waits.
        hello: Names the heads to send, and how they travel.
        open_channel: Meets that worker.
        store: What is read; only blocks that ``written`` named.
        clock: Of the deadline.
        config: Message size, checksum and connect timeout.
        timeout_s: The transfer fails when it is not confirmed by then.
        on_end: Called once, when the store is no longer read.
    """

    def __init__(
        self,
        ticket: KVTicket,
        hello: Hello,
        open_channel: OpenChannel,
        *,
        store: KVStore,
        clock: Clock,
        config: TransferConfig,
        timeout_s: float,
        on_end: Callable[[OutgoingPart, PartEnd], None],
    ) -> None:
        self.num_frames = 0
        self.num_bytes = 0
        self._ticket = ticket
        self._hello = hello
        self._open_channel = open_channel
        self._store = store
        self._clock = clock
        self._config = config
        self._deadline_s = clock.now_s() + timeout_s
        self._on_end = on_end
        self._blocks: Sequence[int] = ()
        self._written = [ticket.cached_tokens] * store.layout.num_layers
        self._sent = list(self._written)
        self._more = asyncio.Event()
        self._spoke_s = clock.now_s()
        self._on_device = False
        self._token_bytes = wire_bytes(
            hello.wire, num_tokens=1, num_heads=hello.num_heads, head_dim=store.layout.head_dim
        )
        is_short = ticket.num_tokens - ticket.cached_tokens < config.whole_below_tokens
        self._least_written = ticket.num_tokens if is_short else 0  # in every layer, before anything is sent
        self._task = asyncio.create_task(self._run(), name=f"part {ticket.transfer_id}")
        self._task.add_done_callback(self._note_end)

    def written(self, layer: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """Say that tokens ``[0, num_tokens)`` of ``layer`` are in the store.

        Any call tells that the prompt makes progress, which keeps the receiver's lease up.

        Args:
            layer: Index from 0.
            num_tokens: Never goes down; tokens beyond the ticket's are not sent.
            blocks: The blocks of the sequence in token order, as far as it has any.
        """
        num_tokens = min(num_tokens, self._ticket.num_tokens)
        if num_tokens > self._written[layer]:
            self._written[layer] = num_tokens
            self._blocks = blocks
        self._more.set()

    async def wait(self) -> None:
        """Return when the receiver confirmed that it has everything.

        The store is not read any more after it returned or raised a TransferError; a cancelled call
        leaves the part running.

        Raises:
            TransferError: What the receiver or the way to it objected to, or that ``abort`` was called.
        """
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise TransferError("this worker gave the transfer up")
        self._task.result()

    async def abort(self) -> None:
        """Give up; the store is not read any more after the return.  Idempotent."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        channel, self._on_device = await self._open_channel(
            timeout_s=self._left_s(self._config.connect_timeout_s)
        )
        ended = asyncio.ensure_future(channel.ended())
        streaming = asyncio.ensure_future(self._stream(channel))
        try:
            await asyncio.wait({ended, streaming}, return_when=asyncio.FIRST_COMPLETED)
            await (ended if ended.done() else streaming)
        finally:
            ended.cancel()
            streaming.cancel()
            await channel.abort()
            await asyncio.gather(ended, streaming, return_exceptions=True)

    async def _stream(self, channel: Channel) -> None:
        """Send what is written until everything is sent and confirmed."""
        lease_s = self._ticket.lease_s
        while min(self._sent) < self._ticket.num_tokens:
            self._more.clear()
            frames = self._next_frames()
            # What is computed and not to be sent yet is a sign of life, and an empty message says so.
            if frames or self._clock.now_s() >= self._spoke_s + lease_s / _SIGNS_PER_LEASE:
                await self._within(lease_s, channel.send(frames), "the receiver takes nothing")
                self._spoke_s = self._clock.now_s()
                self.num_frames += len(frames)
                self.num_bytes += sum(frame.payload.nbytes for frame in frames)
            if not frames:
                await self._within(self._left_s(), self._more.wait(), "the KV was not computed in time")
        await self._within(lease_s, channel.finish(), "the receiver confirms nothing")

    def _next_frames(self) -> list[Frame]:
        """Read the parts of one message, lower layers first."""
        block_tokens = self._store.layout.block_tokens
        room_tokens = max(1, self._config.message_bytes // self._token_bytes)
        if room_tokens > block_tokens:
            room_tokens -= room_tokens % block_tokens
        frames: list[Frame] = []
        if min(self._written) < self._least_written:
            return frames
        for layer, first_token in enumerate(self._sent):
            num_tokens = min(self._ready(layer) - first_token, room_tokens)
            if num_tokens > 0:
                frames.append(self._read(layer, first_token, num_tokens))
                self._sent[layer] += num_tokens
                room_tokens -= num_tokens
                if not room_tokens:
                    break
        return frames

    def _ready(self, layer: int) -> int:
        """Return up to which token a layer may be sent: whole blocks, until the last tokens are there."""
        written = self._written[layer]
        if written == self._ticket.num_tokens:
            return written
        return written - written % self._store.layout.block_tokens

    def _read(self, layer: int, first_token: int, num_tokens: int) -> Frame:
        hello = self._hello
        part = KVRange(
            layer=layer,
            blocks=self._blocks,
            first_token=first_token,
            num_tokens=num_tokens,
            heads=hello.heads,
        )
        return Frame(
            transfer_id=hello.transfer_id,
            epoch=hello.epoch,
            first_head=hello.first_head,
            num_heads=hello.num_heads,
            layer=layer,
            first_token=first_token,
            num_tokens=num_tokens,
            checksum=None if self._config.checksum else 0,
            payload=self._store.payload(part, wire=hello.wire, on_device=self._on_device),
        )

    async def _within(self, limit_s: float, step: Awaitable[object], problem: str) -> None:
        try:
            async with asyncio.timeout(self._left_s(limit_s)):
                await step
        except TimeoutError:
            raise TransferTimeout(problem) from None

    def _left_s(self, limit_s: float = inf) -> float:
        return max(0.0, min(limit_s, self._deadline_s - self._clock.now_s()))

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            end = PartEnd.ABORTED
        else:
            end = PartEnd.CONFIRMED if task.exception() is None else PartEnd.FAILED
        self._on_end(self, end)
