"""Every transport keeps the same promises; a new file in ``kv_transfer/transports`` is tested as it is.

The tests speak to whole workers: a sender and a store on one side, a receiver and a store on the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.registry import load_transport, transport_names, unavailable
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import (
    LAYOUT,
    SECRET,
    SENDER_ID,
    Worker,
    expect,
    frames_of,
    hello_of,
    open_channel,
    receiving,
    sealed,
    start_worker,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from twinpool.core.clock import ManualClock, SystemClock
from twinpool.core.errors import (
    LayoutMismatch,
    TransferDamaged,
    TransferError,
    TransferRefused,
    TransferTimeout,
)
from twinpool.core.payload import HostPayload
from twinpool.core.ports import KVRange
from twinpool.core.ticket import Endpoint, KVTicket

TOKENS = 42
SOURCE = tuple(range(20, 31))  # blocks on the prefill side
TARGET = tuple(range(3, 14))  # blocks on the decode side
STEPS = range(0, 10, 3)  # messages that got through before something happens

pytestmark = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(unavailable(name)), reason=unavailable(name)))
        for name in transport_names()
    ],
)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario that must end, and leave no task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await scenario
        await eventually(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(bounded())


def small_messages(**settings: Any) -> TransferConfig:
    """One block of one layer per message, so that a transfer has many steps."""
    message_bytes = LAYOUT.block_tokens * LAYOUT.layer_token_bytes
    return TransferConfig(message_bytes=message_bytes, credit_bytes=4 * message_bytes, **settings)


def assert_equal(prefill: Worker, decode: Worker, *, first_token: int = 0) -> None:
    sent = prefill.store.sequence(SOURCE, first_token=first_token, num_tokens=TOKENS)
    there = decode.store.sequence(TARGET, first_token=first_token, num_tokens=TOKENS)
    assert (sent == there).all()


async def wait(worker: Worker, ticket: KVTicket) -> None:
    await worker.receiver.wait(ticket.transfer_id, ticket.epoch)


def parts() -> Iterator[tuple[int, int]]:
    """Layer by layer within chunks of 7 tokens, as a chunked prefill writes them."""
    for num_tokens in range(7, TOKENS + 1, 7):
        for layer in range(LAYOUT.num_layers):
            yield layer, num_tokens


@pytest.mark.parametrize("cached_tokens", [0, 5, 16, TOKENS - 1])
@pytest.mark.parametrize(("source_block", "target_block"), [(4, 4), (4, 16), (16, 4), (7, 8)])
def test_bytes_arrive_equal_whatever_the_block_sizes_and_what_is_cached(
    name: str, source_block: int, target_block: int, cached_tokens: int
) -> None:
    async def scenario() -> None:
        async with two_workers(
            name,
            small_messages(),
            source_layout=replace(LAYOUT, block_tokens=source_block),
            target_layout=replace(LAYOUT, block_tokens=target_block),
        ) as (prefill, decode):
            before = decode.store.bytes.copy()
            cached = decode.store.sequence(TARGET, num_tokens=cached_tokens)
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS, cached_tokens=cached_tokens)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            for layer, num_tokens in parts():
                transfer.written(layer, num_tokens, SOURCE)
                await asyncio.sleep(0)
            await transfer.wait()
            await wait(decode, ticket)

            assert_equal(prefill, decode, first_token=cached_tokens)
            assert (decode.store.sequence(TARGET, num_tokens=cached_tokens) == cached).all()
            others = [block for block in range(32) if block not in TARGET]
            assert (decode.store.bytes[:, :, others] == before[:, :, others]).all()
            report = decode.receiver.cancel(ticket.transfer_id)
            assert report.kv_bytes == (TOKENS - cached_tokens) * LAYOUT.token_bytes
            assert prefill.sender.num_open == decode.receiver.num_open == 0

    run(scenario())


def test_kv_travels_while_later_layers_are_still_computed(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            due_tokens = 0
            for layer, num_tokens in parts():
                transfer.written(layer, num_tokens, SOURCE)
                whole_blocks = num_tokens if num_tokens == TOKENS else num_tokens - num_tokens % 4
                due_tokens += whole_blocks - (num_tokens - 7 - (num_tokens - 7) % 4)
                due_bytes = due_tokens * LAYOUT.layer_token_bytes
                await eventually(lambda due=due_bytes: decode.receiver.counters.bytes == due)
            await transfer.wait()

    run(scenario())


def test_large_parts_are_cut_and_small_ones_share_a_message(name: str) -> None:
    async def frames_sent(message_bytes: int) -> int:
        config = TransferConfig(message_bytes=message_bytes, credit_bytes=message_bytes)
        async with two_workers(name, config) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, SOURCE)
            await transfer.wait()
            assert_equal(prefill, decode)
            return prefill.sender.counters.frames

    async def scenario() -> None:
        assert await frames_sent(1) == TOKENS * LAYOUT.num_layers
        assert await frames_sent(8 * LAYOUT.layer_token_bytes) == 6 * LAYOUT.num_layers
        assert await frames_sent(2**20) == LAYOUT.num_layers

    run(scenario())


def test_nothing_to_send_is_confirmed_at_once(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS, cached_tokens=TOKENS)
            await (await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)).wait()
            await wait(decode, ticket)

    run(scenario())


def test_order_and_repetition_of_frames_do_not_matter(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=5)
            odd = frames_of(prefill.store, ticket, SOURCE, frame_tokens=11)
            channel = await open_channel(prefill, ticket)
            await channel.send([*frames[3:][::-1], *frames[8:]])
            await channel.send(odd[1:])
            await channel.send(frames)
            await channel.finish()
            await channel.abort()

            await wait(decode, ticket)
            assert_equal(prefill, decode)
            assert decode.receiver.counters.duplicates > 0

    run(scenario())


@pytest.mark.parametrize("num_transfers", [2, 20])
def test_many_transfers_at_once_do_not_mix(name: str, num_transfers: int) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            tickets = [await expect(decode, blocks=(i,), num_tokens=4) for i in range(num_transfers)]
            transfers = [await prefill.sending.begin(ticket, timeout_s=PATIENCE_S) for ticket in tickets]
            for layer in range(LAYOUT.num_layers):
                for i, transfer in enumerate(transfers):
                    transfer.written(layer, 4, (31 - i,))
                await asyncio.sleep(0)
            await asyncio.gather(*(transfer.wait() for transfer in transfers))

            for i in range(num_transfers):
                assert (decode.store.bytes[:, :, i] == prefill.store.bytes[:, :, 31 - i]).all()

    run(scenario())


async def sent_up_to(prefill: Worker, decode: Worker, ticket: KVTicket, num_messages: int) -> Any:
    """Begin a transfer that stops after some messages, because no more is computed."""
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    for i in range(num_messages):
        transfer.written(i % LAYOUT.num_layers, 4 * (i // LAYOUT.num_layers + 1), SOURCE)
    await eventually(lambda: decode.receiver.report(ticket.transfer_id).num_frames == num_messages)
    return transfer


@pytest.mark.parametrize("step", STEPS)
def test_a_sender_that_gives_up_reads_no_more_and_the_receiver_learns_it(name: str, step: int) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await sent_up_to(prefill, decode, ticket, step)
            write_all(transfer, ticket, SOURCE)
            if step:
                await asyncio.sleep(0)  # some of the rest is on its way
            await transfer.abort()
            assert prefill.sender.num_open == 0
            await transfer.abort()
            num_reads = prefill.store.num_reads
            transfer.written(0, TOKENS, SOURCE)

            with pytest.raises(TransferError, match="this worker gave the transfer up"):
                await transfer.wait()
            if step:
                with pytest.raises(TransferError, match="the sender stopped"):
                    await wait(decode, ticket)
                kv_bytes = decode.receiver.report(ticket.transfer_id).kv_bytes
                await asyncio.sleep(0.01)
                assert decode.receiver.cancel(ticket.transfer_id).kv_bytes == kv_bytes
            assert prefill.store.num_reads == num_reads

    run(scenario())


@pytest.mark.parametrize("step", STEPS)
def test_a_receiver_that_cancels_is_never_written_again_and_the_sender_learns_it(
    name: str, step: int
) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await sent_up_to(prefill, decode, ticket, step)
            decode.receiver.cancel(ticket.transfer_id)
            store = decode.store.bytes.copy()
            write_all(transfer, ticket, SOURCE)

            with pytest.raises(TransferRefused):
                await transfer.wait()
            num_reads = prefill.store.num_reads
            with pytest.raises(TransferRefused):
                await wait(decode, ticket)
            await asyncio.sleep(0.01)
            assert prefill.store.num_reads == num_reads
            assert (decode.store.bytes == store).all()

    run(scenario())


@pytest.mark.parametrize("reason", ["cancelled", "expired"])
def test_a_sender_with_nothing_to_send_yet_learns_that_nobody_waits(name: str, reason: str) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with two_workers(name, small_messages(), clock=clock) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await sent_up_to(prefill, decode, ticket, 3)
            if reason == "cancelled":
                decode.receiver.cancel(ticket.transfer_id)
            else:
                clock.advance(ticket.lease_s)
                decode.receiver.sweep()

            with pytest.raises((TransferRefused, TransferTimeout), match=r"was released|no progress"):
                await transfer.wait()

    run(scenario())


@pytest.mark.parametrize("step", STEPS)
def test_a_receiver_that_dies_fails_its_senders(name: str, step: int) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await sent_up_to(prefill, decode, ticket, step)
            await decode.transport.close()
            write_all(transfer, ticket, SOURCE)

            with pytest.raises(TransferError):
                await transfer.wait()
            assert prefill.sender.num_open == 0

    run(scenario())


@pytest.mark.parametrize("step", STEPS[1:])
def test_a_sender_that_dies_fails_its_receivers(name: str, step: int) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            await sent_up_to(prefill, decode, ticket, step)
            await prefill.transport.close()

            with pytest.raises(TransferError):
                await wait(decode, ticket)
            assert decode.receiver.num_open == 1, "the room is the lender's until it is released"

    run(scenario())


def test_nobody_at_the_address_is_an_error_at_once(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            await decode.transport.close()

            started_s = time.monotonic()
            with pytest.raises(TransferError):
                await (await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)).wait()
            assert time.monotonic() - started_s < TransferConfig().connect_timeout_s

    run(scenario())


def test_a_restarted_receiver_refuses_old_tickets_and_takes_new_ones(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, small_messages()) as (prefill, first_life):
            decode = first_life
            config = replace(prefill.config, listen=decode.transport.endpoint.address)
            for epoch in range(20, 25):
                stale = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
                cut = await sent_up_to(prefill, decode, stale, 2)
                await decode.close()
                with pytest.raises(TransferError):
                    await cut.wait()
                with pytest.raises(TransferError):
                    await open_channel(prefill, stale)

                decode = await start_worker(name, config, hub=prefill.hub, epoch=epoch)
                before = decode.store.bytes.copy()
                with pytest.raises(TransferRefused, match=f"epoch {stale.epoch} is over, this is {epoch}"):
                    await open_channel(prefill, replace(stale, ranks=((decode.transport.endpoint,),)))
                assert (decode.store.bytes == before).all()

                ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
                transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
                write_all(transfer, ticket, SOURCE)
                await transfer.wait()
                assert_equal(prefill, decode)
            await decode.close()

    run(scenario())


def flipped(frame: Frame, bit: int) -> Frame:
    payload = bytearray(frame.payload.views()[0])
    payload[bit // 8 % len(payload)] ^= 1 << bit % 8
    return replace(frame, payload=HostPayload([memoryview(payload)]))


def test_each_damaged_payload_is_counted_and_never_taken(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            for bit in range(200):
                ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
                frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=16)
                at = bit % len(frames)
                channel = await open_channel(prefill, ticket)
                with pytest.raises(TransferDamaged, match="wrong checksum"):
                    await channel.send([*frames[:at], flipped(frames[at], 37 * bit), *frames[at + 1 :]])
                    await channel.finish()
                await channel.abort()
                with pytest.raises(TransferDamaged, match="wrong checksum"):
                    await wait(decode, ticket)
                decode.receiver.cancel(ticket.transfer_id)

            assert decode.receiver.counters.checksum_failures == 200
            assert decode.receiver.counters.completed == 0

    run(scenario())


@pytest.mark.parametrize(
    "change",
    [
        {"layer": 2},
        {"layer": 2**31},
        {"first_token": 7},
        {"first_token": 2**31},
        {"num_tokens": 0},
        {"num_tokens": 2**31},
        {"payload": HostPayload([memoryview(b"")])},
        {"checksum": 1},
    ],
    ids=str,
)
def test_a_damaged_header_ends_its_own_transfer_and_no_other(name: str, change: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=16)
            channel = await open_channel(prefill, ticket)
            with pytest.raises(TransferError):
                await channel.send([frames[0], replace(frames[1], **change), *frames[2:]])
                await channel.finish()
            await channel.abort()
            with pytest.raises(TransferError):
                await wait(decode, ticket)

            other = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(other, timeout_s=PATIENCE_S)
            write_all(transfer, other, SOURCE)
            await transfer.wait()
            assert_equal(prefill, decode)

    run(scenario())


def test_a_missing_frame_is_never_whole(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            for missing in range(LAYOUT.num_layers * 3):
                ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
                frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=16)
                channel = await open_channel(prefill, ticket)
                await channel.send(frames[:missing] + frames[missing + 1 :])
                with pytest.raises(TransferError, match="stopped before everything had come"):
                    await channel.finish()
                await channel.abort()

            assert decode.receiver.counters.completed == 0

    run(scenario())


def test_without_checksums_a_flipped_byte_is_seen_by_comparing_bytes(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig(checksum=False)) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=16)
            channel = await open_channel(prefill, ticket)
            await channel.send([flipped(frames[0], 100), *frames[1:]])
            await channel.finish()
            await channel.abort()

            await wait(decode, ticket)
            with pytest.raises(AssertionError):
                assert_equal(prefill, decode)

    run(scenario())


def test_frames_after_the_lease_are_refused_and_change_nothing(name: str) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with two_workers(name, small_messages(), clock=clock) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            channel = await open_channel(prefill, ticket)
            frames = frames_of(prefill.store, ticket, SOURCE, frame_tokens=4)
            await channel.send(frames[:1])
            await eventually(lambda: decode.receiver.counters.frames == 1)
            clock.advance(ticket.lease_s)
            store = decode.store.bytes.copy()

            with pytest.raises((TransferRefused, TransferTimeout)):
                await channel.send(frames[1:2])
                await channel.finish()
            await channel.abort()
            assert (decode.store.bytes == store).all()
            assert decode.receiver.counters.late_frames == 1
            assert decode.receiver.counters.expired == 1

    run(scenario())


class CountingSink:
    """A receiver that notes how much is under way whenever a frame comes."""

    def __init__(self, receiver: KVReceiver) -> None:
        self._receiver = receiver
        self.accepted_bytes = 0
        self.sent_bytes = 0
        self.most_in_flight_bytes = 0

    def admit(self, hello: Hello, *, transport: str) -> None:
        self._receiver.admit(hello, transport=transport)

    def expects(self, hello: Hello) -> None:
        self._receiver.expects(hello)

    def accept(self, frame: Frame) -> None:
        self.most_in_flight_bytes = max(self.most_in_flight_bytes, self.sent_bytes - self.accepted_bytes)
        self.accepted_bytes += frame.payload.nbytes
        self._receiver.accept(frame)

    def alive(self, hello: Hello) -> None:
        self._receiver.alive(hello)

    async def wait_part(self, hello: Hello) -> None:
        await self._receiver.wait_part(hello)

    def broken(self, hello: Hello, error: TransferError) -> None:
        self._receiver.broken(hello, error)


def test_no_more_is_in_flight_than_the_receiver_gave_credit_for(name: str) -> None:
    async def scenario() -> None:
        config, hub = small_messages(), Hub()
        transport, peer = load_transport(name, config, hub), load_transport(name, config, hub)
        source, target = NumpyStore(LAYOUT, 32).fill(1), NumpyStore(LAYOUT, 32)
        receiver = KVReceiver(target, SystemClock(), epoch=1, config=config)
        sink = CountingSink(receiver)
        await peer.start(sink)
        ticket = await receiving(receiver, LAYOUT).expect(
            request_id="r", sender_id=SENDER_ID, blocks=range(32), num_tokens=128, timeout_s=PATIENCE_S
        )
        channel = await transport.open(peer.endpoint, hello_of(ticket), timeout_s=PATIENCE_S)
        for frame in frames_of(source, ticket, range(32), frame_tokens=4):
            await channel.send([frame])
            sink.sent_bytes += frame.payload.nbytes
        await channel.finish()
        await channel.abort()
        await transport.close()
        await peer.close()

        assert (target.bytes == source.bytes).all()
        assert 0 < sink.most_in_flight_bytes <= config.credit_bytes

    run(scenario())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proof": bytes(32)}, "the sender does not hold the ticket"),
        ({"wire": "int8"}, "the sender does not hold the ticket"),
        ({"transfer_id": "0" * 32}, "no such transfer is expected"),
        ({"epoch": 1}, "epoch 1 is over, this is 11"),
    ],
)
def test_a_stranger_is_not_admitted_and_the_true_sender_is(
    name: str, change: dict[str, Any], message: str
) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            forged = replace(hello_of(ticket), **change)
            with pytest.raises(TransferRefused, match=message):
                await prefill.transport.open(ticket.ranks[0][0], forged, timeout_s=PATIENCE_S)

            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, SOURCE)
            await transfer.wait()
            assert_equal(prefill, decode)
            assert decode.receiver.report(ticket.transfer_id).transport == name

    run(scenario())


def test_a_part_is_admitted_once(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            channel = await open_channel(prefill, ticket)
            with pytest.raises(TransferRefused, match="was admitted already"):
                await open_channel(prefill, ticket)

            await channel.send(frames_of(prefill.store, ticket, SOURCE, frame_tokens=16))
            await channel.finish()
            await channel.abort()
            assert_equal(prefill, decode)

    run(scenario())


def head_frames(prefill: Worker, ticket: KVTicket, head: int) -> list[Frame]:
    """The frames of one head of a sequence."""
    frames = []
    for layer in range(LAYOUT.num_layers):
        part = KVRange(
            layer=layer, blocks=SOURCE, first_token=0, num_tokens=TOKENS, heads=range(head, head + 1)
        )
        payload = prefill.store.payload(part, wire=LAYOUT.dtype)
        frame = sealed(ticket, layer, 0, TOKENS, payload.joined())
        frames.append(replace(frame, first_head=head, num_heads=1).sealed())
    return frames


def test_two_ranks_bring_their_heads_and_only_both_are_whole(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            channels = [
                await prefill.transport.open(
                    ticket.ranks[0][0], hello_of(ticket, heads=range(head, head + 1)), timeout_s=PATIENCE_S
                )
                for head in range(2)
            ]
            await channels[0].send(head_frames(prefill, ticket, 0))
            await channels[0].finish()
            assert decode.receiver.report(ticket.transfer_id).complete_s is None
            with pytest.raises(TransferDamaged):
                await channels[1].send(head_frames(prefill, ticket, 0))  # not its own
                await channels[1].finish()
            for channel in channels:
                await channel.abort()
            decode.receiver.cancel(ticket.transfer_id)

            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            for head in (1, 0):
                hello = hello_of(ticket, heads=range(head, head + 1))
                channel = await prefill.transport.open(ticket.ranks[0][0], hello, timeout_s=PATIENCE_S)
                await channel.send(head_frames(prefill, ticket, head))
                await channel.finish()
                await channel.abort()
            await wait(decode, ticket)
            assert_equal(prefill, decode)

    run(scenario())


def test_layouts_that_differ_are_refused_by_name(name: str) -> None:
    async def scenario() -> None:
        wider = replace(LAYOUT, head_dim=2 * LAYOUT.head_dim)
        async with two_workers(name, TransferConfig(), target_layout=wider) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            with pytest.raises(LayoutMismatch, match="head_dim: prefill stores 4, decode stores 8"):
                await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)

    run(scenario())


def test_a_message_without_frames_renews_the_lease(name: str) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with two_workers(name, TransferConfig(), clock=clock) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            channel = await open_channel(prefill, ticket)
            for number in range(1, 4):
                clock.advance(0.8 * ticket.lease_s)
                await channel.send([])
                await eventually(lambda number=number: decode.receiver.counters.signs_of_life == number)
                decode.receiver.sweep()

            await channel.send(frames_of(prefill.store, ticket, SOURCE, frame_tokens=16))
            await channel.finish()
            await channel.abort()
            assert_equal(prefill, decode)

    run(scenario())


def test_a_transfer_that_is_never_computed_ends_at_its_deadline(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            # Enough for a library to start, on a machine that does other things too.
            transfer = await prefill.sending.begin(ticket, timeout_s=1.5)

            with pytest.raises(TransferTimeout, match="the KV was not computed in time"):
                await transfer.wait()

    run(scenario())


def test_workers_without_a_common_transport_are_told_so(name: str) -> None:
    async def scenario() -> None:
        async with two_workers(name, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            foreign = replace(ticket, ranks=((Endpoint("carrier_pigeon", "loft"),),)).signed(SECRET)

            with pytest.raises(TransferError, match=f"decode has carrier_pigeon, this worker {name}"):
                await prefill.sending.begin(foreign, timeout_s=PATIENCE_S)

    run(scenario())
