"""The receiver's end of a pair: what one peer sends over a connection and a lane, taken apart for the sink.

    greeted -> the sink expects the part named -> the lane works -> channels ... -> over

A stranger gets no further than its greeting: this end builds nothing for who does not prove that it holds a
ticket.  The bytes of a batch come into a slot of this end, are checked and copied from there by the sink, and
the slot is used again when the last of them is done with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.intake import take_in
from kv_transfer.messages import credit_reply, end_reply, frame_of, hello_from_bytes
from kv_transfer.pair.batch import Batch, Part, batch_from_bytes
from kv_transfer.pair.control import Control, Kind, Message
from kv_transfer.pair.greeting import answer_to_bytes, greeting_from_bytes
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Lanes, Move, NoMove, ReceiveLane
from kv_transfer.pair.lane_threads import LaneThreads
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferDamaged, TransferError, TransferTimeout

_MOST_CHANNELS = 4096
_LINGER_S = 1.0  # for the last word to reach the peer

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class ReceivingPair:
    """One peer, as long as it lives.

    Args:
        control: The connection that it made.
        lanes: Makes the way that bytes come.
        sink: Takes the frames.
        config: Credit and deadlines.
        transport: Name of the transport.
    """

    def __init__(
        self, control: Control, lanes: Lanes, sink: FrameSink, config: TransferConfig, transport: str
    ) -> None:
        self._control = control
        self._lanes = lanes
        self._sink = sink
        self._config = config
        self._transport = transport
        self._channels: dict[int, _Incoming] = {}
        self._intakes: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no channel is open."""
        return not self._channels

    async def run(self, *, expected: Callable[[ReceivingPair], None], build_s: float) -> None:
        """Serve the peer until it is gone.

        Args:
            expected: Called when the peer is known to be no stranger, before anything is built for it; may
                raise TransferError.
            build_s: The lane must work by then.
        """
        try:
            lane, threads = await self._meet(expected, build_s)
        except TransferError as error:
            self._control.say(Kind.REPLY, end_reply(error))
            await self._control.close(within_s=_LINGER_S)
            return
        except BaseException:
            self._control.cut()
            raise
        work = _Work(lane, threads)
        jobs = (self._hear(work), self._begin_moves(work), self._deliver(work))
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await self._end(_reason(ends))
            await threads.close()
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, TransferError):
                raise end

    async def _end(self, reason: TransferError) -> None:
        """End every channel, and tell the peer how each ended as far as it still listens."""
        for incoming in self._channels.values():
            incoming.put(reason)
        if self._intakes:
            await asyncio.wait(self._intakes)
        self._control.say(Kind.REPLY, end_reply(reason))
        await self._control.close(within_s=_LINGER_S)

    async def _meet(
        self, expected: Callable[[ReceivingPair], None], build_s: float
    ) -> tuple[ReceiveLane, LaneThreads]:
        """Find out who calls, and make the lane work."""
        limit_s = self._config.connect_timeout_s
        message = await _within(limit_s, self._control.hear(), "the peer says nothing")
        if message.kind is not Kind.GREETING:
            raise _foreign(message)
        offer, hello = greeting_from_bytes(message.body)
        self._sink.expects(hello)
        expected(self)
        lane = self._lanes.from_peer(offer, sender_id=hello.sender_id, local_host=self._control.local_host)
        threads = LaneThreads(lane, f"from {hello.sender_id}")
        try:
            self._control.say(Kind.ANSWER, answer_to_bytes(lane.answer))
            await _within(build_s, self._connect(lane, threads), "no way to the peer was found in time")
        except BaseException:
            await threads.close()
            raise
        self._control.say(Kind.READY)
        return lane, threads

    async def _connect(self, lane: ReceiveLane, threads: LaneThreads) -> None:
        loop = asyncio.get_running_loop()

        def say(body: bytes) -> None:
            loop.call_soon_threadsafe(partial(self._control.say, Kind.KEY, body))

        keys = KeyExchange(say)
        connecting = threads.filler.call(lambda: lane.connect(keys))
        hearing = asyncio.ensure_future(self._hear_keys(keys))
        try:
            await asyncio.wait({connecting, hearing}, return_when=asyncio.FIRST_COMPLETED)
            await (connecting if connecting.done() else hearing)
        finally:
            keys.fail(TransferError("the peer is gone"))
            hearing.cancel()
            connecting.cancel()
            await asyncio.wait({hearing})

    async def _hear_keys(self, keys: KeyExchange) -> None:
        """Note what the sender says while both look for each other; never returns."""
        while True:
            message = await self._control.hear()
            if message.kind is not Kind.KEY:
                raise _foreign(message)
            keys.received(message.body)

    async def _hear(self, work: _Work) -> None:
        while True:
            message = await self._control.hear()
            match message.kind:
                case Kind.OPEN:
                    self._open(message.channel, hello_from_bytes(message.body))
                case Kind.BATCH:
                    work.announce(batch_from_bytes(message.body))
                case Kind.ALL_SENT:
                    work.announced.put_nowait(_AllSent(self._channels.get(message.channel)))
                case Kind.GIVE_UP if message.channel in self._channels:
                    self._channels[message.channel].put(None)
                case Kind.GIVE_UP | Kind.KEY:
                    continue  # of a channel that has ended, or later than it was needed
                case _:
                    raise _foreign(message)

    async def _begin_moves(self, work: _Work) -> None:
        """Begin to move what is announced, as far ahead as there are free slots."""
        while True:
            announced = await work.announced.get()
            if isinstance(announced, _AllSent):
                work.moving.put_nowait(announced)
                continue
            slot = await work.free.get()
            move = await work.threads.filler.call(partial(_begin, work.lane, announced, slot))
            work.moving.put_nowait(_Moving(announced, slot, work.threads.waiter.call(move.wait)))

    async def _deliver(self, work: _Work) -> None:
        """Hand over what has come, in the order in which it was announced."""
        while True:
            moving = await work.moving.get()
            if isinstance(moving, _AllSent):
                if moving.incoming is not None:
                    moving.incoming.put(None)
                continue
            await asyncio.wait({moving.done}, timeout=self._config.lease_s)
            if not moving.done.done():
                raise TransferTimeout(f"announced bytes did not come in {self._config.lease_s:g} s")
            moving.done.result()
            work.taken(moving.batch)
            self._control.say(Kind.TAKEN, moving.batch.slot.to_bytes(4, "little"))
            held = _HeldSlot(len(moving.batch.parts) + 1, partial(work.release, moving.slot))
            for part in moving.batch.parts:
                incoming = self._channels.get(part.channel)
                if incoming is None:
                    held.done()  # the channel has ended; what still comes of it is dropped
                else:
                    incoming.put(_Arrived(work.frames(part, incoming.hello, moving.slot), held))
            held.done()

    def _open(self, number: int, hello: Hello) -> None:
        if number in self._channels or len(self._channels) >= _MOST_CHANNELS:
            raise TransferDamaged(f"channel {number} beside {len(self._channels)} others")
        try:
            self._sink.admit(hello, transport=self._transport)
        except TransferError as error:
            self._control.say(Kind.REPLY, end_reply(error), channel=number)
            return
        incoming = self._channels[number] = _Incoming(hello)
        self._grant(number, self._config.credit_bytes)
        intake = asyncio.create_task(self._take_in(number, incoming))
        self._intakes.add(intake)
        intake.add_done_callback(self._note_end)

    async def _take_in(self, number: int, incoming: _Incoming) -> None:
        async def grant(num_bytes: int) -> None:
            self._grant(number, num_bytes)

        end: TransferError | None = None
        try:
            await take_in(self._sink, incoming.hello, incoming.messages(), grant)
        except TransferError as error:
            end = error
        finally:
            self._channels.pop(number, None)
            incoming.drop_rest()
        self._control.say(Kind.REPLY, end_reply(end), channel=number)

    def _note_end(self, intake: asyncio.Task[None]) -> None:
        self._intakes.discard(intake)
        if not intake.cancelled() and intake.exception() is not None:
            _log.error("a channel was ended by a bug", exc_info=intake.exception())
            self._control.cut()

    def _grant(self, number: int, num_bytes: int) -> None:
        self._control.say(Kind.REPLY, credit_reply(num_bytes), channel=number)


