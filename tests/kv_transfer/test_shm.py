"""The shared-memory transport: who gets in, whose a slot is, and that nothing is left."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import random
import re
import socket
import struct
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.hub import Hub
from kv_transfer.messages import end_reply, frame_headers, hello_to_bytes
from kv_transfer.registry import unavailable
from kv_transfer.shm_line.segment import SLOT_BYTES, WELCOME, Segment, share_segment, shared_segment
from kv_transfer.shm_line.words import What, Word
from kv_transfer.transports.shm import ShmTransport
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
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import Endpoint, KVTicket

BLOCKS = tuple(range(32))
TOKENS = 128
FOUR_SLOTS = TransferConfig(message_bytes=8192, credit_bytes=4 * 8192)

pytestmark = pytest.mark.skipif(bool(unavailable("shm")), reason=unavailable("shm"))


async def send_all(prefill: Worker, ticket: KVTicket) -> None:
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()


async def send_frames(prefill: Worker, ticket: KVTicket, blocks: Sequence[int]) -> None:
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
    await send_frames(prefill, ticket, BLOCKS)
    assert (decode.store.bytes == prefill.store.bytes).all()
    await decode.receiving.cancel(ticket.transfer_id)


def num_segments() -> int:
    """How often this process has mapped memory that has no name."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:twinpool-kv")


def test_all_parts_to_a_peer_share_one_line() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            for _ in range(3):
                tickets = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(20)]
                await asyncio.gather(*(send_all(prefill, ticket) for ticket in tickets))
                assert num_segments() == 2, "one line, and each of its ends is in this process"
            assert (decode.store.bytes == prefill.store.bytes).all()
        await eventually(lambda: num_segments() == 0)

    asyncio.run(scenario())


def test_a_message_that_fits_into_no_slot_is_an_error_of_its_transfer() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            (frame, *_) = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
            channel = await open_channel(prefill, ticket)
            huge = HostPayload([memoryview(bytes(SLOT_BYTES)), memoryview(b"1")])
            with pytest.raises(TransferError, match=f"{SLOT_BYTES + 1} bytes is larger than {SLOT_BYTES}"):
                await channel.send([replace(frame, payload=huge)])
            await channel.abort()
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_a_payload_that_cannot_be_read_costs_no_slot() -> None:
    class Unreadable(HostPayload):
        def copy_into(self, target: memoryview) -> None:
            raise RuntimeError("the GPU is gone")

    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            (frame, *_) = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
            channel = await open_channel(prefill, ticket)
            for _ in range(10):
                with pytest.raises(RuntimeError):
                    await channel.send([replace(frame, payload=Unreadable(frame.payload.views()))])
            await channel.abort()
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_slots_come_back_however_a_transfer_ends() -> None:
    """With four slots, one that is lost in each of five transfers would end in a hang."""

    async def sender_leaves(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, BLOCKS)
        for _ in range(random.randrange(8)):
            await asyncio.sleep(0)
        await transfer.abort()

    async def receiver_leaves(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, BLOCKS)
        for _ in range(random.randrange(20)):
            await asyncio.sleep(0)
        await decode.receiving.cancel(ticket.transfer_id)
        with suppress(TransferError):  # it may have been whole
            await transfer.wait()

    async def frames_are_damaged(prefill: Worker, decode: Worker, ticket: KVTicket) -> None:
        frames = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
        channel = await open_channel(prefill, ticket)
        with pytest.raises(TransferError):
            for frame in frames:
                await channel.send([replace(frame, checksum=1)])
            await channel.finish()
        await channel.abort()

    async def scenario() -> None:
        random.seed(1)
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode), asyncio.timeout(2 * PATIENCE_S):
            for _ in range(20):
                for end in (sender_leaves, receiver_leaves, frames_are_damaged):
                    ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                    await end(prefill, decode, ticket)
                    await decode.receiving.cancel(ticket.transfer_id)
            await one_whole_transfer(prefill, decode)
            assert num_segments() == 2, "all of that went over one line"

    asyncio.run(scenario())


