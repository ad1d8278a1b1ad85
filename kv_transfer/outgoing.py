"""One transfer as its sender sees it: streams KV to where a ticket points while it is computed.

    opening -> streaming (as ``written`` tells) -> finishing -> confirmed
       `------------ failed, or aborted ------------'

Reads the store only between ``written`` and the end of ``wait`` or ``abort``, one message at a time:
the memory held for a transfer is one message plus what the receiver gave credit for, however long the
prompt is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from math import inf
from typing import Protocol

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.transport import Channel
from twinpool.core.clock import Clock
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.ports import KVStore
from twinpool.core.ticket import KVTicket


class TransferEnd(Enum):
    """How a transfer ended for its sender."""

    CONFIRMED = auto()  # the receiver proved that it has everything
    FAILED = auto()
    ABORTED = auto()


class OpenChannel(Protocol):
    """``Transport.open`` for one transfer."""

    def __call__(self, *, timeout_s: float) -> Awaitable[Channel]: ...


class OutgoingTransfer:
    """Sends tokens ``[ticket.cached_tokens, ticket.num_tokens)`` of every layer, once.

    Args:
        ticket: Of the decode worker that waits.
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
        open_channel: OpenChannel,
        *,
        store: KVStore,
        clock: Clock,
        config: TransferConfig,
        timeout_s: float,
        on_end: Callable[[OutgoingTransfer, TransferEnd], None],
    ) -> None:
        self.num_frames = 0
        self.num_bytes = 0
        self._ticket = ticket
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
        self._task = asyncio.create_task(self._run(), name=f"transfer {ticket.transfer_id}")
        self._task.add_done_callback(self._note_end)

    def written(self, layer: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """Say that tokens ``[0, num_tokens)`` of ``layer`` are in the store.

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
        leaves the transfer running.

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
        channel = await self._open_channel(timeout_s=self._left_s(self._config.connect_timeout_s))
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
            if frames:
                await self._within(lease_s, channel.send(frames), "the receiver takes nothing")
                self.num_frames += len(frames)
                self.num_bytes += sum(frame.payload.nbytes for frame in frames)
            else:
                await self._within(self._left_s(), self._more.wait(), "the KV was not computed in time")
        await self._within(lease_s, channel.finish(), "the receiver confirms nothing")

    def _next_frames(self) -> list[Frame]:
        """Read the parts of one message, lower layers first."""
        layout = self._store.layout
        room_tokens = max(1, self._config.message_bytes // layout.layer_token_bytes)
        if room_tokens > layout.block_tokens:
            room_tokens -= room_tokens % layout.block_tokens
        frames = []
        for layer, first_token in enumerate(self._sent):
            num_tokens = min(self._ready(layer) - first_token, room_tokens)
            if num_tokens > 0:
                frames.append(self._read(layer, first_token, num_tokens))
                self._sent[layer] += num_tokens
                room_tokens -= num_tokens
        return frames

    def _ready(self, layer: int) -> int:
        """Return up to which token a layer may be sent: whole blocks, until the last tokens are there."""
        written = self._written[layer]
        if written == self._ticket.num_tokens:
            return written
        return written - written % self._store.layout.block_tokens

    def _read(self, layer: int, first_token: int, num_tokens: int) -> Frame:
        payload = self._store.read(
            layer=layer, blocks=self._blocks, first_token=first_token, num_tokens=num_tokens
        ).cast("B")
        frame = Frame(
            transfer_id=self._ticket.transfer_id,
            epoch=self._ticket.epoch,
            layer=layer,
            first_token=first_token,
            num_tokens=num_tokens,
            checksum=0,
            payload=payload,
        )
        return replace(frame, checksum=frame.true_checksum()) if self._config.checksum else frame

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
            end = TransferEnd.ABORTED
        else:
            end = TransferEnd.CONFIRMED if task.exception() is None else TransferEnd.FAILED
        self._on_end(self, end)
