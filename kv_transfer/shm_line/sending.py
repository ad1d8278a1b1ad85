"""The sender's end of a line to another process of this host, and its channels."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.messages import copied, frame_headers, hello_to_bytes, read_reply
from kv_transfer.shm_line.segment import SLOT_BYTES, Segment
from kv_transfer.shm_line.words import What, Word, WordProtocol
from twinpool.core.errors import TransferDamaged, TransferError

_IDLE_S = 60.0  # a line that was unused for so long is closed


class LineLost(TransferError):
    """The peer is gone, or has closed the line."""


class SendingLine(WordProtocol):
    """The sender's end of a line.

    Args:
        segment: Shared with the peer.
        address: Of the peer.
        on_lost: Called once.
    """

    def __init__(self, segment: Segment, address: str, *, on_lost: Callable[[], object]) -> None:
        super().__init__()
        self._segment = segment
        self._address = address
        self._on_lost = on_lost
        # Slots go round, and half of them rest: memory that the other processor read just now is twice as
        # slow to write as memory that has left its cache.
        self._free = deque(range(segment.num_slots))
        self._num_resting = segment.num_slots // 2
        self._lent: set[int] = set()
        self._waiting: deque[asyncio.Future[int | None]] = deque()
        self._channels: dict[int, ShmChannel] = {}
        self._numbers = itertools.count()
        self._idle_timer = self._loop.call_later(_IDLE_S, self.cut)

    @property
    def is_idle(self) -> bool:
        """Whether no part goes over it."""
        return not self._channels

    async def open(self, hello: Hello) -> ShmChannel:
        """Ask for a part to be admitted.

        Raises:
            TransferRefused: It is not.
            LineLost: The peer never saw the question, or is gone.
        """
        if self.is_lost:
            raise self._lost()
        self._idle_timer.cancel()
        channel = ShmChannel(self, next(self._numbers))
        self._channels[channel.number] = channel
        self.say(Word(What.HELLO, channel.number, body=hello_to_bytes(hello)))
        try:
            await channel.met()
        except BaseException:
            await channel.abort()
            raise
        return channel

    async def send(self, channel: ShmChannel, frames: Sequence[Frame]) -> None:
        """Copy a message into a slot as soon as there is one; does nothing once the channel is over."""
        size = sum(frame.payload.nbytes for frame in frames)
        if size > SLOT_BYTES:
            raise TransferError(f"a message of {size} bytes is larger than {SLOT_BYTES}")
        slot = self._free.popleft() if self._has_room else await self._next_free(channel)
        if slot is None:
            return
        try:
            header = frame_headers(copied(frames, self._segment.view(slot, size)))
        except BaseException:
            self._give(slot)
            raise
        self._lent.add(slot)
        self.say(Word(What.MESSAGE, channel.number, slot, size, header))
        await asyncio.sleep(0)  # others have waited for a whole message to be copied

    def on_word(self, word: Word) -> None:
        channel = self._channels.get(word.channel)  # None: the sender gave up in the meantime
        match word.what:
            case What.ADMITTED:
                if channel is not None:
                    channel.admit()
            case What.FREE:
                self._take_back(word.slot)
            case What.END:
                if channel is not None:
                    self._end(channel, word.body)
            case _:
                raise TransferDamaged(f"a receiver said {word.what}")

    def forget(self, channel: ShmChannel) -> None:
        """Close the line in a while if this was the last channel."""
        del self._channels[channel.number]
        if self.is_idle and not self.is_lost:
            self._idle_timer = self._loop.call_later(_IDLE_S, self.cut)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._idle_timer.cancel()
        self._on_lost()
        for channel in list(self._channels.values()):
            channel.end(self._lost())

    @property
    def _has_room(self) -> bool:
        return len(self._free) > self._num_resting

    def _end(self, channel: ShmChannel, reply: bytes) -> None:
        try:
            read_reply(reply, address=self._address)
        except TransferError as error:
            channel.end(error)
        else:
            channel.end(None)

    async def _next_free(self, channel: ShmChannel) -> int | None:
        waiting: asyncio.Future[int | None] = self._loop.create_future()
        channel.waiting = waiting
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled() and (slot := waiting.result()) is not None:
                self._give(slot)
            raise

    def _take_back(self, slot: int) -> None:
        if slot not in self._lent:
            raise TransferDamaged(f"a receiver freed slot {slot}, which it did not have")
        self._lent.remove(slot)
        self._give(slot)

    def _give(self, slot: int) -> None:
        """Put a slot to the others, and give one to who has waited longest."""
        self._free.append(slot)
        while self._waiting and self._has_room:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(self._free.popleft())

    def _lost(self) -> TransferError:
        return LineLost(f"{self._address}: the receiver is gone")


class ShmChannel:
    """The way of one part, over a line that it shares with others."""

    def __init__(self, line: SendingLine, number: int) -> None:
        self.number = number
        self.waiting: asyncio.Future[int | None] | None = None  # for a slot
        self._line = line
        self._met = asyncio.Event()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def met(self) -> None:
        """Return when the receiver has admitted the part."""
        await self._met.wait()
        if self._end.done():
            self._end.result()

    async def send(self, frames: Sequence[Frame]) -> None:
        if not self._end.done():
            await self._line.send(self, frames)
        if self._end.done():
            self._end.result()

    async def finish(self) -> None:
        if not self._end.done():
            self._line.say(Word(What.DONE, self.number))
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait({self._end})
        self._end.result()

    async def abort(self) -> None:
        if not self._end.done():
            self._line.say(Word(What.GIVE_UP, self.number))
            self.end(TransferError("the transfer was aborted"))

    def admit(self) -> None:
        """Note that the receiver takes messages."""
        self._met.set()

    def end(self, error: TransferError | None) -> None:
        """Note that the receiver will say no more; an error says why."""
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)
            self._end.exception()  # it is no news to the event loop if nobody asks
        self._met.set()
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)
        self._line.forget(self)
