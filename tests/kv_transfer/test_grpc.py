"""The gRPC transport between processes and over a bad network."""

from __future__ import annotations

import asyncio
import random
import signal
import struct
import sys
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from grpc.aio import Metadata

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.transports.grpc import GrpcChannel
from tests.kv_transfer.cut_proxy import CutProxy
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, tickets_from
from tests.kv_transfer.workers import (
    LAYOUT,
    Worker,
    expect,
    start_worker,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from tests.toys import layout
from twinpool.core.errors import TransferError, TransferRefused, TransferTimeout
from twinpool.core.ticket import Endpoint, KVTicket
from twinpool.pb.kv_pb2 import FrameHeader, PushHeader, PushReply

REPOSITORY = Path(__file__).parents[2]
BLOCKS = tuple(range(32))
TOKENS = 128


def through(proxy: CutProxy, ticket: KVTicket) -> KVTicket:
    """A ticket whose way leads through the proxy."""
    return replace(ticket, endpoints=(Endpoint("grpc", proxy.address),))


@asynccontextmanager
async def proxied(config: TransferConfig) -> AsyncIterator[tuple[Worker, Worker, CutProxy]]:
    async with (
        two_workers("grpc", config) as (prefill, decode),
        CutProxy(decode.transport.endpoint.address) as proxy,
    ):
        yield prefill, decode, proxy


async def send_all(prefill: Worker, ticket: KVTicket) -> None:
    transfer = prefill.sender.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()


async def is_sent(prefill: Worker, ticket: KVTicket) -> bool:
    try:
        await send_all(prefill, ticket)
    except TransferError:
        return False
    return True


def test_a_slow_network_changes_nothing_but_the_time() -> None:
    async def scenario() -> None:
        async with proxied(CONFIG) as (prefill, decode, proxy):
            proxy.delay_s = 0.005
            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, through(proxy, ticket))

            assert (decode.store.bytes == prefill.store.bytes).all()

    asyncio.run(scenario())


async def cut_transfer(prefill: Worker, decode: Worker, proxy: CutProxy, cut_after_bytes: int) -> KVTicket:
    """Cut a transfer's connection, and check that it fails; return its ticket.

    Between two transfers HTTP/2 may still have a word of its own to say.  If the cut meets that, the
    connection is simply made anew, and the transfer does not notice.
    """
    for _ in range(5):
        ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
        proxy.cut_after_bytes = cut_after_bytes
        if not await is_sent(prefill, through(proxy, ticket)):
            return ticket
        decode.receiver.cancel(ticket.transfer_id)
    raise AssertionError(f"no transfer was cut after {cut_after_bytes} bytes")


def test_a_connection_cut_anywhere_is_an_error_on_both_sides_and_the_next_transfer_works() -> None:
    async def scenario() -> None:
        async with proxied(CONFIG) as (prefill, decode, proxy):
            for cut_after_bytes in (1, 24, 100, 300, 1000, 5000, 9000, 20000):
                ticket = await cut_transfer(prefill, decode, proxy, cut_after_bytes)
                if decode.receiver.report(ticket.transfer_id).num_frames:
                    with pytest.raises(TransferError):
                        await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                decode.receiver.cancel(ticket.transfer_id)

                ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                await send_all(prefill, through(proxy, ticket))
                assert (decode.store.bytes == prefill.store.bytes).all()
                decode.receiver.cancel(ticket.transfer_id)
                decode.store.fill(seed=cut_after_bytes)

    asyncio.run(scenario())


class DyingCall:
    """A stream whose connection breaks while its sender says that it was all."""

    def __init__(self) -> None:
        self._is_broken = asyncio.Event()

    async def done_writing(self) -> None:
        self._is_broken.set()
        raise grpc.aio.InternalError("execute_batch failed")  # type: ignore[no-untyped-call]

    def cancel(self) -> None: ...

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self._is_broken.wait()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), "connection reset")
        yield b""


