"""The TCP transport between processes, over a bad network, against strangers, and under TLS."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kv_transfer import addresses
from kv_transfer.config import MAX_MESSAGE_BYTES, TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.messages import MAX_HELLO_BYTES, end_reply, hello_to_bytes, pack
from kv_transfer.tcp_line.byte_stream import ByteStream
from kv_transfer.tcp_line.incoming import Incoming
from kv_transfer.transports.tcp import TcpTransport
from tests.kv_transfer.cut_proxy import CutProxy
from tests.kv_transfer.proxied import proxied
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, receiver_process
from tests.kv_transfer.workers import (
    LAYOUT,
    SENDER_ID,
    Worker,
    expect,
    frames_of,
    hello_of,
    open_channel,
    start_worker,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from tests.toys import layout
from tests.trust import tls_files
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.errors import ConfigError, TransferError, TransferRefused, TransferTimeout
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import Endpoint, KVTicket
from twinpool.core.tls import Party, TLSFiles
from twinpool.pb.kv_pb2 import PushReply

BLOCKS = tuple(range(32))
TOKENS = 128


async def send_all(prefill: Worker, ticket: KVTicket) -> None:
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()


async def is_sent(prefill: Worker, ticket: KVTicket) -> bool:
    try:
        await send_all(prefill, ticket)
    except TransferError:
        return False
    return True


async def send_frames(prefill: Worker, ticket: KVTicket, blocks: Sequence[int] = BLOCKS) -> None:
    """Send without any deadline but that of patience."""
    async with asyncio.timeout(PATIENCE_S):
        channel = await open_channel(prefill, ticket)
        for frame in frames_of(prefill.store, ticket, blocks, frame_tokens=4):
            await channel.send([frame])
        await channel.finish()
        await channel.abort()


async def one_whole_transfer(prefill: Worker, decode: Worker) -> None:
    decode.store.fill(seed=random.randrange(2**32))
    ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
    await send_frames(prefill, ticket)
    assert (decode.store.bytes == prefill.store.bytes).all()
    await decode.receiving.cancel(ticket.transfer_id)


def test_a_slow_network_changes_nothing_but_the_time() -> None:
    async def scenario() -> None:
        async with proxied("tcp", CONFIG) as (prefill, decode, proxy):
            proxy.delay_s = 0.005
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_a_connection_cut_anywhere_is_an_error_on_both_sides_and_the_next_transfer_works() -> None:
    async def scenario() -> None:
        async with proxied("tcp", CONFIG) as (prefill, decode, proxy):
            for cut_after_bytes in (0, 1, 3, 4, 50, 140, 200, 300, 1000, 5000, 9000, 20000):
                proxy.reset()
                await asyncio.sleep(
                    0.02
                )  # a kept connection that is cut at its first word would be made anew
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                proxy.cut_after_bytes = cut_after_bytes
                assert not await is_sent(prefill, ticket)
                if "tcp" in decode.receiver.report(ticket.transfer_id).transport:  # it was admitted
                    with pytest.raises(TransferError):
                        await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                await decode.receiving.cancel(ticket.transfer_id)
                await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_a_flipped_bit_on_the_wire_is_never_taken_as_good() -> None:
    rng = random.Random(5)
    kv_bits = 8 * TOKENS * LAYOUT.token_bytes
    offsets = [rng.randrange(kv_bits) for _ in range(170)] + [rng.randrange(8 * 400) for _ in range(30)]
    config = replace(CONFIG, lease_s=0.3, connect_timeout_s=0.3)

    async def scenario() -> tuple[int, int]:
        num_errors = 0
        async with proxied("tcp", config) as (prefill, decode, proxy):
            for offset in offsets:
                decode.store.fill(seed=offset)
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                proxy.flip_at_bit = offset
                num_errors += not await is_sent(prefill, ticket)
                if decode.receiver.report(ticket.transfer_id).complete_s is not None:
                    assert (decode.store.bytes == prefill.store.bytes).all(), f"bit {offset}"
                await decode.receiving.cancel(ticket.transfer_id)
            assert proxy.num_flipped == 200
            return num_errors, decode.receiver.counters.checksum_failures

    num_errors, checksum_failures = asyncio.run(scenario())

    assert checksum_failures >= 150
    assert num_errors >= checksum_failures


def test_a_frozen_peer_holds_no_more_than_its_credit_and_ends_with_the_lease() -> None:
    async def scenario() -> None:
        async with proxied("tcp", CONFIG) as (prefill, decode, proxy):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            (part,) = prefill.sender.begin(ticket, timeout_s=PATIENCE_S)
            part.written(0, 4, BLOCKS)
            await eventually(lambda: decode.receiver.counters.frames == 1)
            proxy.freeze()
            for layer in range(LAYOUT.num_layers):
                part.written(layer, TOKENS, BLOCKS)

            started_s = time.monotonic()
            with pytest.raises(TransferTimeout, match=r"the receiver (takes|confirms) nothing"):
                await part.wait()
            assert time.monotonic() - started_s >= CONFIG.lease_s * 0.9
            assert part.num_bytes <= CONFIG.credit_bytes + 4 * LAYOUT.layer_token_bytes
            proxy.thaw()
            with pytest.raises(TransferError):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_peer_that_takes_nothing_is_given_up_before_a_long_lease_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(addresses._TUNING, "TCP_USER_TIMEOUT", 500)

    async def scenario() -> None:
        config = TransferConfig(lease_s=600.0, message_bytes=2**20, credit_bytes=2**26)
        shape = layout(num_layers=2, num_kv_heads=16, head_dim=128, block_tokens=512)
        prefill = await start_worker(
            "tcp", config, hub=Hub(), layout=shape, num_blocks=2, worker_id=SENDER_ID
        )
        decode = await start_worker("tcp", config, hub=Hub(), layout=shape, num_blocks=2)
        async with CutProxy(decode.transport.endpoint.address) as proxy:
            ticket = await expect(decode, blocks=(0, 1), num_tokens=1024)
            channel = await prefill.transport.open(
                Endpoint("tcp", proxy.address), hello_of(ticket), timeout_s=PATIENCE_S
            )
            proxy.freeze()
            frames = frames_of(prefill.store, ticket, (0, 1), frame_tokens=64)
            with pytest.raises(TransferError, match="timed out"):
                async with asyncio.timeout(PATIENCE_S):
                    for _ in range(64):
                        for frame in frames:
                            await channel.send([frame])
            await channel.abort()
        await prefill.close()
        await decode.close()

    asyncio.run(scenario())


def test_a_peer_that_never_answers_ends_at_the_connect_timeout() -> None:
    async def scenario() -> None:
        async with proxied("tcp", replace(CONFIG, connect_timeout_s=0.2)) as (prefill, decode, proxy):
            proxy.freeze()
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)

            with pytest.raises(TransferTimeout, match=f"no answer from {proxy.address} in 0.2 s"):
                await send_all(prefill, ticket)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [64, 249, 256, 263, 1024])  # 1, 3.9, 4, 4.1 and 16 MiB
def test_kv_of_any_size_travels_in_bounded_messages(num_tokens: int) -> None:
    wide = layout(num_layers=1, num_kv_heads=16, head_dim=128)
    assert wide.token_bytes == 16 * 1024

    async def scenario() -> None:
        blocks = range(wide.num_blocks(num_tokens))
        sizes = {"layout": wide, "num_blocks": len(blocks)}
        prefill = await start_worker("tcp", TransferConfig(), hub=Hub(), worker_id=SENDER_ID, **sizes)
        decode = await start_worker("tcp", TransferConfig(), hub=Hub(), epoch=2, **sizes)
        ticket = await expect(decode, blocks=blocks, num_tokens=num_tokens)
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        transfer.written(0, num_tokens, blocks)
        await transfer.wait()
        await prefill.close()
        await decode.close()

        there, sent = (worker.store.sequence(blocks, num_tokens=num_tokens) for worker in (decode, prefill))
        assert (there == sent).all()

    asyncio.run(scenario())


@pytest.mark.parametrize("piece_bytes", [1, 7, 4096])
def test_a_payload_of_thousands_of_views_is_sent_as_it_is(piece_bytes: int) -> None:
    """More than one system call may take, and more than the socket's buffers hold at once."""

    async def scenario() -> None:
        async with proxied("tcp", TransferConfig()) as (prefill, decode, _):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            channel = await open_channel(prefill, ticket)
            frames = []
            for frame in frames_of(prefill.store, ticket, BLOCKS, frame_tokens=TOKENS):
                (whole,) = frame.payload.views()
                pieces = [whole[at : at + piece_bytes] for at in range(0, len(whole), piece_bytes)]
                frames.append(replace(frame, payload=HostPayload([memoryview(b""), *pieces])))
            await channel.send(frames)
            await channel.finish()
            await channel.abort()
            assert (decode.store.bytes == prefill.store.bytes).all()

    asyncio.run(scenario())


