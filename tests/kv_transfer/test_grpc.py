"""The gRPC transport between processes and over a bad network."""

from __future__ import annotations

import asyncio
import random
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc._cython import cygrpc
from grpc.aio import Metadata

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.messages import MAX_HELLO_BYTES, hello_to_bytes
from kv_transfer.transports.grpc import (
    _CHANNEL_OPTIONS,
    _HANDSHAKE_OPTIONS,
    _SERVER_OPTIONS,
    GrpcChannel,
    GrpcTransport,
)
from tests.kv_transfer.cut_proxy import CutProxy
from tests.kv_transfer.proxied import proxied
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, receiver_process
from tests.kv_transfer.workers import (
    LAYOUT,
    SENDER_ID,
    Worker,
    expect,
    hello_of,
    start_worker,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from tests.toys import layout
from tests.trust import tls_files
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.errors import TransferError, TransferRefused, TransferTimeout
from twinpool.core.ticket import KVTicket
from twinpool.core.tls import Party, TLSFiles
from twinpool.pb.kv_pb2 import FrameHeader, PushHeader, PushReply

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


def test_a_slow_network_changes_nothing_but_the_time() -> None:
    async def scenario() -> None:
        async with proxied("grpc", CONFIG) as (prefill, decode, proxy):
            proxy.delay_s = 0.005
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, ticket)

            assert (decode.store.bytes == prefill.store.bytes).all()

    asyncio.run(scenario())


async def cut_transfer(prefill: Worker, decode: Worker, proxy: CutProxy, cut_after_bytes: int) -> KVTicket:
    """Cut a transfer's connection, and check that it fails; return its ticket.

    Between two transfers HTTP/2 may still have a word of its own to say.  If the cut meets that, the
    connection is simply made anew, and the transfer does not notice.
    """
    for _ in range(5):
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
        proxy.cut_after_bytes = cut_after_bytes
        if not await is_sent(prefill, ticket):
            return ticket
        await decode.receiving.cancel(ticket.transfer_id)
    raise AssertionError(f"no transfer was cut after {cut_after_bytes} bytes")


def test_a_connection_cut_anywhere_is_an_error_on_both_sides_and_the_next_transfer_works() -> None:
    async def scenario() -> None:
        async with proxied("grpc", CONFIG) as (prefill, decode, proxy):
            for cut_after_bytes in (1, 24, 100, 300, 1000, 5000, 9000, 20000):
                ticket = await cut_transfer(prefill, decode, proxy, cut_after_bytes)
                if decode.receiver.report(ticket.transfer_id).num_frames:
                    with pytest.raises(TransferError):
                        await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                await decode.receiving.cancel(ticket.transfer_id)

                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                await send_all(prefill, ticket)
                assert (decode.store.bytes == prefill.store.bytes).all()
                await decode.receiving.cancel(ticket.transfer_id)
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
        channel = GrpcChannel(DyingCall(), "there:1", on_end=lambda: None)  # type: ignore[arg-type]
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
        async with proxied("grpc", config) as (prefill, decode, proxy):
            for offset in offsets:
                proxy.reset()
                proxy.flip_at_bit = offset
                while proxy.flip_at_bit is not None:  # a try may end before that bit, by the reset
                    decode.store.fill(seed=offset)
                    ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                    is_confirmed = await is_sent(prefill, ticket)
                    if decode.receiver.report(ticket.transfer_id).complete_s is not None:
                        assert (decode.store.bytes == prefill.store.bytes).all(), f"bit {offset}"
                    await decode.receiving.cancel(ticket.transfer_id)
                num_errors += not is_confirmed
            assert proxy.num_flipped == 200
            return num_errors, decode.receiver.counters.checksum_failures

    num_errors, checksum_failures = asyncio.run(scenario())

    assert checksum_failures >= 150
    assert num_errors >= checksum_failures


def test_a_frozen_peer_holds_no_more_than_its_credit_and_ends_with_the_lease() -> None:
    async def scenario() -> None:
        async with proxied("grpc", CONFIG) as (prefill, decode, proxy):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
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
        async with proxied("grpc", replace(CONFIG, lease_s=600.0)) as (prefill, decode, proxy):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=600.0)
            transfer.written(0, 4, BLOCKS)
            await eventually(lambda: decode.receiver.counters.frames == 1)
            proxy.freeze()

            with pytest.raises(TransferError, match="ping timeout"):
                async with asyncio.timeout(30.0):
                    await transfer.wait()

    asyncio.run(scenario())


def test_a_peer_that_never_answers_ends_at_the_connect_timeout() -> None:
    async def scenario() -> None:
        async with proxied("grpc", replace(CONFIG, connect_timeout_s=0.2)) as (prefill, decode, proxy):
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
        config = TransferConfig()
        prefill = await start_worker(
            "grpc", config, hub=Hub(), layout=wide, num_blocks=len(blocks), worker_id=SENDER_ID
        )
        decode = await start_worker("grpc", config, hub=Hub(), layout=wide, num_blocks=len(blocks), epoch=2)
        ticket = await expect(decode, blocks=blocks, num_tokens=num_tokens)
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
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