def test_a_connection_that_breaks_at_the_last_word_is_a_failed_transfer() -> None:
    async def run() -> None:
        channel = GrpcChannel(DyingCall(), address="there:1", transfer_id="t", epoch=1)  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="there:1: UNAVAILABLE: connection reset"):
            await channel.finish()
        await channel.abort()

    asyncio.run(run())


def test_a_flipped_bit_on_the_wire_is_never_taken_as_good() -> None:
    rng = random.Random(5)
    kv_bits = 8 * TOKENS * LAYOUT.token_bytes
    offsets = [rng.randrange(kv_bits) for _ in range(170)] + [rng.randrange(8 * 400) for _ in range(30)]
    config = replace(CONFIG, lease_s=0.3, connect_timeout_s=0.3)

    async def scenario() -> tuple[int, int]:
        num_errors = 0
        async with proxied(config) as (prefill, decode, proxy):
            for offset in offsets:
                proxy.reset()
                proxy.flip_at_bit = offset
                while proxy.flip_at_bit is not None:  # a try may end before that bit, by the reset
                    decode.store.fill(seed=offset)
                    ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                    is_confirmed = await is_sent(prefill, through(proxy, ticket))
                    if decode.receiver.report(ticket.transfer_id).complete_s is not None:
                        assert (decode.store.bytes == prefill.store.bytes).all(), f"bit {offset}"
                    decode.receiver.cancel(ticket.transfer_id)
                num_errors += not is_confirmed
            assert proxy.num_flipped == 200
            return num_errors, decode.receiver.counters.checksum_failures

    num_errors, checksum_failures = asyncio.run(scenario())

    assert checksum_failures >= 150
    assert num_errors >= checksum_failures


def test_a_frozen_peer_holds_no_more_than_its_credit_and_ends_with_the_lease() -> None:
    async def scenario() -> None:
        async with proxied(CONFIG) as (prefill, decode, proxy):
            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = prefill.sender.begin(through(proxy, ticket), timeout_s=PATIENCE_S)
            transfer.written(0, 4, BLOCKS)
            await eventually(lambda: decode.receiver.counters.frames == 1)
            proxy.freeze()
            num_reads = prefill.store.num_reads
            for layer in range(LAYOUT.num_layers):
                for num_tokens in range(4, TOKENS + 1, 4):
                    transfer.written(layer, num_tokens, BLOCKS)
                    await asyncio.sleep(0)

            started_s = time.monotonic()
            with pytest.raises(TransferTimeout, match=r"the receiver (takes|confirms) nothing"):
                await transfer.wait()
            assert time.monotonic() - started_s >= CONFIG.lease_s * 0.9
            assert prefill.store.num_reads > num_reads
            proxy.thaw()
            with pytest.raises(TransferError):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_frozen_network_ends_a_transfer_before_a_long_lease_does() -> None:
    async def scenario() -> None:
        async with proxied(replace(CONFIG, lease_s=600.0)) as (prefill, decode, proxy):
            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = prefill.sender.begin(through(proxy, ticket), timeout_s=600.0)
            transfer.written(0, 4, BLOCKS)
            await eventually(lambda: decode.receiver.counters.frames == 1)
            proxy.freeze()

            with pytest.raises(TransferError, match="ping timeout"):
                async with asyncio.timeout(30.0):
                    await transfer.wait()

    asyncio.run(scenario())


def test_a_peer_that_never_answers_ends_at_the_connect_timeout() -> None:
    async def scenario() -> None:
        async with proxied(replace(CONFIG, connect_timeout_s=0.2)) as (prefill, decode, proxy):
            proxy.freeze()
            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)

            with pytest.raises(TransferTimeout, match=f"no answer from {proxy.address} in 0.2 s"):
                await send_all(prefill, through(proxy, ticket))

    asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [64, 249, 256, 263, 1024])  # 1, 3.9, 4, 4.1 and 16 MiB