def test_a_thousand_transfers_with_aborts_take_no_more_than_ten() -> None:
    async def some(prefill: Worker, decode: Worker, number: int) -> None:
        for turn in range(number):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, BLOCKS)
            if turn % 2:
                await asyncio.sleep(0)
                await transfer.abort()
            else:
                await transfer.wait()
            await decode.receiving.cancel(ticket.transfer_id)

    async def scenario() -> None:
        process = psutil.Process()
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            await some(prefill, decode, 100)
            await eventually(lambda: len(asyncio.all_tasks()) == 3)
            before = process.num_fds(), num_segments()
            memory_bytes = process.memory_info().rss
            await some(prefill, decode, 1000)
            await eventually(lambda: len(asyncio.all_tasks()) == 3)
            assert (process.num_fds(), num_segments()) == before
            assert process.memory_info().rss - memory_bytes < 8 * 2**20

    shared = sorted(Path("/dev/shm").iterdir())
    asyncio.run(scenario())

    assert num_segments() == 0
    assert sorted(Path("/dev/shm").iterdir()) == shared


def test_a_frozen_receiver_keeps_its_slots_until_it_has_read_them() -> None:
    """What it had been given is not written over by the next transfer: it would be damaged, or come late."""

    async def scenario() -> None:
        prefill = await start_worker("shm", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        blocks = range(NUM_BLOCKS)
        async with receiver_process("shm", num_transfers=4) as decode:
            first, second, third, _ = decode.tickets
            other = await open_channel(prefill, second)
            (part,) = prefill.sender.begin(first, timeout_s=PATIENCE_S)
            part.written(0, 4, blocks)
            await eventually(lambda: part.num_frames == 1)
            decode.stop()
            for layer in range(LAYOUT.num_layers):
                part.written(layer, first.num_tokens, blocks)
            with pytest.raises(TransferTimeout, match="the receiver takes nothing"):
                await part.wait()
            assert part.num_bytes <= CONFIG.credit_bytes + 4 * LAYOUT.layer_token_bytes
            prefill.store.fill(seed=77)
            with pytest.raises(TimeoutError):  # there is no slot
                async with asyncio.timeout(0.2):
                    await other.send(frames_of(prefill.store, second, blocks, frame_tokens=4)[:1])
            await other.abort()

            decode.go_on()
            await send_frames(prefill, third, blocks)
            assert [await decode.next_line() for _ in range(3)] == ["TransferError", "TransferError", "whole"]
        await prefill.close()

    asyncio.run(scenario())


def test_a_peer_that_is_frozen_or_gone_is_an_error_in_time() -> None:
    async def scenario() -> None:
        config = replace(CONFIG, connect_timeout_s=0.3)
        prefill = await start_worker("shm", config, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        async with receiver_process("shm", num_transfers=4) as decode:
            unmet, met, frozen, gone = decode.tickets
            decode.stop()
            (part,) = prefill.sender.begin(unmet, timeout_s=PATIENCE_S)
            with pytest.raises(TransferTimeout):
                await part.wait()
            decode.go_on()
            await send_frames(prefill, met, range(NUM_BLOCKS))
            decode.stop()
            (part,) = prefill.sender.begin(frozen, timeout_s=PATIENCE_S)
            with pytest.raises(TransferTimeout, match=r"no answer from .* in 0.3 s"):
                await part.wait()
            await decode.kill()
            (part,) = prefill.sender.begin(gone, timeout_s=PATIENCE_S)
            with pytest.raises(TransferError, match=r"refused|is gone"):
                await part.wait()
        await prefill.close()
        assert num_segments() == 0

    asyncio.run(scenario())


def test_a_peer_that_does_not_answer_is_asked_again_on_a_new_line() -> None:
    async def scenario() -> None:
        config = replace(CONFIG, connect_timeout_s=0.3)
        prefill = await start_worker("shm", config, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        async with receiver_process("shm", num_transfers=6) as decode:
            first, second, third, fourth, other, _ = decode.tickets
            await send_frames(prefill, first, range(NUM_BLOCKS))
            busy = await open_channel(prefill, other)
            num_fds = psutil.Process().num_fds()
            decode.stop()
            for ticket, num_lines in ((second, 1), (third, 0)):
                with pytest.raises(TransferTimeout):
                    await prefill.transport.open(ticket.ranks[0][0], hello_of(ticket), timeout_s=0.3)
                await asyncio.sleep(0.01)
                assert psutil.Process().num_fds() == num_fds - 1 + num_lines, "a busy line is left alone"
                await busy.abort()
            decode.go_on()
            await send_frames(prefill, fourth, range(NUM_BLOCKS))
        await prefill.close()

    asyncio.run(scenario())


def test_an_unused_line_is_closed_and_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.shm_line.sending._IDLE_S", 0.05)

    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            for _ in range(3):
                await one_whole_transfer(prefill, decode)
                await eventually(lambda: num_segments() == 0)
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            channel = await open_channel(prefill, ticket)
            await asyncio.sleep(0.1)
            await channel.send(frames_of(prefill.store, ticket, BLOCKS, frame_tokens=128))
            await channel.finish()

    asyncio.run(scenario())


def test_an_idle_line_gives_way_to_a_new_one_and_a_busy_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kv_transfer.transports.shm._MAX_LINES", 2)

    async def scenario() -> None:
        decode = await start_worker("shm", FOUR_SLOTS, hub=Hub())
        senders = [await start_worker("shm", FOUR_SLOTS, hub=Hub(), worker_id=SENDER_ID) for _ in range(4)]
        for prefill in senders:
            await one_whole_transfer(prefill, decode)
            assert num_segments() <= 5

        first, second, third = [await expect(decode, blocks=BLOCKS, num_tokens=TOKENS) for _ in range(3)]
        busy = [await open_channel(senders[0], first), await open_channel(senders[1], second)]
        with pytest.raises(TransferError):
            await open_channel(senders[2], third)
        for channel, ticket in zip(busy, (first, second), strict=True):
            await channel.send(frames_of(senders[0].store, ticket, BLOCKS, frame_tokens=TOKENS))
            await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
        for worker in (*senders, decode):
            await worker.close()

    asyncio.run(scenario())


def test_only_the_address_of_this_host_is_reached() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            address = decode.transport.endpoint.address
            host, name = address.split("/")
            boot, namespace = host.rsplit(".", 1)
            assert prefill.transport.reaches(Endpoint("shm", address))
            others = (
                f"{boot}.{int(namespace) + 1}/{name}",
                f"0{boot[1:]}x.{namespace}/{name}",
                name,
                "",
                host,
            )
            assert not any(prefill.transport.reaches(Endpoint("shm", other)) for other in others)
            assert re.fullmatch(r"twinpool-[0-9a-f]{32}", name)

    asyncio.run(scenario())


def test_it_listens_at_an_address_of_its_own_kind_only() -> None:
    async def scenario() -> None:
        config = replace(FOUR_SLOTS, listen="127.0.0.1:4711")
        first, second = ShmTransport(config), ShmTransport(config)
        assert first.endpoint != second.endpoint
        await first.close()
        again = ShmTransport(replace(FOUR_SLOTS, listen=first.endpoint.address))
        assert again.endpoint == first.endpoint
        await again.close()
        await second.close()

    asyncio.run(scenario())


PROGRAM = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as end:
    if sys.argv[2] == "calls":
        end.settimeout(20)
        end.connect("\\0" + sys.argv[1])
        print(socket.recv_fds(end, 100, 1)[:2], flush=True)
    else:
        end.bind("\\0" + sys.argv[1])
        end.listen()
        print("listening", flush=True)
        caller, _ = end.accept()
        print(caller.recv(100), flush=True)
"""


@asynccontextmanager
async def process_of_nobody(name: str, role: str) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, name, role, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_gets_no_memory_and_no_kv() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            name = decode.transport.endpoint.address.partition("/")[2]
            async with process_of_nobody(name, "calls") as said, asyncio.timeout(PATIENCE_S):
                assert await said.readline() == b"(b'', [])\n"
            await one_whole_transfer(prefill, decode)

            impostor = prefill.transport.endpoint.address.replace("twinpool-", "impostor-")
            async with process_of_nobody(impostor.partition("/")[2], "listens") as said:
                assert await said.readline() == b"listening\n"
                ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
                with pytest.raises(TransferError, match="belongs to another user"):
                    await prefill.transport.open(
                        Endpoint("shm", impostor), hello_of(ticket), timeout_s=PATIENCE_S
                    )
                async with asyncio.timeout(PATIENCE_S):
                    assert await said.readline() == b"b''\n"

    asyncio.run(scenario())


def open_file(size: int, *, is_sealed: bool) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    if is_sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


@pytest.mark.parametrize(
    ("size", "is_sealed", "problem"),
    [
        (SLOT_BYTES, False, "memory that its owner can shrink"),
        (SLOT_BYTES - 1, True, f"memory of {SLOT_BYTES - 1} bytes"),
        (0, True, "memory of 0 bytes"),
        (129 * SLOT_BYTES, True, f"memory of {129 * SLOT_BYTES} bytes"),
    ],
)
def test_memory_that_could_end_a_reader_is_not_mapped(size: int, is_sealed: bool, problem: str) -> None:
    file = open_file(size, is_sealed=is_sealed)
    try:
        with pytest.raises(ValueError, match=problem):
            Segment(file)
    finally:
        os.close(file)


def test_a_segment_can_be_written_and_not_be_shrunk_by_either_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        segment = share_segment(ours, 4)
        welcome, (file,), *_ = socket.recv_fds(theirs, 100, 1)
        for size in (0, SLOT_BYTES, 5 * SLOT_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(file, size)
        other = Segment(file)
        os.close(file)
    other.view(3, 5)[:] = b"hello"

    assert welcome == WELCOME
    assert segment.num_slots == other.num_slots == 4
    assert bytes(segment.view(3, 6)) == b"hello\0"


@pytest.mark.parametrize("case", ["no memory", "a pipe", "another program", "two words"])
def test_what_is_no_segment_is_not_taken_for_one(case: str) -> None:
    process = psutil.Process()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    num_fds = process.num_fds()
    with ours, theirs:
        match case:
            case "no memory":
                ours.send(WELCOME)
            case "a pipe":
                ends = os.pipe()
                socket.send_fds(ours, [WELCOME], [ends[0]])
                for end in ends:
                    os.close(end)
            case "another program":
                ours.send(b"220 mail.example.org ESMTP\r\n")
            case "two words":
                file = open_file(SLOT_BYTES, is_sealed=True)
                socket.send_fds(ours, [WELCOME[:5]], [file])
                os.close(file)
        with pytest.raises(ValueError):
            shared_segment(theirs)
        assert process.num_fds() == num_fds


class RawEnd:
    """One end of a line that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, segment: Segment) -> None:
        self.segment = segment
        self._reader = reader
        self._writer = writer

    def say(self, *words: Word) -> None:
        for word in words:
            self.say_bytes(struct.pack("<BIIII", *word[:4], len(word.body)) + word.body)

    def say_bytes(self, data: bytes) -> None:
        self._writer.write(data)

    async def hear(self) -> Word:
        """Return the next word of the peer; raises IncompleteReadError once it is gone."""
        async with asyncio.timeout(PATIENCE_S):
            *fields, body_bytes = struct.unpack("<BIIII", await self._reader.readexactly(17))
            return Word(*fields, await self._reader.readexactly(body_bytes))

    async def hears_nothing_more(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionResetError):
                await self._reader.read()
        self._writer.close()
        return True


async def raw_sender(decode: Worker) -> RawEnd:
    end = socket.socket(socket.AF_UNIX)
    end.connect("\0" + decode.transport.endpoint.address.partition("/")[2])
    end.setblocking(False)
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(end, readable.set)
    await readable.wait()
    loop.remove_reader(end)
    segment = shared_segment(end)
    return RawEnd(*await asyncio.open_unix_connection(sock=end), segment)


def message_of(raw: RawEnd, frame: Frame, *, channel: int = 1, slot: int = 0) -> Word:
    """Put a frame into a slot and return the word that says so."""
    payload = frame.payload.views()[0]
    raw.segment.view(slot, len(payload))[:] = payload
    return Word(What.MESSAGE, channel, slot, len(payload), frame_headers([frame]))


@pytest.mark.parametrize(
    "case",
    [
        "random bytes",
        "a pickle",
        "a body of 4 GiB",
        "a word of a receiver",
        "a word of nobody",
        "a slot that does not exist",
        "a slot that it does not have",
        "more bytes than a slot has",
        "a channel opened twice",
    ],
)
def test_a_sender_that_says_what_none_says_loses_its_line_and_changes_nothing(case: str) -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            before = decode.store.bytes.copy()
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            hello = Word(What.HELLO, 1, body=hello_to_bytes(hello_of(ticket)))
            raw = await raw_sender(decode)
            frame = replace(frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)[0], checksum=1)
            message = message_of(raw, frame)
            match case:
                case "random bytes":
                    raw.say_bytes(random.Random(1).randbytes(5000))
                case "a pickle":
                    raw.say_bytes(b"\x80\x04\x95\x1d\0\0\0\0\0\0\0cposix\nsystem\n(S'true'\ntR." + bytes(99))
                case "a body of 4 GiB":
                    raw.say_bytes(struct.pack("<BIIII", What.HELLO, 1, 0, 0, 2**32 - 1))
                case "a word of a receiver":
                    raw.say(hello, Word(What.FREE, 0, 0))
                case "a word of nobody":
                    raw.say(hello, Word(99, 1))
                case "a slot that does not exist":
                    raw.say(hello, message._replace(slot=8))
                case "a slot that it does not have":
                    raw.say(hello, message, message)
                case "more bytes than a slot has":
                    raw.say(hello, message._replace(size=SLOT_BYTES + 1))
                case "a channel opened twice":
                    raw.say(hello, hello)
            assert await raw.hears_nothing_more()
            await eventually(lambda: num_segments() == 1)  # the raw sender's own
            assert (decode.store.bytes == before).all()
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_a_word_cut_anywhere_is_the_end_of_the_sender_and_of_nobody_else() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            hello = hello_to_bytes(hello_of(ticket))
            word = struct.pack("<BIIII", What.HELLO, 1, 0, 0, len(hello)) + hello
            for length in range(0, len(word), 7):
                raw = await raw_sender(decode)
                raw.say_bytes(word[:length])
                raw._writer.write_eof()
                assert await raw.hears_nothing_more()
            assert decode.receiver.counters.refused == decode.receiver.counters.unproved == 0
            await one_whole_transfer(prefill, decode)

    asyncio.run(scenario())


def test_messages_of_a_part_that_is_over_or_was_never_admitted_give_their_slots_back() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            frames = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
            raw = await raw_sender(decode)
            raw.say(message_of(raw, frames[0], channel=7, slot=3))
            assert await raw.hear() == Word(What.FREE, 0, 3)

            unproved = replace(hello_of(ticket), proof=b"guessed")
            raw.say(Word(What.HELLO, 1, body=hello_to_bytes(unproved)), message_of(raw, frames[0], slot=2))
            end = await raw.hear()
            assert (end.what, end.channel) == (What.END, 1)
            assert b"the sender does not hold the ticket" in end.body
            assert await raw.hear() == Word(What.FREE, 0, 2)
            assert decode.receiver.counters.frames == 0

            raw.say(Word(What.HELLO, 2, body=hello_to_bytes(hello_of(ticket))))
            assert await raw.hear() == Word(What.ADMITTED, 2)
            raw.say(Word(What.GIVE_UP, 2), message_of(raw, frames[0], channel=2, slot=1))
            assert await raw.hear() == Word(What.FREE, 0, 1)
            with pytest.raises(TransferError, match="the sender stopped before everything had come"):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            raw.say(Word(What.GIVE_UP, 2), Word(What.DONE, 2))  # of what is over already
            raw._writer.write_eof()
            assert await raw.hears_nothing_more()

    asyncio.run(scenario())


def test_a_worker_that_closes_still_says_that_a_part_was_whole() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            frames = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=TOKENS)
            raw = await raw_sender(decode)
            raw._writer.transport.pause_reading()  # type: ignore[attr-defined]
            transport = decode.transport
            assert isinstance(transport, ShmTransport)
            await eventually(lambda: len(transport._receiving) == 1)
            (line,) = transport._receiving
            line._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
            refused = hello_to_bytes(replace(hello_of(ticket), transfer_id="unknown"))
            raw.say(*(Word(What.HELLO, number, body=refused) for number in range(200)))
            raw.say(Word(What.HELLO, 200, body=hello_to_bytes(hello_of(ticket))))
            raw.say(*(message_of(raw, frame, channel=200, slot=slot) for slot, frame in enumerate(frames)))
            await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            await eventually(lambda: line.is_idle)
            assert line._transport.get_write_buffer_size() > 0, "the last word has not left"

            closing = asyncio.create_task(transport.close())
            await eventually(line._transport.is_closing)
            raw._writer.transport.resume_reading()  # type: ignore[attr-defined]
            words = [await raw.hear() for _ in range(200 + 1 + len(frames) + 1)]
            assert await raw.hears_nothing_more()
            await closing
            assert words[-1] == Word(What.END, 200, body=end_reply(None))

    asyncio.run(scenario())