def header(*frames: FrameHeader) -> bytes:
    return PushHeader(frames=frames).SerializeToString()


def hostile_messages() -> dict[str, bytes]:
    whole = FrameHeader(num_tokens=1, payload_bytes=LAYOUT.layer_token_bytes)
    payload = bytes(LAYOUT.layer_token_bytes)
    huge = FrameHeader(num_tokens=1, payload_bytes=2**32 - 1)
    many = FrameHeader(num_tokens=2**31, payload_bytes=LAYOUT.layer_token_bytes)
    return {
        "empty": b"",
        "short": b"\x01\x00",
        "header longer than the message": packed(header(), header_bytes=2**31),
        "negative header length": packed(header(), header_bytes=2**32 - 1),
        "no header": packed(header(whole), header_bytes=0),
        "garbage header": packed(b"\xff" * 40),
        "payload longer than the message": packed(header(huge), payload),
        "payload of no length": packed(header(FrameHeader(num_tokens=1)), payload),
        "payload without a frame": packed(header(), payload),
        "missing payload": packed(header(whole)),
        "more tokens than exist": packed(header(many), payload),
        "wrong checksum": packed(header(whole), payload),
    }


def hostile_hellos(ticket: KVTicket) -> dict[str, bytes]:
    hello = hello_of(ticket)

    def forged(**change: Any) -> bytes:
        return hello_to_bytes(replace(hello, **change))

    return {
        "nothing": b"",
        "garbage": b"\xff" * 40,
        "transfer id that is no text": b"\x0a\x02\xff\xfe",
        "too long": hello_to_bytes(hello) + bytes(MAX_HELLO_BYTES),
        "no proof": forged(proof=b""),
        "another proof": forged(proof=bytes(32)),
        "another transfer": forged(transfer_id="f" * 32),
        "another epoch": forged(epoch=ticket.epoch - 1),
        "another worker": forged(sender_id="mallory"),
        "another rank": forged(target_rank=1),
        "fewer heads than proved": forged(num_heads=1),
        "a wire format that was not proved": forged(wire="int8"),
    }


def test_hostile_messages_are_refused_without_a_crash_a_write_or_a_large_allocation() -> None:
    async def scenario() -> None:
        async with two_workers("grpc", CONFIG) as (prefill, decode):
            before = decode.store.bytes.copy()
            address = decode.transport.endpoint.address
            for name, message in hostile_messages().items():
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                replies = await answers_to(address, hello_to_bytes(hello_of(ticket)), message)
                assert replies[-1].error == "TransferDamaged", name
                with pytest.raises(TransferError):
                    await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                await decode.receiving.cancel(ticket.transfer_id)
            assert (decode.store.bytes == before).all()

            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, ticket)
            assert (decode.store.bytes == prefill.store.bytes).all()

    tracemalloc.start()
    try:
        asyncio.run(scenario())
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


