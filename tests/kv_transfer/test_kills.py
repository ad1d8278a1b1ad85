"""Five hundred deaths of either side in the middle of a transfer, on a manual clock.

Whoever dies, the survivor's books are clean afterwards, and nothing is ever written into blocks that have a
new owner: not by the transfer that died, not by frames of it that come late.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.group import OutgoingTransfer
from kv_transfer.hub import Hub
from tests.kv_transfer.workers import (
    LAYOUT,
    SENDER_ID,
    Worker,
    expect,
    frames_of,
    start_worker,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from twinpool.core.clock import ManualClock
from twinpool.core.errors import TransferError
from twinpool.core.ticket import KVTicket

KILLS = 500
TOKENS = 30
SOURCE, TARGET = tuple(range(20, 28)), tuple(range(3, 11))
CONFIG = TransferConfig(
    message_bytes=LAYOUT.block_tokens * LAYOUT.layer_token_bytes,
    credit_bytes=3 * LAYOUT.block_tokens * LAYOUT.layer_token_bytes,
)
NEW_OWNER = 0xA5


class Kill:
    """Two workers, a transfer between them, and the death of one in the middle."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.hub = Hub()
        self.expired: list[str] = []

    async def run(self) -> str:
        self.prefill = await self.start(SENDER_ID, epoch=10)
        self.decode = await self.start("decode", epoch=11)
        self.decode.receiver.on_expired = self.expired.append
        try:
            ticket = await expect(self.decode, blocks=TARGET, num_tokens=TOKENS)
            transfer = await self.prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            await self.send_some(transfer, ticket)
            dies = self.rng.choice([self.sender_dies, self.receiver_dies, self.sender_freezes])
            await dies(transfer, ticket)
            return dies.__name__
        finally:
            await self.prefill.close()
            await self.decode.close()

    async def start(self, worker_id: str, *, epoch: int) -> Worker:
        return await start_worker(
            "loopback", CONFIG, hub=self.hub, epoch=epoch, clock=self.clock, worker_id=worker_id
        )

    async def send_some(self, transfer: OutgoingTransfer, ticket: KVTicket) -> None:
        """Let the transfer get somewhere between nothing and all but the end."""
        for number in range(self.rng.randrange(15)):
            transfer.written(number % LAYOUT.num_layers, 4 * (1 + number // LAYOUT.num_layers), SOURCE)
        for _ in range(self.rng.randrange(12)):
            await asyncio.sleep(0)
        assert self.decode.receiver.report(ticket.transfer_id).complete_s is None

    async def sender_dies(self, transfer: OutgoingTransfer, ticket: KVTicket) -> None:
        await self.prefill.ends.close()
        self.clock.advance(ticket.lease_s)
        self.decode.receiver.sweep()
        assert self.expired == [ticket.transfer_id]
        await self.late_frames_change_nothing(self.decode, ticket)

    async def sender_freezes(self, transfer: OutgoingTransfer, ticket: KVTicket) -> None:
        """It goes on when its blocks have a new owner already."""
        self.clock.advance(ticket.lease_s)
        self.decode.receiver.sweep()
        write_all(transfer, ticket, SOURCE)
        await self.late_frames_change_nothing(self.decode, ticket)
        with pytest.raises(TransferError):
            await transfer.wait()
        assert self.prefill.sender.num_open == 0

    async def receiver_dies(self, transfer: OutgoingTransfer, ticket: KVTicket) -> None:
        store = self.decode.store
        await self.decode.ends.close()
        write_all(transfer, ticket, SOURCE)
        with pytest.raises(TransferError):
            await transfer.wait()
        assert self.prefill.sender.num_open == self.prefill.sending.num_open == 0
        self.decode = await self.start("decode", epoch=12)
        self.decode.store.bytes[:] = store.bytes
        await self.late_frames_change_nothing(self.decode, ticket)

    async def late_frames_change_nothing(self, decode: Worker, ticket: KVTicket) -> None:
        decode.store.bytes[:, :, list(TARGET)] = NEW_OWNER
        for frame in frames_of(self.prefill.store, ticket, SOURCE, frame_tokens=4):
            with pytest.raises(TransferError):
                decode.receiver.accept(frame)
        await asyncio.sleep(0)
        assert (decode.store.bytes[:, :, list(TARGET)] == NEW_OWNER).all()
        assert decode.receiver.num_open == 0

        again = await expect(decode, blocks=TARGET, num_tokens=TOKENS)
        sender = await self.start(SENDER_ID, epoch=13)
        transfer = await sender.sending.begin(again, timeout_s=PATIENCE_S)
        write_all(transfer, again, SOURCE)
        await transfer.wait()
        sent = sender.store.sequence(SOURCE, num_tokens=TOKENS)
        assert (decode.store.sequence(TARGET, num_tokens=TOKENS) == sent).all()
        await sender.close()


def test_no_death_leaves_a_transfer_or_writes_into_what_has_a_new_owner() -> None:
    async def scenario() -> Counter[str]:
        seen: Counter[str] = Counter()
        for seed in range(KILLS):
            async with asyncio.timeout(2 * PATIENCE_S):
                seen[await Kill(seed).run()] += 1
            await eventually(lambda: len(asyncio.all_tasks()) == 1)
        return seen

    seen = asyncio.run(scenario())

    assert set(seen) == {"sender_dies", "sender_freezes", "receiver_dies"}
    assert min(seen.values()) > KILLS / 5
