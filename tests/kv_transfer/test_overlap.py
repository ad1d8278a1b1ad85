"""Streaming hides the transfer behind the prefill: exact times, in virtual time, over a shaped link."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.group import OutgoingTransfer
from kv_transfer.hub import Hub
from kv_transfer.registry import load_transport
from kv_transfer.sender import KVSender
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.workers import SECRET, SENDER_ID, expect, start_worker
from tests.toys import layout
from tests.virtual_time import LoopClock, run_in_virtual_time
from twinpool.core.errors import ConfigError, TransferTimeout
from twinpool.lab.shaper import LinkShape, ShapedTransport

LAYERS = 8
LAYOUT = layout(num_layers=LAYERS, num_kv_heads=2, head_dim=64, block_tokens=16)
TOKENS = 512
CHUNKS = 4
BLOCKS = tuple(range(32))
TRANSFER_BYTES = TOKENS * LAYOUT.token_bytes
PREFILL_S = 1.0
UNIT_S = PREFILL_S / (LAYERS * CHUNKS)  # one layer of one chunk
GRID = 1e-9  # of sums of floats


async def second_token_s(shape: LinkShape, config: TransferConfig) -> float:
    """Return the time from the start of the prefill to the moment when all KV is confirmed."""
    loop, hub, clock = asyncio.get_running_loop(), Hub(), LoopClock()
    async with AsyncExitStack() as stack:
        decode = await start_worker("loopback", config, hub=hub, layout=LAYOUT, clock=clock)
        stack.push_async_callback(decode.close)
        store = NumpyStore(LAYOUT, len(BLOCKS)).fill(seed=1)
        transport = ShapedTransport(load_transport("loopback", config, hub), shape)
        stack.push_async_callback(transport.close)
        sender = KVSender(store, [transport], clock, config, worker_id=SENDER_ID, secret=SECRET)
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
        started_s = loop.time()
        parts = sender.begin(ticket, timeout_s=100.0)
        transfer = OutgoingTransfer(ticket.transfer_id, parts, (), on_end=lambda transfer: None)
        for chunk in range(1, CHUNKS + 1):
            for layer in range(LAYERS):
                await asyncio.sleep(UNIT_S)
                transfer.written(layer, chunk * TOKENS // CHUNKS, BLOCKS)
        await transfer.wait()
        ended_s = loop.time()
        assert (decode.store.bytes == store.bytes).all()
        return ended_s - started_s


STREAMED = TransferConfig(credit_bytes=TRANSFER_BYTES, whole_below_tokens=0)
WHOLE = replace(STREAMED, whole_below_tokens=TOKENS + 1)
AS_LONG_AS_THE_PREFILL = LinkShape(bandwidth_bytes_s=TRANSFER_BYTES / PREFILL_S)


def test_a_transfer_as_long_as_the_prefill_is_over_one_unit_after_it() -> None:
    taken_s = run_in_virtual_time(second_token_s(AS_LONG_AS_THE_PREFILL, STREAMED))

    assert PREFILL_S < taken_s <= PREFILL_S + 1.3 * UNIT_S


def test_sent_whole_it_takes_the_sum_of_both() -> None:
    taken_s = run_in_virtual_time(second_token_s(AS_LONG_AS_THE_PREFILL, WHOLE))

    assert taken_s == pytest.approx(PREFILL_S + PREFILL_S, abs=GRID)


def test_a_fast_link_hides_all_but_the_last_unit() -> None:
    shape = LinkShape(bandwidth_bytes_s=10 * TRANSFER_BYTES / PREFILL_S)

    taken_s = run_in_virtual_time(second_token_s(shape, STREAMED))

    transfer_s = PREFILL_S / 10
    assert taken_s - PREFILL_S <= 0.1 * transfer_s


def test_latency_is_paid_once_each_way_however_many_messages_there_are() -> None:
    async def difference_s() -> float:
        near = await second_token_s(AS_LONG_AS_THE_PREFILL, WHOLE)
        return await second_token_s(replace(AS_LONG_AS_THE_PREFILL, latency_s=0.05), WHOLE) - near

    # Being admitted is hidden behind the prefill; the way there and the confirmation's way back are not.
    assert run_in_virtual_time(difference_s()) == pytest.approx(2 * 0.05, abs=GRID)


def test_a_prompt_whose_cached_part_takes_longer_than_the_lease_keeps_its_room() -> None:
    """The decode worker holds nearly all of it and the prefill worker nothing: little is sent, and late."""

    async def scenario() -> int:
        hub, clock = Hub(), LoopClock()
        decode = await start_worker("loopback", STREAMED, hub=hub, layout=LAYOUT, clock=clock)
        sweeping = asyncio.create_task(decode.receiving.run())
        prefill = await start_worker(
            "loopback", STREAMED, hub=hub, layout=LAYOUT, clock=clock, worker_id=SENDER_ID
        )
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS, cached_tokens=TOKENS - 16)
        transfer = await prefill.sending.begin(ticket, timeout_s=1e6)
        for num_tokens in range(16, TOKENS + 1, 16):
            for layer in range(LAYERS):
                await asyncio.sleep(ticket.lease_s / 20)
                transfer.written(layer, num_tokens, BLOCKS)
        await transfer.wait()
        sweeping.cancel()
        await prefill.close()
        await decode.close()
        return decode.receiver.counters.signs_of_life

    # 32 chunks of 8 layers take 12.8 leases, and a sign is given in each quarter of one.
    assert run_in_virtual_time(scenario()) == pytest.approx(12.8 * 4, abs=13)


def test_a_prompt_that_is_not_computed_at_all_loses_its_room_with_the_lease() -> None:
    async def scenario() -> int:
        hub, clock = Hub(), LoopClock()
        decode = await start_worker("loopback", STREAMED, hub=hub, layout=LAYOUT, clock=clock)
        sweeping = asyncio.create_task(decode.receiving.run())
        prefill = await start_worker(
            "loopback", STREAMED, hub=hub, layout=LAYOUT, clock=clock, worker_id=SENDER_ID
        )
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=TOKENS)
        transfer = await prefill.sending.begin(ticket, timeout_s=1e6)
        with pytest.raises(TransferTimeout, match="no progress for 30 s"):
            await transfer.wait()
        sweeping.cancel()
        await prefill.close()
        await decode.close()
        return decode.receiver.counters.expired

    assert run_in_virtual_time(scenario()) == 1


def test_two_transfers_share_the_link() -> None:
    async def taken_s() -> float:
        shape, hub = LinkShape(bandwidth_bytes_s=1e6), Hub()
        decode = await start_worker("loopback", STREAMED, hub=hub, layout=LAYOUT, clock=LoopClock())
        transport = ShapedTransport(load_transport("loopback", STREAMED, hub), shape)
        store = NumpyStore(LAYOUT, len(BLOCKS)).fill(seed=1)
        sender = KVSender(store, [transport], LoopClock(), STREAMED, worker_id=SENDER_ID, secret=SECRET)
        parts = []
        for blocks in (BLOCKS[:16], BLOCKS[16:]):
            ticket = await expect(decode, blocks=blocks, num_tokens=256)
            parts += sender.begin(ticket, timeout_s=1e6)
        started_s = asyncio.get_running_loop().time()
        for part in parts:
            for layer in range(LAYERS):
                part.written(layer, 256, BLOCKS)
        await asyncio.gather(*(part.wait() for part in parts))
        ended_s = asyncio.get_running_loop().time()
        await transport.close()
        await decode.close()
        return ended_s - started_s

    assert run_in_virtual_time(taken_s()) == pytest.approx(TRANSFER_BYTES / 1e6, abs=GRID)


def test_losses_are_the_same_for_the_same_seed_and_cost_time() -> None:
    async def times_s() -> list[float]:
        shapes = [replace(AS_LONG_AS_THE_PREFILL, loss=0.01, seed=seed) for seed in (1, 1, 2)]
        return [await second_token_s(shape, STREAMED) for shape in shapes]

    first, again, other = run_in_virtual_time(times_s())

    assert first == again
    assert first != other
    assert min(first, other) > PREFILL_S + UNIT_S


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"bandwidth_bytes_s": -1.0}, "bandwidth"), ({"latency_s": -1.0}, "latency"), ({"loss": 1.0}, "loss")],
)
def test_a_link_that_cannot_be_is_refused_by_name(settings: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"link.{field}"):
        LinkShape(**settings)  # type: ignore[arg-type]
