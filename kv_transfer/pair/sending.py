"""The sender's end of a pair: all channels from this rank to one peer, over one connection and one lane.

    meet -> open, send, finish ... -> over: the peer is gone, or silent for too long, or this end closed

The messages of all channels wait in one queue.  As soon as a slot is free, as many as fit are copied into it
and go on their way together; what is queued meanwhile goes with the next slot.  A slot is free again when its
bytes have left and the peer has taken them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kv_transfer.config import TransferConfig
from kv_transfer.credit import Credit
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.messages import MAX_FRAMES, hello_to_bytes, read_reply
from kv_transfer.pair.batch import aligned, batch_to_bytes, slot_bytes
from kv_transfer.pair.control import Control, Kind, Message
from kv_transfer.pair.greeting import answer_from_bytes, greeting_to_bytes
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Move, NoMove, Placed, SendLane, Staged
from kv_transfer.pair.lane_threads import LaneThreads
from twinpool.core.errors import TransferDamaged, TransferError, TransferTimeout

_LOOK_EVERY_S = 0.25  # for a peer that is silent
_LEAVE_S = 1.0  # for bytes that are under way when their transfer is given up


class NoWay(TransferError):
    """The peer has said why it and this rank cannot work together."""


class SendingPair:
    """One peer, as long as it lives.

    Args:
        control: A fresh connection to it.
        lane: Of the same peer; closed with the pair.
        address: Of the peer, for messages to people.
        config: Deadlines.
    """

    def __init__(self, control: Control, lane: SendLane, address: str, config: TransferConfig) -> None:
        self._control = control
        self._lane = lane
        self._address = address
        self._config = config
        self._threads = LaneThreads(lane, f"to {address}")
        # A part alone has credit for two batches, so that one is filled while the other is under way.
        self._batch_bytes = min(lane.shape.slot_bytes, config.credit_bytes // 2)
        self._numbers = itertools.count(1)
        self._channels: dict[int, PairChannel] = {}
        self._queue: deque[_Queued] = deque()
        self._queued = asyncio.Event()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._away: dict[int, _Away] = {}  # slots that are under way
        self._staging: _Staging | None = None
        self._error: TransferError | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._error is not None

    @property
    def is_idle(self) -> bool:
        """Whether no channel is open."""
        return not self._channels

    def end(self, reason: str) -> None:
        """Be over; ``run`` closes what is left."""
        self._end(TransferError(reason))

    async def meet(self, hello: Hello) -> None:
        """Introduce this rank with a part that it is about to send, and make the lane work.

        Raises:
            TransferRefused: The peer does not expect the part.
            TransferError: The two cannot work together, or the peer is gone.
        """
        self._control.say(Kind.GREETING, greeting_to_bytes(self._lane.offer, hello))
        message = await self._control.hear()
        if message.kind is not Kind.ANSWER:
            raise _as_no_way(self._foreign(message))
        answer = answer_from_bytes(message.body)
        loop = asyncio.get_running_loop()

        def say(body: bytes) -> None:
            loop.call_soon_threadsafe(partial(self._control.say, Kind.KEY, body))

        keys = KeyExchange(say)
        connecting = self._threads.filler.call(lambda: self._lane.connect(answer, keys))
        hearing = asyncio.ensure_future(self._hear_keys(keys))
        try:
            await asyncio.wait({connecting, hearing}, return_when=asyncio.FIRST_EXCEPTION)
            await (hearing if hearing.done() else connecting)
            await connecting
        finally:
            keys.fail(TransferError("the peer is gone"))
            hearing.cancel()
            connecting.cancel()
            await asyncio.wait({hearing})
        for slot in range(self._lane.shape.num_slots):
            self._free.put_nowait(slot)

    async def run(self) -> None:
        """Serve the channels until the pair is over; it is closed then."""
        jobs: list[Coroutine[Any, Any, None]] = [self._hear(), self._fill(), self._watch()]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self._end(_reason(done, self._address))
        finally:
            self._end(TransferError(f"the pair with {self._address} was closed"))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()

    async def close(self) -> None:
        """End the connection and the lane."""
        self._end(TransferError(f"the pair with {self._address} was closed"))
        self._control.cut()
        await self._threads.close()

    def unanswered(self, waited_s: float) -> None:
        """Take note that the peer did not say in time whether it admits a part.

        A peer that lives answers in milliseconds; one that does not in the time there is for it is frozen.
        """
        if waited_s >= self._config.connect_timeout_s:
            self._end(TransferTimeout(f"no answer from {self._address} in {waited_s:g} s"))

    def open(self, hello: Hello) -> PairChannel:
        """Begin a channel; the peer admits it or ends it."""
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        channel = PairChannel(self, next(self._numbers), self._address)
        self._channels[channel.number] = channel
        self._control.say(Kind.OPEN, hello_to_bytes(hello), channel=channel.number)
        return channel

    def send(self, channel: PairChannel, frames: Sequence[Frame]) -> None:
        """Queue one message of an open channel."""
        sizes = [frame.payload.nbytes for frame in frames]
        if slot_bytes(sizes) > self._lane.shape.slot_bytes or len(frames) > MAX_FRAMES:
            raise TransferError(f"{len(frames)} frames of {sum(sizes)} bytes do not fit into one message")
        mark = self._lane.mark([frame.payload for frame in frames])
        self._put(_Queued(channel, frames, slot_bytes(sizes), mark))

    def finish(self, channel: PairChannel) -> None:
        """Say, after all messages of a channel, that there are no more."""
        self._put(_Queued(channel, None, 0, None))

    async def give_up(self, channel: PairChannel) -> None:
        """Forget a channel; its payloads are not read any more after the return."""
        if self._channels.pop(channel.number, None) is not None and self._error is None:
            self._control.say(Kind.GIVE_UP, channel=channel.number)
        self._queue = deque(queued for queued in self._queue if queued.channel is not channel)
        while self._staging is not None and channel in self._staging.channels:
            await asyncio.wait({self._staging.done})
        own = [away for away in self._away.values() if channel in away.channels]
        if any(self._age_s(away) > self._config.lease_s / 2 for away in own):
            # Given up because the peer takes nothing: what goes there next shall not wait behind it.
            self._end(TransferTimeout(f"{self._address} takes nothing"))
        leaving = {away.leaving for away in own if away.reads_payloads}
        if leaving and (await asyncio.wait(leaving, timeout=_LEAVE_S))[1]:
            self._end(TransferTimeout(f"{self._address} takes nothing for {_LEAVE_S:g} s"))
            await asyncio.wait(leaving)

    def _put(self, queued: _Queued) -> None:
        if self._error is None:
            self._queue.append(queued)
            self._queued.set()

    async def _hear_keys(self, keys: KeyExchange) -> None:
        """Return when the receiver says that its end of the lane works."""
        while (message := await self._control.hear()).kind is Kind.KEY:
            keys.received(message.body)
        if message.kind is not Kind.READY:
            raise _as_no_way(self._foreign(message))

    async def _hear(self) -> None:
        while True:
            message = await self._control.hear()
            if message.kind is Kind.TAKEN:
                self._taken(int.from_bytes(message.body, "little"))
            elif message.kind is Kind.REPLY and message.channel:
                channel = self._channels.get(message.channel)
                if channel is not None and channel.replied(message.body):
                    del self._channels[message.channel]
            else:
                raise self._foreign(message)

    async def _fill(self) -> None:
        """Send what is queued, slot by slot."""
        while True:
            await self._queued.wait()
            await self._send_next(await self._free.get())

    async def _send_next(self, slot: int) -> None:
        batch = self._next_batch()
        messages = [(queued.channel.number, queued.frames) for queued in batch if queued.frames is not None]
        if messages:
            self._control.say(Kind.BATCH, await self._send(slot, batch, messages))
        else:
            self._free.put_nowait(slot)
        for queued in batch:
            if queued.frames is None:
                self._control.say(Kind.ALL_SENT, channel=queued.channel.number)

    async def _send(
        self, slot: int, batch: Sequence[_Queued], messages: Sequence[tuple[int, Sequence[Frame]]]
    ) -> bytes:
        """Fill a slot and begin to move it; return what the peer must know of it."""
        channels = {queued.channel for queued in batch}
        staging = self._threads.filler.call(partial(_stage, self._lane, slot, tuple(_placed(batch))))
        self._staging = _Staging(channels, staging)
        staging.add_done_callback(partial(self._leave, slot, channels))
        staged, _ = await asyncio.shield(staging)  # the thread goes on reading even if this task ends
        checksums = iter(staged.checksums)
        sealed = [
            (number, [replace(frame, checksum=next(checksums)) for frame in frames])
            for number, frames in messages
        ]
        return batch_to_bytes(slot, staged.segments, sealed)

    def _next_batch(self) -> list[_Queued]:
        room_bytes, room_frames = self._batch_bytes, MAX_FRAMES
        batch: list[_Queued] = []
        while self._queue:
            num_frames = len(self._queue[0].frames or ())
            if batch and (self._queue[0].num_bytes > room_bytes or num_frames > room_frames):
                break
            room_bytes -= self._queue[0].num_bytes
            room_frames -= num_frames
            batch.append(self._queue.popleft())
        if not self._queue:
            self._queued.clear()
        return batch

    def _leave(
        self, slot: int, channels: set[PairChannel], staging: asyncio.Future[tuple[Staged, Move]]
    ) -> None:
        """Wait, in the other thread, until a staged slot has left."""
        self._staging = None
        if staging.cancelled() or staging.exception() is not None:
            return
        staged, move = staging.result()
        leaving = self._threads.waiter.call(move.wait)
        now_s = asyncio.get_running_loop().time()
        self._away[slot] = _Away(now_s, leaving, channels, staged.reads_payloads)
        leaving.add_done_callback(partial(self._left, slot))

    def _left(self, slot: int, leaving: asyncio.Future[None]) -> None:
        if leaving.cancelled():
            return
        error = leaving.exception()
        if error is not None:
            kind = type(error) if isinstance(error, TransferError) else TransferError
            self._end(kind(f"{self._address}: {error}"))
        self._free_if_back(slot)

    def _taken(self, slot: int) -> None:
        away = self._away.get(slot)
        if away is None:
            raise TransferDamaged(f"{self._address}: a slot was taken that was not sent")
        away.is_taken = True
        self._free_if_back(slot)

    def _free_if_back(self, slot: int) -> None:
        away = self._away.get(slot)
        if away is not None and away.is_taken and away.leaving.done():
            del self._away[slot]
            self._free.put_nowait(slot)

    async def _watch(self) -> None:
        """End the pair when the peer takes nothing for too long."""
        limit_s = self._config.lease_s
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, limit_s / 4))
            if any(self._age_s(away) > limit_s for away in self._away.values()):
                raise TransferTimeout(f"{self._address} takes nothing for {limit_s:g} s")

    def _age_s(self, away: _Away) -> float:
        return asyncio.get_running_loop().time() - away.since_s

    def _end(self, error: TransferError) -> None:
        if self._error is not None:
            return
        self._error = error
        self._control.cut()
        self._queue.clear()
        for channel in list(self._channels.values()):
            channel.end(error)
        self._channels.clear()

    def _foreign(self, message: Message) -> TransferError:
        if message.kind is Kind.REPLY:
            try:
                read_reply(message.body, address=self._address)
            except TransferError as error:
                return error
        return TransferDamaged(f"{self._address}: nobody asked for {message.kind.name}")


class PairChannel:
    """The sender's end of one part; implements ``transport.Channel``."""

    def __init__(self, pair: SendingPair, number: int, address: str) -> None:
        self.number = number
        self._pair = pair
        self._address = address
        self._credit = Credit()
        self._met = asyncio.Event()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())

    async def met(self) -> None:
        """Return once the peer admits the part."""
        await self._met.wait()
        if self._end.done():
            await self.ended()

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._credit.take(sum(frame.payload.nbytes for frame in frames))
        if self._end.done():
            await self.ended()
        else:
            self._pair.send(self, frames)

    async def finish(self) -> None:
        self._pair.finish(self)
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait({self._end})
        self._end.result()

    async def abort(self) -> None:
        self.end(TransferError("the transfer was aborted"))
        await self._pair.give_up(self)

    def replied(self, body: bytes) -> bool:
        """Take note of what the peer says of the channel; return whether it has ended."""
        try:
            credit_bytes = read_reply(body, address=self._address)
        except TransferError as error:
            self.end(error)
            return True
        if credit_bytes is None:
            self.end(None)
            return True
        self._credit.grant(credit_bytes)
        self._met.set()
        return False

    def end(self, error: TransferError | None) -> None:
        """End it: all arrived, or why not.  The first end counts."""
        if not self._end.done():
            if error is None:
                self._end.set_result(None)
            else:
                self._end.set_exception(type(error)(*error.args))
        self._credit.close()
        self._met.set()