@dataclass(frozen=True, slots=True)
class _AllSent:
    """Everything of a channel was announced before."""

    incoming: _Incoming | None  # None: it has ended


@dataclass(frozen=True, slots=True, eq=False)
class _Moving:
    """A batch on its way into one of our slots."""

    batch: Batch
    slot: int
    done: asyncio.Future[None]


class _Work:
    """What has been announced, and the slots for it."""

    def __init__(self, lane: ReceiveLane, threads: LaneThreads) -> None:
        self.lane = lane
        self.threads = threads
        self.announced: asyncio.Queue[Batch | _AllSent] = asyncio.Queue()
        self.moving: asyncio.Queue[_Moving | _AllSent] = asyncio.Queue()
        self.free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(lane.shape.num_slots):
            self.free.put_nowait(slot)
        self._theirs: set[int] = set()  # the sender's slots that are announced and not taken

    def announce(self, batch: Batch) -> None:
        """Note what the sender has on its way.

        Raises:
            TransferDamaged: It has no such slot, or that much does not fit into it, or it is not free.
        """
        shape = self.lane.shape
        if batch.slot >= shape.num_slots or batch.num_bytes > shape.slot_bytes or batch.slot in self._theirs:
            raise TransferDamaged(f"{batch.num_bytes} bytes in slot {batch.slot}")
        self._theirs.add(batch.slot)
        self.announced.put_nowait(batch)

    def taken(self, batch: Batch) -> None:
        """Note that the sender may use the slot again."""
        self._theirs.discard(batch.slot)

    def frames(self, part: Part, hello: Hello, slot: int) -> list[Frame]:
        """Return the frames of one message in a filled slot."""
        return [
            frame_of(header, hello, self.lane.payload(slot, start, header.payload_bytes))
            for header, start in zip(part.headers, part.starts, strict=True)
        ]

    def release(self, slot: int) -> None:
        """Use a slot again."""
        self.lane.release(slot)
        self.free.put_nowait(slot)