def test_a_message_over_the_limit_is_an_error_of_its_transfer() -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            (frame, *_) = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
            channel = await open_channel(prefill, ticket)
            huge = HostPayload([memoryview(bytes(MAX_MESSAGE_BYTES))])
            with pytest.raises(TransferError, match=f"is larger than {MAX_MESSAGE_BYTES}"):
                await channel.send([replace(frame, payload=huge)])
            await channel.abort()
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_parts_follow_each_other_on_one_connection_and_leave_it_when_they_overlap() -> None:
    async def scenario() -> None:
        async with proxied("tcp", CONFIG) as (prefill, decode, proxy):
            for _ in range(5):
                await one_whole_transfer(prefill, decode)
            assert proxy.num_connections == 1
            tickets = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(20)]
            await asyncio.gather(*(send_frames(prefill, ticket) for ticket in tickets))
            assert proxy.num_connections == 20
            for _ in range(3):
                tickets = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(8)]
                await asyncio.gather(*(send_frames(prefill, ticket) for ticket in tickets))
            assert proxy.num_connections == 20, "eight are kept"

    asyncio.run(scenario())


def test_a_kept_connection_that_is_gone_costs_nothing_but_a_new_one() -> None:
    async def scenario() -> None:
        async with proxied("tcp", CONFIG) as (prefill, decode, proxy):
            for number in range(1, 6):
                await one_whole_transfer(prefill, decode)
                assert proxy.num_connections == number
                proxy.reset()
                if number % 2:
                    await asyncio.sleep(0.05)  # so that it is noticed; else the next hello meets it

    asyncio.run(scenario())