def test_who_proves_nothing_is_refused_and_ends_nothing() -> None:
    async def scenario() -> None:
        async with two_workers("grpc", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            for name, message in hostile_hellos(ticket).items():
                (reply,) = await answers_to(decode.transport.endpoint.address, message)
                assert reply.error in ("TransferDamaged", "TransferRefused"), name

            await send_all(prefill, ticket)
            await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            assert (decode.store.bytes == prefill.store.bytes).all()

    asyncio.run(scenario())


def test_a_message_over_the_limit_is_refused_and_its_transfer_fails() -> None:
    async def scenario() -> None:
        async with two_workers("grpc", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            address = decode.transport.endpoint.address
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers_to(address, hello_to_bytes(hello_of(ticket)), bytes(64 * 2**20))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(TransferError):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)

            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            await send_all(prefill, ticket)

    asyncio.run(scenario())


def test_a_stream_that_names_no_transfer_is_ended() -> None:
    async def scenario() -> list[PushReply]:
        async with two_workers("grpc", replace(CONFIG, connect_timeout_s=0.1)) as (_, decode):
            return await answers_to(decode.transport.endpoint.address)

    (reply,) = asyncio.run(scenario())

    assert reply.error == "TransferDamaged"
    assert reply.detail == "the stream names no transfer"


def test_a_killed_peer_is_noticed_at_once_and_reached_again_after_its_restart() -> None:
    async def scenario() -> None:
        prefill = await start_worker("grpc", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        blocks = range(NUM_BLOCKS)
        listen, stale = "", None
        for epoch in range(1, 4):
            async with receiver_process("grpc", listen=listen, epoch=epoch, num_transfers=3) as decode:
                whole, cut, unused = decode.tickets
                if stale is not None:
                    (part,) = prefill.sender.begin(stale, timeout_s=PATIENCE_S)
                    with pytest.raises(TransferRefused, match=f"epoch {epoch - 1} is over, this is {epoch}"):
                        await part.wait()
                (part,) = prefill.sender.begin(whole, timeout_s=PATIENCE_S)
                write_all(part, whole, blocks)
                await part.wait()
                assert await decode.next_line() == "whole"

                (part,) = prefill.sender.begin(cut, timeout_s=PATIENCE_S)
                part.written(0, 1024, blocks)
                await eventually(lambda part=part: part.num_frames > 0)
                await decode.kill()
                with pytest.raises(TransferError):
                    await part.wait()
                listen, stale = decode.address, unused
        assert prefill.sender.num_open == 0
        await prefill.close()

    asyncio.run(scenario())


def test_a_stopped_peer_costs_one_lease_and_its_credit_and_is_harmless_when_it_goes_on() -> None:
    async def scenario() -> None:
        prefill = await start_worker("grpc", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        async with receiver_process("grpc", num_transfers=2) as decode:
            first, second = decode.tickets
            (part,) = prefill.sender.begin(first, timeout_s=PATIENCE_S)
            part.written(0, 4, range(NUM_BLOCKS))
            await eventually(lambda: part.num_frames == 1)
            decode.stop()
            write_all(part, first, range(NUM_BLOCKS))

            with pytest.raises(TransferTimeout, match="the receiver takes nothing"):
                await part.wait()
            assert part.num_bytes <= CONFIG.credit_bytes + 4 * LAYOUT.layer_token_bytes
            assert prefill.sender.num_open == 0
            decode.go_on()
            (part,) = prefill.sender.begin(second, timeout_s=PATIENCE_S)
            write_all(part, second, range(NUM_BLOCKS))
            await part.wait()
            assert await decode.next_line() == "TransferError"
            assert await decode.next_line() == "whole"
        await prefill.close()

    asyncio.run(scenario())


def test_connections_to_peers_that_are_gone_are_not_kept() -> None:
    async def scenario() -> None:
        prefill = await start_worker("grpc", CONFIG, hub=Hub(), worker_id=SENDER_ID)
        transport = prefill.transport
        assert isinstance(transport, GrpcTransport)
        for epoch in range(1, 6):
            decode = await start_worker("grpc", CONFIG, hub=Hub(), epoch=epoch)
            for _ in range(2):
                await send_all(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
                assert len(transport._connections) == 1
            await decode.close()
        await prefill.close()
        assert not transport._connections

    asyncio.run(scenario())


def test_a_peer_that_did_not_answer_is_met_on_a_new_connection() -> None:
    async def scenario() -> None:
        async with proxied("grpc", replace(CONFIG, connect_timeout_s=0.5)) as (prefill, decode, proxy):
            await send_all(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
            proxy.freeze()
            with pytest.raises(TransferTimeout):
                await send_all(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
            proxy.thaw()
            num_connections = proxy.num_connections

            await send_all(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
            assert proxy.num_connections == num_connections + 1

    asyncio.run(scenario())


def test_every_option_is_one_that_this_grpc_knows() -> None:
    library = Path(cygrpc.__file__).read_bytes()

    assert b"grpc.keepalive_time_ms" in library
    for name in (*dict(_CHANNEL_OPTIONS), *dict(_SERVER_OPTIONS), *_HANDSHAKE_OPTIONS):
        assert name.encode() in library, name


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_files(folder, Wanted())
    return folder


@asynccontextmanager
async def with_tls(source: TLSFiles | None, target: TLSFiles) -> AsyncIterator[tuple[Worker, Worker]]:
    prefill = await start_worker("grpc", CONFIG, hub=Hub(), worker_id=SENDER_ID, tls=source)
    decode = await start_worker("grpc", CONFIG, hub=Hub(), epoch=2, tls=target)
    try:
        yield prefill, decode
    finally:
        await prefill.close()
        await decode.close()


def test_two_workers_with_certificates_of_one_ca_meet(certificates: Path) -> None:
    async def scenario() -> None:
        tls = tls_files(certificates, Party.WORKER)
        async with with_tls(tls, tls) as (prefill, decode):
            await send_all(prefill, await expect(decode, blocks=BLOCKS, num_tokens=TOKENS))
            assert (decode.store.bytes == prefill.store.bytes).all()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("none", "UNAVAILABLE"),
        ("of another ca", "UNAVAILABLE"),
        ("of a router", "UNAUTHENTICATED: .* is for router.twinpool, not for worker.twinpool"),
    ],
)
def test_a_sender_without_a_workers_certificate_gets_nowhere(
    certificates: Path, tmp_path: Path, case: str, problem: str
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
            with pytest.raises(TransferError, match=problem):
                await send_all(prefill, ticket)
            assert decode.receiver.counters.frames == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("party", ["router of this ca", "worker of another ca"])
def test_a_receiver_that_is_no_worker_is_sent_nothing(certificates: Path, tmp_path: Path, party: str) -> None:
    make_files(tmp_path, Wanted())
    target = {
        "router of this ca": tls_files(certificates, Party.ROUTER),
        "worker of another ca": tls_files(tmp_path, Party.WORKER),
    }[party]

    async def scenario() -> None:
        async with with_tls(tls_files(certificates, Party.WORKER), target) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            with pytest.raises(TransferError, match="UNAVAILABLE"):
                await send_all(prefill, ticket)
            assert prefill.store.num_reads == 0

    asyncio.run(scenario())