class _HeldSlot:
    """A filled slot, until the last of ``num_users`` is done with it."""

    def __init__(self, num_users: int, release: Callable[[], None]) -> None:
        self._num_users = num_users
        self._release = release

    def done(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._release()


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    """One message, in a slot."""

    frames: Sequence[Frame]
    held: _HeldSlot


@dataclass(slots=True, eq=False)
class _Incoming:
    """The receiver's end of a channel."""

    hello: Hello
    _items: asyncio.Queue[_Arrived | TransferError | None] = field(default_factory=asyncio.Queue, init=False)

    def put(self, item: _Arrived | TransferError | None) -> None:
        """Pass on a message; None: there are no more, and an error says why not."""
        self._items.put_nowait(item)

    async def messages(self) -> AsyncGenerator[Sequence[Frame], None]:
        """Give the frames of each message."""
        while (item := await self._items.get()) is not None:
            if isinstance(item, TransferError):
                raise item
            try:
                yield item.frames
            finally:
                item.held.done()

    def drop_rest(self) -> None:
        """Be done with messages that nobody looked at."""
        while not self._items.empty():
            item = self._items.get_nowait()
            if isinstance(item, _Arrived):
                item.held.done()


async def _within(limit_s: float, step: Awaitable[_T], problem: str) -> _T:
    try:
        async with asyncio.timeout(limit_s):
            return await step
    except TimeoutError:
        raise TransferTimeout(f"{problem}: {limit_s:g} s") from None


def _begin(lane: ReceiveLane, batch: Batch, slot: int) -> Move:
    return lane.receive(batch.slot, slot, batch.segments) if batch.segments else NoMove()


def _foreign(message: Message) -> TransferError:
    return TransferDamaged(f"nobody asked for {message.kind.name}")


def _reason(ends: Sequence[object]) -> TransferError:
    """Return why the pair is over."""
    for end in ends:
        if isinstance(end, TransferError):
            return end
    failed = any(isinstance(end, Exception) for end in ends)
    return TransferError("this worker has failed" if failed else "this worker has closed")