def test_unused_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.tcp_line.idle._IDLE_S", 0.05)

    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            num_fds = psutil.Process().num_fds()
            await one_whole_transfer(prefill, decode)
            assert psutil.Process().num_fds() == num_fds + 2
            await eventually(lambda: psutil.Process().num_fds() == num_fds)
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_connections_that_their_sender_forgot_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.tcp_line.incoming._FORGOTTEN_S", 0.05)

    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            num_fds = psutil.Process().num_fds()
            await one_whole_transfer(prefill, decode)
            await eventually(lambda: psutil.Process().num_fds() == num_fds)
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_a_thousand_transfers_with_aborts_take_no_more_than_ten() -> None:
    async def some(prefill: Worker, decode: Worker, number: int) -> None:
        for turn in range(number):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, BLOCKS)
            if turn % 2:
                for _ in range(turn % 16):
                    await asyncio.sleep(0)
                await transfer.abort()
            else:
                await transfer.wait()
            await decode.receiving.cancel(ticket.transfer_id)

    async def scenario() -> None:
        process = psutil.Process()
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            await some(prefill, decode, 100)
            await eventually(lambda: len(asyncio.all_tasks()) <= 4)
            num_fds, memory_bytes = process.num_fds(), process.memory_info().rss
            await some(prefill, decode, 1000)
            await eventually(lambda: len(asyncio.all_tasks()) <= 4)
            await eventually(lambda: process.num_fds() <= num_fds)
            assert process.memory_info().rss - memory_bytes < 8 * 2**20

    asyncio.run(scenario())