@dataclass(frozen=True, slots=True, eq=False)
class _Queued:
    """A message that waits for a slot."""

    channel: PairChannel
    frames: Sequence[Frame] | None  # None: the channel has no more
    num_bytes: int  # of a slot
    mark: object


@dataclass(frozen=True, slots=True, eq=False)
class _Staging:
    """A slot that is being filled."""

    channels: set[PairChannel]  # whose payloads are read
    done: asyncio.Future[tuple[Staged, Move]]


@dataclass(slots=True, eq=False)
class _Away:
    """A slot that is under way."""

    since_s: float
    leaving: asyncio.Future[None]
    channels: set[PairChannel]  # whose bytes they are
    reads_payloads: bool  # until it has left
    is_taken: bool = False


def _placed(batch: Iterable[_Queued]) -> Iterable[Placed]:
    start = 0
    for queued in batch:
        for frame in queued.frames or ():
            yield Placed(start, frame, queued.mark)
            start += aligned(frame.payload.nbytes)


def _stage(lane: SendLane, slot: int, placed: Sequence[Placed]) -> tuple[Staged, Move]:
    staged = lane.stage(slot, placed)
    return staged, lane.send(slot, staged) if staged.segments else NoMove()


def _as_no_way(error: TransferError) -> TransferError:
    """Tell what is wrong with the peer from what is wrong with a part."""
    return NoWay(*error.args) if type(error) is TransferError else error


def _reason(done: Iterable[asyncio.Task[None]], address: str) -> TransferError:
    """Return why the pair is over."""
    for task in done:
        error = task.exception()
        if isinstance(error, TransferError):
            return type(error)(f"{address}: {error}") if address not in str(error) else error
        if error is not None:
            raise error
    return TransferError(f"the pair with {address} was closed")
