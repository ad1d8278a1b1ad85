"""Real processes are killed in the middle of real transfers, over every transport between processes.

Thirty deaths of a transport's two sides: the survivor learns it by itself, its books are clean, and what the
dead one was writing is never written again.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kv_transfer.hub import Hub
from kv_transfer.registry import transport_names, unavailable
from tests.kv_transfer import receiver_process, sender_process
from tests.kv_transfer.workers import LAYOUT, SENDER_ID, expect, start_worker, write_all
from tests.patience import PATIENCE_S, eventually
from twinpool.core.errors import TransferError

KILLS = 15  # of each side
TOKENS = 4 * sender_process.NUM_BLOCKS
BLOCKS = sender_process.BLOCKS
NEW_OWNER = 0xA5

pytestmark = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            # The first three are the ones that a CPU host uses by itself.
            marks=[
                pytest.mark.skipif(bool(unavailable(name)), reason=unavailable(name)),
                *([] if name in ("shm", "tcp", "grpc") else [pytest.mark.slow]),
            ],
        )
        for name in transport_names()
        if name != "loopback"
    ],
)


def test_a_killed_sender_leaves_no_room_taken_and_writes_nothing_more(name: str) -> None:
    rng = random.Random(1)
    segments = sorted(Path("/dev/shm").iterdir())

    async def scenario() -> None:
        decode = await start_worker(
            name, sender_process.CONFIG, hub=Hub(), num_blocks=sender_process.NUM_BLOCKS
        )
        for number in range(KILLS):
            ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
            frames = decode.receiver.counters.frames
            async with sender_process.sender_process(name) as prefill:
                await prefill.send(ticket)
                wanted = frames + rng.randrange(1, 12)
                await eventually(lambda wanted=wanted: decode.receiver.counters.frames >= wanted)
                await prefill.kill()
                with pytest.raises(TransferError):
                    async with asyncio.timeout(PATIENCE_S):
                        await decode.receiving.wait(ticket.transfer_id, ticket.epoch)
            report = await decode.receiving.cancel(ticket.transfer_id)
            assert report.complete_s is None
            decode.store.bytes[:] = NEW_OWNER
            await asyncio.sleep(0.01)
            assert (decode.store.bytes == NEW_OWNER).all()
            assert decode.receiver.num_open == 0
            assert decode.receiver.counters.broken == number + 1

        await one_whole_transfer(name, decode)
        await decode.close()

    asyncio.run(scenario())

    assert sorted(Path("/dev/shm").iterdir()) == segments


async def one_whole_transfer(name: str, decode: object) -> None:
    """After all that, a transfer is as good as the first one."""
    prefill = await start_worker(
        name,
        sender_process.CONFIG,
        hub=Hub(),
        num_blocks=sender_process.NUM_BLOCKS,
        epoch=7,
        worker_id=SENDER_ID,
    )
    ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)  # type: ignore[arg-type]
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()
    assert (decode.store.bytes == prefill.store.bytes).all()  # type: ignore[attr-defined]
    await prefill.close()


def test_a_killed_receiver_ends_its_senders_and_they_serve_the_next(name: str) -> None:
    rng = random.Random(2)
    segments = sorted(Path("/dev/shm").iterdir())

    async def scenario() -> None:
        prefill = await start_worker(
            name,
            receiver_process.CONFIG,
            hub=Hub(),
            num_blocks=receiver_process.NUM_BLOCKS,
            worker_id=SENDER_ID,
        )
        for _ in range(KILLS):
            async with receiver_process.receiver_process(name) as decode:
                (ticket,) = decode.tickets
                transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
                num_reads = prefill.store.num_reads + rng.randrange(1, 12)
                for layer in range(LAYOUT.num_layers - 1):
                    transfer.written(layer, TOKENS, BLOCKS)
                await eventually(lambda least=num_reads: prefill.store.num_reads >= least)
                await decode.kill()
                with pytest.raises(TransferError):
                    async with asyncio.timeout(PATIENCE_S):
                        await transfer.wait()
                num_reads = prefill.store.num_reads
                await asyncio.sleep(0.01)
                assert prefill.store.num_reads == num_reads
                assert prefill.sender.num_open == prefill.sending.num_open == 0

        # It expects another one, and so lives on after the first.
        async with receiver_process.receiver_process(name, num_transfers=2) as decode:
            ticket, _ = decode.tickets
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, BLOCKS)
            await transfer.wait()
            assert await decode.next_line() == "whole"
        await prefill.close()

    asyncio.run(scenario())

    assert sorted(Path("/dev/shm").iterdir()) == segments