def test_a_killed_peer_is_noticed_at_once_and_reached_again_after_its_restart() -> None:
    async def scenario() -> None:
        prefill = await start_worker("tcp", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        blocks = range(NUM_BLOCKS)
        listen, stale = "", None
        for epoch in range(1, 4):
            async with receiver_process("tcp", listen=listen, epoch=epoch, num_transfers=3) as decode:
                whole, cut, unused = decode.tickets
                if stale is not None:
                    (part,) = prefill.sender.begin(stale, timeout_s=PATIENCE_S)
                    with pytest.raises(TransferRefused, match=f"epoch {epoch - 1} is over, this is {epoch}"):
                        await part.wait()
                await send_frames(prefill, whole, blocks)
                assert await decode.next_line() == "whole"

                channel = await open_channel(prefill, cut)
                await decode.kill()
                with pytest.raises(TransferError):
                    async with asyncio.timeout(PATIENCE_S):
                        await channel.ended()
                await channel.abort()
                listen, stale = decode.address, unused
        await prefill.close()

    asyncio.run(scenario())


class Stranger:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader

    def say(self, *messages: bytes) -> None:
        for message in messages:
            self.writer.write(struct.pack("<I", len(message)) + message)

    async def heard(self) -> list[PushReply]:
        """Return all that the other end says before it closes."""
        data = b""
        with suppress(ConnectionResetError):
            async with asyncio.timeout(PATIENCE_S):
                while piece := await self._reader.read(65536):
                    data += piece
        self.writer.close()
        replies = []
        while data:
            (length,) = struct.unpack_from("<I", data)
            replies.append(PushReply.FromString(data[4 : 4 + length]))
            data = data[4 + length :]
        return replies


async def stranger(worker: Worker) -> Stranger:
    host, _, port = worker.transport.endpoint.address.rpartition(":")
    return Stranger(*await asyncio.open_connection(host, int(port)))


FIRST_WORDS = {
    "nothing": b"",
    "half a length": b"\x10\x00",
    "no hello": struct.pack("<I", 0),
    "a hello of 2 GiB": struct.pack("<I", 2**31),
    "a hello that is too long": struct.pack("<I", MAX_HELLO_BYTES + 1) + bytes(MAX_HELLO_BYTES + 1),
    "a hello cut short": struct.pack("<I", 100) + b"\x0a\x20abc",
    "garbage": struct.pack("<I", 40) + b"\xff" * 40,
    "a pickle": b"\x80\x04\x95\x1d\0\0\0\0\0\0\0cposix\nsystem\n(S'true'\ntR." + bytes(99),
    "HTTP": b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "random": random.Random(3).randbytes(10_000),
}


@pytest.mark.parametrize("case", FIRST_WORDS)
def test_who_says_no_hello_is_told_nothing_and_changes_nothing(case: str) -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            before = decode.store.bytes.copy()
            guest = await stranger(decode)
            guest.writer.write(FIRST_WORDS[case])
            with suppress(OSError):
                guest.writer.write_eof()
            assert not [reply for reply in await guest.heard() if not reply.error]
            assert (decode.store.bytes == before).all()
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_what_an_admitted_sender_may_not_say_ends_its_transfer_without_a_large_allocation() -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            before = decode.store.bytes.copy()
            for case in (
                "a length of 4 GiB",
                "a length over the limit",
                "no header",
                "all, but nothing came",
            ):
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                guest = await stranger(decode)
                guest.say(hello_to_bytes(hello_of(ticket)))
                match case:
                    case "a length of 4 GiB":
                        guest.writer.write(struct.pack("<I", 2**32 - 1))
                    case "a length over the limit":
                        guest.writer.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
                    case "no header":
                        guest.say(b"\x01")
                    case "all, but nothing came":
                        guest.say(b"")
                admitted, end = await guest.heard()
                assert admitted.credit_bytes == CONFIG.credit_bytes
                assert end.error in ("TransferDamaged", "TransferError"), case
                with pytest.raises(TransferError):
                    await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            assert (decode.store.bytes == before).all()
            await one_whole_transfer(prefill, decode)

    tracemalloc.start()
    try:
        asyncio.run(scenario())
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_second_hello_on_a_connection_is_as_good_as_the_first_and_anything_else_ends_it() -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            guest = await stranger(decode)
            for _ in range(2):
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                frames = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=TOKENS)
                guest.say(hello_to_bytes(hello_of(ticket)), pack(frames), b"", b"", b"")
                async with asyncio.timeout(PATIENCE_S):
                    await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            guest.say(bytes(MAX_HELLO_BYTES + 1))
            replies = await guest.heard()
            assert [reply.complete for reply in replies] == [False, False, True] * 2

    asyncio.run(scenario())


