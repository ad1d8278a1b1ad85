"""Pairs: what their two ends say to each other, and how many there may be.

Bytes move through memory that one end shows and the other reads, so that nothing here depends on a library.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.lanes.ipc import IpcLanes, IpcReceiveLane, IpcSendLane
from kv_transfer.messages import hello_to_bytes, read_reply
from kv_transfer.pair.batch import aligned, batch_from_bytes, batch_to_bytes
from kv_transfer.pair.control import Control, Kind
from kv_transfer.pair.door import LocalDoor, TcpDoor
from kv_transfer.pair.greeting import answer_from_bytes, greeting_from_bytes, greeting_to_bytes
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Offer, Segment
from kv_transfer.pair.thread import CallThread
from kv_transfer.pair.transport import PairTransport
from kv_transfer.receiver import KVReceiver
from tests.kv_transfer.host_memory import HostMemory
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import LAYOUT, expected_by, frames_of, hello_of
from tests.patience import PATIENCE_S, eventually
from twinpool.core.clock import SystemClock
from twinpool.core.errors import (
    ConfigError,
    TransferDamaged,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import KVTicket

CONFIG = TransferConfig(message_bytes=2**14, credit_bytes=2**16, connect_timeout_s=2.0)
BLOCKS = tuple(range(32))
TOKENS = 128


class CountingLanes(IpcLanes):
    """Counts the lanes that were made, and can take its time to connect one."""

    def __init__(self, *, connect_s: float = 0.0, refusal: str = "") -> None:
        super().__init__(CONFIG, HostMemory())
        self.num_from_peers = 0
        self._connect_s = connect_s
        self._refusal = refusal

    def from_peer(self, offer: Offer, *, sender_id: str, local_host: str) -> IpcReceiveLane:
        self.num_from_peers += 1
        if self._refusal:
            raise TransferError(self._refusal)
        lane = super().from_peer(offer, sender_id=sender_id, local_host=local_host)
        connect = lane.connect

        def connect_slowly(keys: KeyExchange) -> None:
            time.sleep(self._connect_s)
            connect(keys)

        lane.connect = connect_slowly  # type: ignore[method-assign]
        return lane


class End:
    """One rank: a store, a receiver and a transport."""

    def __init__(self, lanes: IpcLanes, **settings: Any) -> None:
        self.lanes = lanes
        self.store = NumpyStore(LAYOUT, 32).fill(seed=1)
        self.receiver = KVReceiver(self.store, SystemClock(), epoch=1, config=CONFIG)
        self.transport = PairTransport("pair", CONFIG, lanes, TcpDoor(CONFIG, None), **settings)

    def expect(self) -> KVTicket:
        return expected_by(
            self.receiver, LAYOUT, blocks=BLOCKS, num_tokens=TOKENS, timeout_s=PATIENCE_S, lease_s=30.0
        )

    async def send(self, to: End, ticket: KVTicket) -> None:
        channel = await self.transport.open(to.transport.endpoint, hello_of(ticket), timeout_s=PATIENCE_S)
        for frame in frames_of(self.store, ticket, BLOCKS, frame_tokens=16):
            await channel.send([frame])
        await channel.finish()
        await channel.abort()


@asynccontextmanager
async def ends(number: int, **settings: Any) -> AsyncIterator[list[End]]:
    """Start some; at the end nothing of them is left running."""
    started = [End(CountingLanes(), **settings) for _ in range(number)]
    try:
        for end in started:
            await end.transport.start(end.receiver)
        yield started
    finally:
        for end in started:
            await end.transport.close()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)


def test_a_pair_is_made_once_and_used_by_all_that_goes_there() -> None:
    async def scenario() -> None:
        async with ends(2) as (source, target):
            target.store.bytes[:] = 0
            await asyncio.gather(*(source.send(target, target.expect()) for _ in range(5)))
            await source.send(target, target.expect())

            assert target.lanes.num_from_peers == 1
            assert (target.store.bytes == source.store.bytes).all()

    asyncio.run(scenario())


def test_the_pair_that_was_idle_for_longest_makes_room() -> None:
    async def scenario() -> None:
        async with ends(4, most_pairs=2) as (source, *targets):
            for target in (targets[0], targets[1], targets[0], targets[2]):
                await source.send(target, target.expect())
            await eventually(lambda: len(source.transport._to) == 2)
            for target in targets[:1]:
                await source.send(target, target.expect())

            assert [target.lanes.num_from_peers for target in targets] == [1, 1, 1]
            await source.send(targets[1], targets[1].expect())
            assert targets[1].lanes.num_from_peers == 2

    asyncio.run(scenario())


def test_no_pair_that_is_used_makes_room() -> None:
    async def scenario() -> None:
        async with ends(3, most_pairs=1) as (source, first, second):
            ticket = first.expect()
            open_channel = source.transport.open
            channel = await open_channel(first.transport.endpoint, hello_of(ticket), timeout_s=PATIENCE_S)

            with pytest.raises(TransferError, match="1 peers at once are all that there may be"):
                await source.send(second, second.expect())
            await channel.abort()
            await source.send(second, second.expect())

    asyncio.run(scenario())


def test_a_receiver_with_no_room_says_so() -> None:
    async def scenario() -> None:
        async with ends(3, most_pairs=1) as (first, second, target):
            ticket = target.expect()
            address = target.transport.endpoint
            channel = await first.transport.open(address, hello_of(ticket), timeout_s=PATIENCE_S)

            with pytest.raises(TransferError, match="1 peers at once are all that there may be"):
                await second.send(target, target.expect())
            await channel.abort()

    asyncio.run(scenario())


def test_a_pair_that_its_peer_gave_up_is_made_again_without_a_failure() -> None:
    async def scenario() -> None:
        async with ends(3, most_pairs=1) as (first, second, target):
            for _ in range(3):
                for source in (first, second):
                    await source.send(target, target.expect())

            assert target.lanes.num_from_peers == 6

    asyncio.run(scenario())


def test_a_pair_is_made_on_while_nobody_has_time_to_wait_for_it() -> None:
    async def scenario() -> None:
        async with ends(1) as (source,):
            target = End(CountingLanes(connect_s=0.5))
            await target.transport.start(target.receiver)
            address = target.transport.endpoint
            with pytest.raises(TransferTimeout, match=r"no answer from .* in 0.1 s"):
                await source.transport.open(address, hello_of(target.expect()), timeout_s=0.1)
            await source.send(target, target.expect())

            assert target.lanes.num_from_peers == 1
            await target.transport.close()

    asyncio.run(scenario())


def test_a_sender_that_is_refused_does_not_spoil_the_pair_for_another() -> None:
    async def scenario() -> None:
        async with ends(2) as (source, target):
            stale, good = target.expect(), target.expect()
            target.receiver.cancel(stale.transfer_id)
            refused, served = await asyncio.gather(
                source.send(target, stale), source.send(target, good), return_exceptions=True
            )

            assert isinstance(refused, TransferRefused)
            assert served is None

    asyncio.run(scenario())


def test_a_peer_that_cannot_work_with_this_rank_is_not_asked_each_time() -> None:
    async def scenario() -> None:
        async with ends(1) as (source,):
            target = End(CountingLanes(refusal="nccl: this worker has another one"))
            await target.transport.start(target.receiver)
            for _ in range(3):
                with pytest.raises(TransferError, match="this worker has another one"):
                    await source.send(target, target.expect())

            assert target.lanes.num_from_peers == 1
            assert target.receiver.counters.refused == 0, "no part was admitted, so another way may carry it"
            await target.transport.close()

    asyncio.run(scenario())


async def greeted(target: End, hello: Hello, lane: IpcSendLane) -> tuple[Control, Any]:
    """Greet a receiver by hand; return the connection and its first word."""
    control = await TcpDoor(CONFIG, None).connect(target.transport.endpoint.address)
    control.say(Kind.GREETING, greeting_to_bytes(lane.offer, hello))
    return control, await control.hear()


def test_nothing_is_made_for_a_stranger() -> None:
    async def scenario() -> None:
        async with ends(1) as (target,):
            before = threading.active_count()
            hello = replace(hello_of(target.expect()), proof=b"guessed")
            control, reply = await greeted(target, hello, CountingLanes().to_peer(""))

            assert reply.kind is Kind.REPLY
            with pytest.raises(TransferRefused, match="does not hold the ticket"):
                read_reply(reply.body, address="decode")
            with pytest.raises(TransferError, match="the peer is gone"):
                await control.hear()
            assert target.lanes.num_from_peers == 0
            assert threading.active_count() <= before  # those of an earlier test may have ended

    asyncio.run(scenario())


def test_strangers_who_say_nothing_are_shown_the_door_and_keep_nobody_out() -> None:
    async def scenario() -> None:
        async with ends(2) as (source, target):
            door = TcpDoor(CONFIG, None)
            silent = [await door.connect(target.transport.endpoint.address) for _ in range(100)]
            await source.send(target, target.expect())

            for control in silent:
                with pytest.raises(TransferError):
                    async with asyncio.timeout(PATIENCE_S):
                        while True:
                            await control.hear()

    asyncio.run(scenario())


def test_a_holder_of_a_ticket_who_talks_nonsense_ends_its_own_pair_and_no_other() -> None:
    rng = random.Random(7)

    async def scenario() -> None:
        async with ends(2) as (source, target):
            await source.send(target, target.expect())
            before, lane = target.store.bytes.copy(), CountingLanes().to_peer("")
            batch = batch_to_bytes(0, [Segment(0, 64)], [(1, [frame(64)])])
            for _ in range(200):
                ticket = target.expect()
                control, answer = await greeted(target, hello_of(ticket), lane)
                assert answer.kind is Kind.ANSWER
                while (await control.hear()).kind is not Kind.READY:
                    pass
                if rng.random() < 0.7:
                    control.say(Kind.OPEN, hello_to_bytes(hello_of(ticket)), channel=1)
                for _ in range(rng.randrange(1, 6)):
                    control.say(*nonsense(rng, batch), channel=rng.randrange(3))
                await asyncio.sleep(0.002 * rng.random())
                control.cut()
                target.receiver.cancel(ticket.transfer_id)
            assert (target.store.bytes == before).all()
            await source.send(target, target.expect())

            assert source.transport._to[target.transport.endpoint.address].pair.result().is_idle

    asyncio.run(scenario())


def nonsense(rng: random.Random, batch: bytes) -> tuple[Kind, bytes]:
    """Return anything, or something that is nearly a batch."""
    if rng.random() < 0.5:
        return rng.choice(list(Kind)), rng.randbytes(rng.randrange(60))
    spoiled = bytearray(batch)
    spoiled[rng.randrange(len(spoiled))] = rng.randrange(256)
    return Kind.BATCH, bytes(spoiled[: rng.randrange(1, len(spoiled) + 1)])


@pytest.mark.parametrize("body", [b"", b"\0\0\0\0", b"\7\0\0\0", b"\xff" * 4000], ids=len)
def test_a_receiver_that_takes_a_slot_that_was_not_sent_ends_the_pair(body: bytes) -> None:
    async def scenario() -> None:
        async with ends(2) as (source, target):
            await source.send(target, target.expect())
            where, ticket = target.transport.endpoint, target.expect()
            channel = await source.transport.open(where, hello_of(ticket), timeout_s=PATIENCE_S)
            (pair,) = target.transport._from
            pair._control.say(Kind.TAKEN, body)

            with pytest.raises(TransferDamaged, match="a slot was taken that was not sent"):
                await channel.ended()
            await channel.abort()
            await source.send(target, target.expect())

    asyncio.run(scenario())


def test_a_sender_that_changes_memory_it_has_announced_spoils_nothing_that_was_copied() -> None:
    memory = HostMemory()
    sender = IpcLanes(CONFIG, memory).to_peer("")
    receiver = IpcLanes(CONFIG, memory).from_peer(sender.offer, sender_id="prefill", local_host="")
    receiver.connect(KeyExchange(lambda data: None))
    shown = sender._shown.data
    shown[:64] = 1
    receiver.receive(0, 1, [Segment(0, 64)]).wait()
    payload = receiver.payload(1, 0, 64)
    shown[:64] = 2

    assert bytes(payload.views()[0]) == bytes([1] * 64)
    receiver.close()


def test_memory_that_is_not_the_one_promised_is_refused() -> None:
    memory = HostMemory()
    first, second = (IpcLanes(CONFIG, memory).to_peer("") for _ in range(2))
    receiver = IpcLanes(CONFIG, memory).from_peer(
        {**first.offer, "handle": second.offer["handle"]}, sender_id="prefill", local_host=""
    )

    with pytest.raises(TransferError, match="not the peer's"):
        receiver.connect(KeyExchange(lambda data: None))


@pytest.mark.parametrize("name", ["num_slots", "slot_bytes"])
def test_a_receiver_sets_aside_no_more_than_its_own_settings_say(name: str) -> None:
    offer = dict(IpcLanes(CONFIG, HostMemory()).to_peer("").offer)
    most = offer[name]
    assert isinstance(most, int)

    with pytest.raises(TransferError, match=r"transfer\.credit_bytes: the sender's asks for"):
        IpcLanes(CONFIG, HostMemory()).from_peer(
            {**offer, name: most + 1}, sender_id="prefill", local_host=""
        )


def test_memory_that_was_shown_is_used_again() -> None:
    lanes = IpcLanes(CONFIG, HostMemory())
    first = lanes.to_peer("")
    first.close()

    assert lanes.to_peer("").offer["handle"] == first.offer["handle"]


def frame(num_bytes: int, layer: int = 0) -> Frame:
    return Frame(
        transfer_id="t",
        epoch=1,
        first_head=0,
        num_heads=2,
        layer=layer,
        first_token=0,
        num_tokens=1,
        checksum=layer,
        payload=HostPayload([memoryview(bytes(num_bytes))]),
    )


@given(st.lists(st.lists(st.integers(0, 100), max_size=4), max_size=5), st.integers(0, 7))
def test_a_batch_is_read_as_it_was_written(messages: list[list[int]], slot: int) -> None:
    total = sum(aligned(size) for sizes in messages for size in sizes)
    segments = [Segment(0, total)] if total else []
    written = [(number, [frame(size, size) for size in sizes]) for number, sizes in enumerate(messages)]

    batch = batch_from_bytes(batch_to_bytes(slot, segments, written))

    assert batch.slot == slot
    assert batch.num_bytes == total
    assert [[header.payload_bytes for header in part.headers] for part in batch.parts] == messages
    assert [part.channel for part in batch.parts] == list(range(len(messages)))
    starts = [start for part in batch.parts for start in part.starts]
    sizes = [size for part in messages for size in part]
    assert starts == [sum(map(aligned, sizes[:number])) for number in range(len(sizes))]


@pytest.mark.parametrize(
    "segments",
    [[], [Segment(0, 16)], [Segment(16, 32)], [Segment(0, 16), Segment(48, 16)], [Segment(0, 64)]],
    ids=str,
)
def test_segments_that_do_not_hold_the_payloads_are_no_batch(segments: Sequence[Segment]) -> None:
    with pytest.raises(TransferDamaged, match="segments"):
        batch_from_bytes(batch_to_bytes(0, segments, [(1, [frame(32)])]))


def test_the_frames_of_all_messages_of_a_batch_are_counted() -> None:
    def batch(*counts: int) -> bytes:
        return batch_to_bytes(0, [], [(number, [frame(0)] * count) for number, count in enumerate(counts)])

    assert sum(len(part.headers) for part in batch_from_bytes(batch(8000, 192)).parts) == 8192
    with pytest.raises(TransferDamaged, match="8193 frames in one batch are more than 8192"):
        batch_from_bytes(batch(8000, 193))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_batch_are_refused(data: bytes) -> None:
    try:
        batch = batch_from_bytes(data)
    except TransferDamaged:
        return
    assert batch.num_bytes >= 0


@given(st.binary(max_size=300))
def test_bytes_that_are_no_greeting_are_refused(data: bytes) -> None:
    try:
        greeting_from_bytes(data)
    except TransferDamaged:
        return


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b'{"a": [1]}', b'{"a": true}', b'{"a": 1.5}', b"[" * 9000, b'{"a":"' + b"x" * 9000 + b'"}'],
)
def test_an_offer_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(TransferDamaged, match="how bytes are to move"):
        answer_from_bytes(data)


def test_a_message_that_is_cut_short_or_unknown_is_an_error_and_a_cancelled_wait_loses_none() -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[Control] = asyncio.Queue()

        async def connected(control: Control) -> None:
            heard.put_nowait(control)

        door = TcpDoor(CONFIG, None)
        await door.listen(connected)
        _, writer = await asyncio.open_connection(*door.address.split(":"))
        control = await heard.get()
        said = bytes([Kind.KEY]) + (5).to_bytes(4, "little") + (3).to_bytes(4, "little")
        writer.write(said + b"a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await control.hear()
        writer.write(b"bc")
        message = await control.hear()
        assert (message.kind, message.channel, message.body) == (Kind.KEY, 5, b"abc")

        writer.write(bytes([99]) + bytes(8))
        with pytest.raises(TransferDamaged, match="no known kind"):
            await control.hear()
        writer.close()
        control.cut()
        door.close()

    asyncio.run(scenario())


def test_a_long_message_is_refused_before_it_is_read() -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[Control] = asyncio.Queue()

        async def connected(control: Control) -> None:
            heard.put_nowait(control)

        door = TcpDoor(CONFIG, None)
        await door.listen(connected)
        _, writer = await asyncio.open_connection(*door.address.split(":"))
        writer.write(bytes([Kind.KEY]) + bytes(4) + (2**31).to_bytes(4, "little"))
        control = await heard.get()

        with pytest.raises(TransferDamaged, match="2147483648 bytes"):
            await control.hear()
        writer.close()
        control.cut()
        door.close()

    asyncio.run(scenario())


def test_a_key_is_seen_at_both_ends_and_waited_for_no_longer_than_told() -> None:
    said: list[bytes] = []
    here, there = KeyExchange(said.append), KeyExchange(lambda data: None)
    here.set("address", b"somewhere")
    there.received(said[0])

    assert here.get("address", timeout_s=0) == there.get("address", timeout_s=0) == b"somewhere"
    with pytest.raises(TransferTimeout, match="did not say port"):
        there.get("port", timeout_s=0.01)
    there.fail(TransferError("the peer is gone"))
    with pytest.raises(TransferError, match="the peer is gone"):
        there.get("port", timeout_s=PATIENCE_S)


def test_keys_are_not_kept_without_end() -> None:
    keys = KeyExchange(lambda data: None)
    with pytest.raises(TransferDamaged, match="more than 256 keys"):
        for number in range(300):
            keys.received(len(str(number)).to_bytes(2, "little") + str(number).encode())


def test_a_key_holds_no_more_than_a_library_says() -> None:
    keys = KeyExchange(lambda data: None)
    keys.received(b"\x01\0k" + bytes(2**16))
    with pytest.raises(TransferDamaged, match="a key of 65537 bytes"):
        keys.received(b"\x01\0l" + bytes(2**16 + 1))
    assert keys.values() == [bytes(2**16)]


def test_a_thread_makes_its_calls_in_order_and_ends() -> None:
    async def scenario() -> None:
        thread = CallThread("test")
        made: list[int] = []
        calls = [thread.call(lambda number=number: made.append(number)) for number in range(50)]
        await asyncio.gather(*calls)
        with pytest.raises(ZeroDivisionError):
            await thread.call(lambda: 1 // 0)
        thread.end()
        thread.join(PATIENCE_S)

        assert made == list(range(50))
        assert not thread._thread.is_alive()

    asyncio.run(scenario())


def test_a_local_door_knows_its_machine_its_user_and_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        heard: asyncio.Queue[Control] = asyncio.Queue()

        async def connected(control: Control) -> None:
            heard.put_nowait(control)

        door = LocalDoor(CONFIG, "gpu-0", lambda identity: identity != "far")
        await door.listen(connected)
        machine, name, _ = door.address.split("/")
        assert door.reaches(door.address)
        assert not door.reaches(f"elsewhere/{name}/gpu-0")
        assert not door.reaches(f"{machine}/{name}/far")
        with pytest.raises(ConfigError, match="cannot be bound"):
            LocalDoor(replace(CONFIG, listen=door.address), "gpu-0", lambda identity: True)

        control = await door.connect(door.address)
        (await heard.get()).cut()
        control.cut()
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with pytest.raises(TransferError, match="another user listens there"):
            await door.connect(door.address)
        door.close()
        await asyncio.sleep(0.05)
        assert heard.empty(), "nor is another user let in"

    asyncio.run(scenario())
