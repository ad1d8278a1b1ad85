"""Nothing that a peer says ends a worker, holds it up, makes it grow, or writes where it may not.

Messages are spoiled in every way that ``Mutator`` knows, by strangers and by holders of a ticket, and after
them a true transfer must be exact.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.messages import (
    credit_reply,
    end_reply,
    hello_from_bytes,
    hello_to_bytes,
    pack,
    read_reply,
    unpack,
)
from kv_transfer.registry import unavailable
from tests.kv_transfer.mutants import Mutator
from tests.kv_transfer.raw_senders import RawSender, raw_sender
from tests.kv_transfer.workers import (
    LAYOUT,
    Worker,
    expect,
    frames_of,
    hello_of,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from twinpool.core.errors import TransferDamaged, TransferError
from twinpool.core.ticket import KVTicket

QUICK = ("grpc", "tcp", "shm")
ALL = {"grpc": 5000, "tcp": 5000, "shm": 5000, "nixl": 300}  # conversations; one with nixl is 0.1 s
CONFIG = TransferConfig(lease_s=PATIENCE_S, message_bytes=2**16, credit_bytes=2**20)
TOKENS = 42  # 2 of the last block stay free
SOURCE = tuple(range(20, 31))
TARGET = tuple(range(3, 14))
WAYS = ("conversation", "hello", "frame", "wire")
CANARY_EVERY = 100
MAX_GROWTH_BYTES = 24 * 2**20


def the_right_ones(ticket: KVTicket, prefill: Worker) -> list[Any]:
    return frames_of(prefill.store, ticket, SOURCE, frame_tokens=16)


def slots_of_ticket(decode: Worker) -> np.ndarray:
    """Return, for each byte of the decode worker's store, whether the ticket is about it."""
    is_meant = np.zeros(decode.store.bytes.shape, bool)
    for token in range(TOKENS):
        is_meant[:, :, TARGET[token // LAYOUT.block_tokens], token % LAYOUT.block_tokens] = True
    return is_meant


async def canary(prefill: Worker, decode: Worker) -> None:
    """Send a true transfer and see that it is exact."""
    decode.store.fill(seed=decode.receiver.counters.completed + 100)
    ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, SOURCE)
    await transfer.wait()
    await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
    await decode.receiving.cancel(ticket.transfer_id)
    sent, there = (
        worker.store.sequence(blocks, num_tokens=TOKENS)
        for worker, blocks in ((prefill, SOURCE), (decode, TARGET))
    )
    assert (sent == there).all()


async def attack(prefill: Worker, decode: Worker, raw: RawSender, mutator: Mutator) -> None:
    """Hold one spoiled conversation, and see that nothing was written but what was proved."""
    ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
    hello, frames = hello_of(ticket), the_right_ones(ticket, prefill)
    before, is_meant = decode.store.bytes.copy(), slots_of_ticket(decode)
    way = mutator.chosen(WAYS)
    if way == "hello":
        hello = mutator.hello(hello)
    if way == "frame":
        at = frames.index(mutator.chosen(frames))
        frames[at] = mutator.frame(frames[at])
    said = [hello_to_bytes(hello), *(pack([frame]) for frame in frames)]
    if way == "conversation":
        said = mutator.conversation(said)

    async with asyncio.timeout(PATIENCE_S):
        await raw.say(said, mutator.spoiled if way == "wire" else lambda wire: wire)
    await decode.receiving.cancel(ticket.transfer_id)

    after = decode.store.bytes
    assert (after == before)[~is_meant].all(), way
    if way != "frame":  # who holds the ticket may send other bytes, with their checksum
        expected = before.copy()
        expected[:, :, list(TARGET)] = prefill.store.bytes[:, :, list(SOURCE)]
        assert ((after == before) | (after == expected)).all(), way


class Usage:
    """What a process holds beside its results."""

    def __init__(self) -> None:
        gc.collect()
        process = psutil.Process()
        self.num_fds = process.num_fds()
        self.num_tasks = len(asyncio.all_tasks())
        self.memory_bytes = process.memory_info().rss

    async def settled_to(self, limit: Usage) -> Usage:
        """Return the usage once there are no more files and tasks than at ``limit``."""
        await eventually(
            lambda: (usage := Usage()).num_fds <= limit.num_fds and usage.num_tasks <= limit.num_tasks
        )
        return Usage()


@pytest.fixture
def loud(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if anything was logged as an error, as an exception is that nobody caught."""
    caplog.set_level(logging.ERROR)  # what is logged is kept, and with it all that it speaks of
    yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def assail(name: str, *, num_attacks: int, seed: int) -> None:
    mutator = Mutator(seed)

    async def scenario() -> None:
        async with two_workers(name, CONFIG) as (prefill, decode):
            before: Usage | None = None
            async with raw_sender(name, decode.transport.endpoint.address) as raw:
                for number in range(num_attacks):
                    await attack(prefill, decode, raw, mutator)
                    if number % CANARY_EVERY == 0:
                        await canary(prefill, decode)
                    if number == num_attacks // 10:
                        before = Usage()
                await canary(prefill, decode)
                assert before is not None
                after = await Usage().settled_to(before)
            assert after.memory_bytes - before.memory_bytes < MAX_GROWTH_BYTES
            assert decode.receiver.num_open == 0
            seen = decode.receiver.counters
            assert min(seen.checksum_failures, seen.malformed_frames, seen.unproved, seen.broken) > 0

    asyncio.run(scenario())


def skip_if_unavailable(name: str) -> None:
    reason = unavailable(name)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("name", QUICK)
def test_a_listener_survives_whatever_is_said_to_it(name: str, loud: None) -> None:
    skip_if_unavailable(name)
    assail(name, num_attacks=600, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_listener_survives_thousands_of_spoiled_conversations(name: str, loud: None) -> None:
    skip_if_unavailable(name)
    assail(name, num_attacks=ALL[name], seed=2)


def spoil_codec(*, num_mutants: int, seed: int) -> None:
    mutator = Mutator(seed)

    async def scenario() -> None:
        async with two_workers("loopback", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
            hello, frames = hello_of(ticket), the_right_ones(ticket, prefill)
            messages = [pack(frames[i : i + 3]) for i in range(0, len(frames), 3)]
            replies = [credit_reply(2**20), end_reply(None), end_reply(TransferDamaged("wrong checksum"))]
            for _ in range(num_mutants):
                with suppress(TransferError):
                    hello_from_bytes(mutator.spoiled(hello_to_bytes(hello)))
                with suppress(TransferError):
                    read_reply(mutator.spoiled(mutator.chosen(replies), replies), address="peer")
                message = mutator.spoiled(mutator.chosen(messages), messages)
                with suppress(TransferError):
                    spoiled = unpack(memoryview(message), hello)
                    assert sum(frame.payload.nbytes for frame in spoiled) <= len(message)

    asyncio.run(scenario())


def spoil_receiver(*, num_mutants: int, seed: int) -> None:
    """Hand hellos and frames, spoiled after their way over a wire, to a receiver."""
    mutator = Mutator(seed)

    async def scenario() -> None:
        async with two_workers("loopback", CONFIG) as (prefill, decode):
            is_meant = slots_of_ticket(decode)
            for _ in range(num_mutants):
                ticket = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
                hello, frames = hello_of(ticket), the_right_ones(ticket, prefill)
                before = decode.store.bytes.copy()
                with pytest.raises(TransferError):
                    decode.receiver.admit(mutator.hello(hello), transport="raw")
                decode.receiver.admit(hello, transport="raw")
                with suppress(TransferError):
                    decode.receiver.accept(mutator.frame(mutator.chosen(frames)))
                assert (decode.store.bytes == before)[~is_meant].all()
                for frame in frames:
                    decode.receiver.accept(frame)
                await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
                await decode.receiving.cancel(ticket.transfer_id)
            assert decode.receiver.num_open == 0

    asyncio.run(scenario())


def test_no_mutant_gets_more_than_a_transfer_error_out_of_the_codec() -> None:
    spoil_codec(num_mutants=5000, seed=3)


def test_no_mutant_gets_more_than_a_transfer_error_out_of_the_receiver() -> None:
    spoil_receiver(num_mutants=1000, seed=4)


@pytest.mark.slow
def test_no_mutant_of_thousands_gets_more_than_a_transfer_error() -> None:
    spoil_codec(num_mutants=20_000, seed=5)
    spoil_receiver(num_mutants=20_000, seed=6)