def test_kv_of_any_size_travels_in_bounded_messages(num_tokens: int) -> None:
    wide = layout(num_layers=1, num_kv_heads=16, head_dim=128)
    assert wide.token_bytes == 16 * 1024

    async def scenario() -> None:
        blocks = range(wide.num_blocks(num_tokens))
        config = TransferConfig()
        prefill = await start_worker("grpc", config, hub=Hub(), layout=wide, num_blocks=len(blocks), epoch=1)
        decode = await start_worker("grpc", config, hub=Hub(), layout=wide, num_blocks=len(blocks), epoch=2)
        ticket = expect(decode, blocks=blocks, num_tokens=num_tokens)
        transfer = prefill.sender.begin(ticket, timeout_s=PATIENCE_S)
        transfer.written(0, num_tokens, blocks)
        await transfer.wait()
        await prefill.close()
        await decode.close()

        there, sent = (worker.store.sequence(blocks, num_tokens=num_tokens) for worker in (decode, prefill))
        assert (there == sent).all()

    asyncio.run(scenario())


async def answers_to(address: str, *messages: bytes) -> list[PushReply]:
    """Send raw messages and return what the receiver says to them."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        call = channel.stream_stream("/twinpool.v1.KVTransfer/Push", None, None)(None)
        replies = []
        async with asyncio.timeout(PATIENCE_S):
            for message in messages:
                await call.write(message)
            async for data in call:
                replies.append(PushReply.FromString(data))
        return replies


def packed(header: bytes, payload: bytes = b"", *, header_bytes: int | None = None) -> bytes:
    return struct.pack("<I", len(header) if header_bytes is None else header_bytes) + header + payload


def header(ticket: KVTicket, *frames: FrameHeader) -> bytes:
    return PushHeader(transfer_id=ticket.transfer_id, epoch=ticket.epoch, frames=frames).SerializeToString()


def test_hostile_messages_are_refused_without_a_crash_a_write_or_a_large_allocation() -> None:
    def hostile(ticket: KVTicket) -> dict[str, bytes]:
        whole = FrameHeader(num_tokens=1, payload_bytes=LAYOUT.layer_token_bytes)
        payload = bytes(LAYOUT.layer_token_bytes)
        huge = FrameHeader(num_tokens=1, payload_bytes=2**32 - 1)
        many = FrameHeader(num_tokens=2**31, payload_bytes=LAYOUT.layer_token_bytes)
        foreign = replace(ticket, transfer_id="f" * 32)
        stale = replace(ticket, epoch=ticket.epoch - 1)
        return {
            "empty": b"",
            "short": b"\x01\x00",
            "header longer than the message": packed(header(ticket), header_bytes=2**31),
            "negative header length": packed(header(ticket), header_bytes=2**32 - 1),
            "no header": packed(header(ticket), header_bytes=0),
            "garbage header": packed(b"\xff" * 40),
            "transfer id that is no text": packed(b"\x0a\x02\xff\xfe"),
            "payload longer than the message": packed(header(ticket, huge), payload),
            "payload of no length": packed(header(ticket, FrameHeader(num_tokens=1)), payload),
            "payload without a frame": packed(header(ticket), payload),
            "missing payload": packed(header(ticket, whole)),
            "more tokens than exist": packed(header(ticket, many), payload),
            "wrong checksum": packed(header(ticket, whole), payload),
            "another transfer": packed(header(foreign, whole), payload),
            "another epoch": packed(header(stale, whole), payload),
        }

    async def scenario() -> None:
        async with two_workers("grpc", CONFIG) as (prefill, decode):
            before = decode.store.bytes.copy()
            address = decode.transport.endpoint.address
            for name in hostile(expect(decode, blocks=BLOCKS, num_tokens=TOKENS)):
                ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                replies = await answers_to(address, packed(header(ticket)), hostile(ticket)[name])
                assert replies[-1].error == "TransferDamaged", name
                with pytest.raises(TransferError):
                    await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                first = await answers_to(address, hostile(ticket)[name])
                assert first[-1].error in ("TransferDamaged", "TransferRefused", "TransferError"), name
            assert (decode.store.bytes == before).all()

            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, ticket)
            assert (decode.store.bytes == prefill.store.bytes).all()

    tracemalloc.start()
    try:
        asyncio.run(scenario())
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_is_refused_and_its_transfer_fails() -> None:
    async def scenario() -> None:
        async with two_workers("grpc", CONFIG) as (prefill, decode):
            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            address = decode.transport.endpoint.address
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers_to(address, packed(header(ticket)), bytes(64 * 2**20))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(TransferError):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)

            ticket = expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, ticket)

    asyncio.run(scenario())


def test_a_stream_that_names_no_transfer_is_ended() -> None:
    async def scenario() -> list[PushReply]:
        async with two_workers("grpc", replace(CONFIG, connect_timeout_s=0.1)) as (_, decode):
            return await answers_to(decode.transport.endpoint.address)

    (reply,) = asyncio.run(scenario())

    assert reply.error == "TransferDamaged"
    assert reply.detail == "the stream names no transfer"


class DecodeProcess:
    """A decode worker in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, tickets: list[KVTicket]) -> None:
        self.process = process
        self.tickets = tickets

    @property
    def address(self) -> str:
        return self.tickets[0].endpoints[0].address

    async def next_line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def decode_process(
    *, listen: str = "", epoch: int = 1, num_transfers: int = 1
) -> AsyncIterator[DecodeProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.kv_transfer.receiver_process",
        listen,
        str(epoch),
        str(num_transfers),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
    )
    worker = DecodeProcess(process, [])
    try:
        worker.tickets = tickets_from(await worker.next_line())
        yield worker
    finally:
        await worker.kill()