def test_a_part_given_up_before_it_was_looked_at_is_broken() -> None:
    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (_, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            raw = await raw_sender(decode)
            raw.say(Word(What.HELLO, 1, body=hello_to_bytes(hello_of(ticket))), Word(What.GIVE_UP, 1))
            with pytest.raises(TransferError, match="the sender stopped before everything had come"):
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
            raw._writer.close()

    asyncio.run(scenario())


RECEIVERS_CASES = {
    "a slot that does not exist": "a receiver freed slot 4, which it did not have",
    "a slot it was never given": "a receiver freed slot 3, which it did not have",
    "a slot it has given back": "a receiver freed slot 0, which it did not have",
    "a word of a sender": "a receiver said 1",
    "random bytes": "a peer on this host is cut off",
    "an end that cannot be read": "",
}


@pytest.mark.parametrize("case", RECEIVERS_CASES)
def test_a_receiver_that_says_what_none_says_fails_its_transfers(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def receive(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        end, _ = await loop.sock_accept(listener)
        raw = RawEnd(*await asyncio.open_unix_connection(sock=end.dup()), segment=share_segment(end, 4))
        end.close()
        hello = await raw.hear()
        raw.say(Word(What.ADMITTED, hello.channel), Word(What.END, 99, body=b"of nobody"))
        message = await raw.hear()
        assert (message.what, message.slot) == (What.MESSAGE, 0)
        match case:
            case "a slot that does not exist":
                raw.say(Word(What.FREE, 0, 4))
            case "a slot it was never given":
                raw.say(Word(What.FREE, 0, 3))
            case "a slot it has given back":
                raw.say(Word(What.FREE, 0, 0), Word(What.FREE, 0, 0))
            case "a word of a sender":
                raw.say(Word(What.HELLO, 1))
            case "random bytes":
                raw.say_bytes(random.Random(2).randbytes(5000))
            case "an end that cannot be read":
                raw.say(Word(What.END, hello.channel, body=b"\xff\xff\xff"))
        assert await raw.hears_nothing_more()

    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            address = prefill.transport.endpoint.address + "-raw"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind("\0" + address.partition("/")[2])
                listener.listen()
                listener.setblocking(False)
                receiving = asyncio.create_task(receive(listener))
                channel = await prefill.transport.open(
                    Endpoint("shm", address), hello_of(ticket), timeout_s=PATIENCE_S
                )
                frames = frames_of(prefill.store, ticket, BLOCKS, frame_tokens=4)
                with pytest.raises(TransferError):
                    async with asyncio.timeout(PATIENCE_S):
                        for frame in frames:
                            await channel.send([frame])
                await channel.abort()
                await prefill.transport.close()
                await receiving

    asyncio.run(scenario())
    assert RECEIVERS_CASES[case] in caplog.text


def test_a_caller_that_takes_nothing_holds_nobody_up() -> None:
    """It never reads what it is told, and asks for more and more."""

    async def scenario() -> None:
        async with two_workers("shm", FOUR_SLOTS) as (prefill, decode):
            deaf = await raw_sender(decode)
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            unproved = hello_to_bytes(replace(hello_of(ticket), proof=b"guessed"))
            deaf._reader._transport.pause_reading()  # type: ignore[attr-defined]
            for channel in range(20_000):
                deaf.say(Word(What.HELLO, channel, body=unproved))
            await one_whole_transfer(prefill, decode)
            deaf._writer.transport.abort()

    asyncio.run(scenario())
