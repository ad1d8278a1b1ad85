"""The receiver's end of a line from another process of this host."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.intake import take_in
from kv_transfer.messages import end_reply, frames_in, hello_from_bytes
from kv_transfer.shm_line.segment import SLOT_BYTES, Segment
from kv_transfer.shm_line.words import What, Word, WordProtocol
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferDamaged, TransferError


class ReceivingLine(WordProtocol):
    """The receiver's end of a line.

    Args:
        sink: Takes the frames.
        segment: Shared with the peer.
        on_lost: Called once.
    """

    def __init__(
        self, sink: FrameSink, segment: Segment, *, on_lost: Callable[[ReceivingLine], object]
    ) -> None:
        super().__init__()
        self._sink = sink
        self._segment = segment
        self._on_lost = on_lost
        self._held: set[int] = set()  # slots that are not the sender's now
        self._channels: dict[int, _Intake] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no part comes over it."""
        return not self._channels

    def on_word(self, word: Word) -> None:
        intake = self._channels.get(word.channel)  # None: its part is over
        match word.what:
            case What.HELLO:
                self._meet(word)
            case What.MESSAGE:
                self._hold(word)
                if intake is None:
                    self._give_back(word.slot)
                else:
                    intake.messages.put_nowait(word)
            case What.DONE:
                if intake is not None:
                    intake.messages.put_nowait(None)
            case What.GIVE_UP:
                if intake is not None:
                    intake.task.cancel()
            case _:
                raise TransferDamaged(f"a sender said {word.what}")

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._on_lost(self)
        for intake in self._channels.values():
            intake.messages.put_nowait(None)

    def pause_writing(self) -> None:
        """Listen no more to a sender that does not listen; a sender always does, so that nobody hangs."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._transport.resume_reading()

    async def close(self) -> None:
        tasks = [intake.task for intake in self._channels.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    def _meet(self, word: Word) -> None:
        if word.channel in self._channels:
            raise TransferDamaged(f"a sender opened channel {word.channel} twice")
        try:
            hello = hello_from_bytes(word.body)
            self._sink.admit(hello, transport="shm")
        except TransferError as error:
            self.say(Word(What.END, word.channel, body=end_reply(error)))
            return
        self.say(Word(What.ADMITTED, word.channel))
        messages: asyncio.Queue[Word | None] = asyncio.Queue()
        task = asyncio.create_task(take_in(self._sink, hello, self._frames(messages, hello), _grant))
        self._channels[word.channel] = _Intake(hello, messages, task)
        task.add_done_callback(partial(self._end, word.channel))

    def _hold(self, word: Word) -> None:
        if word.slot >= self._segment.num_slots or word.slot in self._held or word.size > SLOT_BYTES:
            raise TransferDamaged(f"a sender passed {word.size} bytes in slot {word.slot}")
        self._held.add(word.slot)

    def _give_back(self, slot: int) -> None:
        self._held.remove(slot)
        self.say(Word(What.FREE, 0, slot))

    async def _frames(
        self, messages: asyncio.Queue[Word | None], hello: Hello
    ) -> AsyncGenerator[Sequence[Frame], None]:
        while (word := await messages.get()) is not None:
            try:
                yield frames_in(self._segment.view(word.slot, word.size), word.body, hello)
            finally:
                self._give_back(word.slot)

    def _end(self, channel: int, task: asyncio.Task[None]) -> None:
        intake = self._channels.pop(channel)
        while not intake.messages.empty():
            word = intake.messages.get_nowait()
            if word is not None:
                self._give_back(word.slot)
        if task.cancelled():  # perhaps before it began
            self._sink.broken(intake.hello, TransferError("the sender stopped before everything had come"))
            return
        error = task.exception()
        if error is not None and not isinstance(error, TransferError):
            self.cut()
            raise error
        self.say(Word(What.END, channel, body=end_reply(error)))


@dataclass(frozen=True, slots=True, eq=False)
class _Intake:
    hello: Hello
    messages: asyncio.Queue[Word | None]  # None: there are no more
    task: asyncio.Task[None]


async def _grant(num_bytes: int) -> None:
    """Let others go on: a whole message has been copied.  The sender's credit are its slots."""
    await asyncio.sleep(0)