def test_a_killed_peer_is_noticed_at_once_and_reached_again_after_its_restart() -> None:
    async def scenario() -> None:
        prefill = await start_worker("grpc", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS)
        blocks = range(NUM_BLOCKS)
        listen, stale = "", None
        for epoch in range(1, 4):
            async with decode_process(listen=listen, epoch=epoch, num_transfers=2) as decode:
                whole, cut = decode.tickets
                if stale is not None:
                    with pytest.raises(TransferRefused, match=f"epoch {epoch - 1} is over, this is {epoch}"):
                        await prefill.sender.begin(stale, timeout_s=PATIENCE_S).wait()
                transfer = prefill.sender.begin(whole, timeout_s=PATIENCE_S)
                write_all(transfer, whole, blocks)
                await transfer.wait()
                assert await decode.next_line() == "whole"

                transfer = prefill.sender.begin(cut, timeout_s=PATIENCE_S)
                transfer.written(0, 1024, blocks)
                await eventually(lambda transfer=transfer: transfer.num_frames > 0)
                await decode.kill()
                with pytest.raises(TransferError):
                    await transfer.wait()
                listen, stale = decode.address, cut
        assert prefill.sender.num_open == 0
        await prefill.close()

    asyncio.run(scenario())


def test_a_stopped_peer_costs_one_lease_and_its_credit_and_is_harmless_when_it_goes_on() -> None:
    async def scenario() -> None:
        prefill = await start_worker("grpc", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS)
        async with decode_process(num_transfers=2) as decode:
            first, second = decode.tickets
            transfer = prefill.sender.begin(first, timeout_s=PATIENCE_S)
            transfer.written(0, 4, range(NUM_BLOCKS))
            await eventually(lambda: transfer.num_frames == 1)
            decode.process.send_signal(signal.SIGSTOP)
            write_all(transfer, first, range(NUM_BLOCKS))

            with pytest.raises(TransferTimeout, match="the receiver takes nothing"):
                await transfer.wait()
            assert transfer.num_bytes <= CONFIG.credit_bytes + 4 * LAYOUT.layer_token_bytes
            assert prefill.sender.num_open == 0
            decode.process.send_signal(signal.SIGCONT)
            transfer = prefill.sender.begin(second, timeout_s=PATIENCE_S)
            write_all(transfer, second, range(NUM_BLOCKS))
            await transfer.wait()
            assert await decode.next_line() == "TransferError"
            assert await decode.next_line() == "whole"
        await prefill.close()

    asyncio.run(scenario())