def test_a_worker_that_closes_still_says_that_a_part_was_whole() -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            message = pack(frames_of(prefill.store, ticket, BLOCKS, frame_tokens=TOKENS))
            here, there = socket.socketpair()
            here.setblocking(False)
            there.setblocking(False)
            stream = ByteStream(here)
            stream.write(bytes(2**22))  # more than a socket holds, and nobody reads
            incoming = Incoming(decode.receiver, CONFIG)
            taking = asyncio.create_task(incoming.take(stream, hello_of(ticket), on_admitted=lambda: None))
            there.send(struct.pack("<I", len(message)) + message)
            await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            await asyncio.sleep(0.01)
            assert not stream.is_drained, "the last word has not left"

            taking.cancel()
            heard = b""
            async with asyncio.timeout(PATIENCE_S):
                while piece := await asyncio.get_running_loop().sock_recv(there, 2**20):
                    heard += piece
            there.close()
            await asyncio.wait({taking})
            assert taking.cancelled()
            assert heard.endswith(end_reply(None))

    asyncio.run(scenario())


def test_a_connection_that_says_nothing_or_says_it_slowly_is_ended() -> None:
    async def drip(guest: Stranger, hello: bytes) -> None:
        with suppress(ConnectionError):
            for byte in struct.pack("<I", len(hello)) + hello:
                guest.writer.write(bytes([byte]))
                await guest.writer.drain()
                await asyncio.sleep(0.02)

    async def scenario() -> None:
        async with two_workers("tcp", replace(CONFIG, connect_timeout_s=0.2)) as (_, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            silent, slow = await stranger(decode), await stranger(decode)
            dripping = asyncio.create_task(drip(slow, hello_to_bytes(hello_of(ticket))))
            started_s = time.monotonic()
            assert await silent.heard() == await slow.heard() == []
            assert time.monotonic() - started_s >= 0.15
            dripping.cancel()
            assert decode.receiver.report(ticket.transfer_id).transport == ""

    asyncio.run(scenario())


def test_a_crowd_of_strangers_keeps_no_sender_out() -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            busy = await open_channel(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
            crowd = [await stranger(decode) for _ in range(200)]
            await one_whole_transfer(prefill, decode)
            for oldest in crowd[:100]:
                assert await oldest.heard() == []
            await busy.abort()
            for guest in crowd:
                guest.writer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_host_may_be_a_name_or_an_address_of_either_kind(host: str) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, listen=f"{host}:0")
        decode = await start_worker("tcp", config, hub=Hub())
        prefill = await start_worker("tcp", CONFIG, hub=Hub(), worker_id=SENDER_ID)
        assert decode.transport.endpoint.address.startswith(f"{host}:")
        await one_whole_transfer(prefill, decode)
        await prefill.close()
        await decode.close()

    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    asyncio.run(scenario())


def test_what_is_advertised_may_differ_from_where_it_listens() -> None:
    async def scenario() -> None:
        for listen in ("0.0.0.0:0", "[::]:0", ":0"):
            with pytest.raises(ConfigError, match=r"transfer.advertise_host: needed, since no peer can"):
                TcpTransport(replace(CONFIG, listen=listen), None)
        config = replace(CONFIG, listen="0.0.0.0:0", advertise_host="localhost")
        decode = await start_worker("tcp", config, hub=Hub())
        prefill = await start_worker("tcp", CONFIG, hub=Hub(), worker_id=SENDER_ID)
        await one_whole_transfer(prefill, decode)
        await prefill.close()
        await decode.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("listen", "problem"),
    [
        ("nowhere", "is not of the form HOST:PORT"),
        ("127.0.0.1:", "is not of the form HOST:PORT"),
        ("127.0.0.1:99999", "is not of the form HOST:PORT"),
        ("::1:0", "is not of the form HOST:PORT: an IPv6 address needs brackets"),
        ("203.0.113.7:0", "cannot be bound"),
        ("no.such.host.:0", "cannot be bound"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(listen: str, problem: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=f"transfer.listen: {listen} {problem}"):
            TcpTransport(replace(CONFIG, listen=listen), None)

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "no.such.host.:80", "[::1]:x"])
def test_an_address_where_nobody_is_fails_the_transfer(address: str) -> None:
    async def scenario() -> None:
        async with two_workers("tcp", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            with pytest.raises(TransferError):
                await prefill.transport.open(Endpoint("tcp", address), hello_of(ticket), timeout_s=5.0)

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_files(folder, Wanted())
    return folder


@asynccontextmanager
async def with_tls(source: TLSFiles | None, target: TLSFiles | None) -> AsyncIterator[tuple[Worker, Worker]]:
    prefill = await start_worker("tcp", CONFIG, hub=Hub(), worker_id=SENDER_ID, tls=source)
    decode = await start_worker("tcp", CONFIG, hub=Hub(), epoch=2, tls=target)
    try:
        yield prefill, decode
    finally:
        await prefill.close()
        await decode.close()


def test_two_workers_with_certificates_of_one_ca_meet_and_meet_again(certificates: Path) -> None:
    async def scenario() -> None:
        tls = tls_files(certificates, Party.WORKER)
        async with with_tls(tls, tls) as (prefill, decode):
            for _ in range(5):
                await one_whole_transfer(prefill, decode)
            tickets = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(10)]
            await asyncio.gather(*(send_frames(prefill, ticket) for ticket in tickets))

    asyncio.run(scenario())


def test_under_tls_no_kv_is_read_on_the_way(certificates: Path) -> None:
    """The proxy keeps what it passes on; in clear the store's bytes are in it, under TLS they are not."""

    async def passed(tls: TLSFiles | None) -> bool:
        async with with_tls(tls, tls) as (prefill, decode):
            prefill.store.bytes[:] = 0xA5
            async with CutProxy(decode.transport.endpoint.address) as proxy:
                proxy.heard = bytearray()
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                channel = await prefill.transport.open(
                    Endpoint("tcp", proxy.address), hello_of(ticket), timeout_s=PATIENCE_S
                )
                await channel.send(frames_of(prefill.store, ticket, BLOCKS, frame_tokens=TOKENS))
                await channel.finish()
                await channel.abort()
                return b"\xa5" * 64 in proxy.heard

    assert asyncio.run(passed(None))
    assert not asyncio.run(passed(tls_files(certificates, Party.WORKER)))


@pytest.mark.parametrize("case", ["none", "of another ca", "of a router"])
def test_a_sender_without_a_workers_certificate_gets_nowhere(
    certificates: Path, tmp_path: Path, case: str
) -> None:
    make_files(tmp_path, Wanted())
    source = {
        "none": None,
        "of another ca": replace(
            tls_files(tmp_path, Party.WORKER), ca=(certificates / "ca.pem").read_bytes()
        ),
        "of a router": tls_files(certificates, Party.ROUTER),
    }[case]

    async def scenario() -> None:
        async with with_tls(source, tls_files(certificates, Party.WORKER)) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            with pytest.raises(TransferError):
                await send_all(prefill, ticket)
            assert decode.receiver.counters.frames == 0
            assert decode.receiver.report(ticket.transfer_id).transport == ""

    asyncio.run(scenario())


@pytest.mark.parametrize("case", ["none", "of another ca", "of a router"])
def test_a_receiver_that_is_no_worker_is_sent_nothing(certificates: Path, tmp_path: Path, case: str) -> None:
    make_files(tmp_path, Wanted())
    target = {
        "none": None,
        "of another ca": tls_files(tmp_path, Party.WORKER),
        "of a router": tls_files(certificates, Party.ROUTER),
    }[case]

    async def scenario() -> None:
        async with with_tls(tls_files(certificates, Party.WORKER), target) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            with pytest.raises(TransferError):
                await send_all(prefill, ticket)
            assert prefill.store.num_reads == 0

    asyncio.run(scenario())
