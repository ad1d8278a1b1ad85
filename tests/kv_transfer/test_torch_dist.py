"""Process groups of two ranks: each ends alone, proves who is there, and opens no door to strangers."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.frame import Frame
from kv_transfer.group import SenderGroup
from kv_transfer.hub import Hub
from kv_transfer.lanes.group import GroupLanes
from kv_transfer.lanes.slots import HostSlots
from kv_transfer.lanes.two_ranks import TwoRanks
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.transports import torch_dist
from tests.kv_transfer.numpy_store import NumpyStore
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, receiver_process
from tests.kv_transfer.workers import (
    LAYOUT,
    SECRET,
    SENDER_ID,
    Worker,
    expect,
    hello_of,
    receiving,
    start_worker,
    two_workers,
    write_all,
)
from tests.patience import PATIENCE_S, eventually
from tests.trust import tls_files
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.clock import SystemClock
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.payload import HostPayload
from twinpool.core.ticket import KVTicket
from twinpool.core.tls import Party

NAME = "torch_dist"
BLOCKS = tuple(range(NUM_BLOCKS))
NONCE, OTHER_NONCE = bytes(range(32)), bytes(32)


async def start_prefill(config: TransferConfig = CONFIG) -> Worker:
    return await start_worker(NAME, config, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)


async def send_all(prefill: Worker, ticket: KVTicket) -> None:
    transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
    write_all(transfer, ticket, BLOCKS)
    await transfer.wait()


@pytest.mark.slow
def test_a_killed_peer_is_given_up_alone_and_met_again_when_it_is_back() -> None:
    async def scenario() -> None:
        prefill = await start_prefill()
        async with receiver_process(NAME, num_transfers=3) as other:
            listen = ""
            for epoch in range(1, 4):
                async with receiver_process(NAME, listen=listen, epoch=epoch, num_transfers=2) as decode:
                    whole, cut = decode.tickets
                    await send_all(prefill, whole)
                    assert await decode.next_line() == "whole"
                    transfer = await prefill.sending.begin(cut, timeout_s=PATIENCE_S)
                    transfer.written(0, 1024, BLOCKS)
                    await eventually(lambda: sum(part.num_frames for part in prefill.sender._open) > 0)
                    await decode.kill()
                    with pytest.raises(TransferError):
                        await transfer.wait()
                    await send_all(prefill, other.tickets[epoch - 1])
                    listen = decode.address
        assert prefill.sender.num_open == 0
        await prefill.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("has_begun", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_frozen_peer_ends_its_own_transfers_and_nobody_else_waits(has_begun: bool) -> None:
    async def scenario() -> None:
        prefill = await start_prefill()
        async with (
            receiver_process(NAME, num_transfers=3) as frozen,
            receiver_process(NAME, num_transfers=3) as other,
        ):
            await send_all(prefill, frozen.tickets[0])
            await send_all(prefill, other.tickets[0])
            transfer = await prefill.sending.begin(frozen.tickets[1], timeout_s=PATIENCE_S)
            if has_begun:
                transfer.written(0, 4, BLOCKS)
                await eventually(lambda: sum(part.num_frames for part in prefill.sender._open) == 1)
            frozen.stop()
            write_all(transfer, frozen.tickets[1], BLOCKS)

            async with asyncio.timeout(3.0):
                await send_all(prefill, other.tickets[1])
            with pytest.raises(TransferTimeout, match=r"takes nothing|no answer"):
                async with asyncio.timeout(CONFIG.connect_timeout_s + 3.0):
                    await transfer.wait()
            assert prefill.sender.num_open == 0
            frozen.go_on()
            await send_all(prefill, frozen.tickets[2])
            await send_all(prefill, other.tickets[2])
        await prefill.close()

    asyncio.run(scenario())


def test_a_frozen_peer_leaves_no_thread_no_file_and_no_memory_behind() -> None:
    async def scenario() -> None:
        prefill = await start_prefill()
        async with receiver_process(NAME, num_transfers=2) as frozen:
            before, slots_before = resources(), num_slots()
            await send_all(prefill, frozen.tickets[0])
            assert num_slots() == slots_before + 1
            transfer = await prefill.sending.begin(frozen.tickets[1], timeout_s=PATIENCE_S)
            transfer.written(0, 4, BLOCKS)
            await eventually(lambda: sum(part.num_frames for part in prefill.sender._open) == 1)
            frozen.stop()
            write_all(transfer, frozen.tickets[1], BLOCKS)
            with pytest.raises(TransferTimeout):
                await transfer.wait()
            await eventually(lambda: num_slots() == slots_before and resources() <= before)
        await prefill.close()

    gc.collect()
    gc.disable()  # what is left to the collector stays for minutes, and each pair is two threads
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()


def test_a_payload_is_not_read_any_more_once_a_transfer_to_a_frozen_peer_was_given_up() -> None:
    async def scenario() -> None:
        others = set(threading.enumerate())  # of earlier tests
        prefill = await start_prefill(replace(CONFIG, lease_s=600.0, credit_bytes=2**26))
        async with receiver_process(NAME, num_transfers=2) as decode:
            first, second = decode.tickets
            await send_all(prefill, first)
            channel = await prefill.transport.open(second.ranks[0][0], hello_of(second), timeout_s=PATIENCE_S)
            decode.stop()
            # More than sockets hold, in pieces that are sent from where they are.
            frames = [large_frame(second, layer) for layer in range(7)]
            await channel.send(frames)
            await asyncio.sleep(0.2)

            async with asyncio.timeout(5.0):
                await channel.abort()
            # Nobody waits for bytes to leave, so nobody reads them.
            await eventually(
                lambda: not any(t.name.endswith(": wait") for t in {*threading.enumerate()} - others)
            )
            with pytest.raises(TransferError):
                await channel.ended()
        await prefill.close()

    asyncio.run(scenario())


def large_frame(ticket: KVTicket, layer: int) -> Frame:
    return Frame(
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        first_head=0,
        num_heads=ticket.layout.num_kv_heads,
        layer=layer,
        first_token=0,
        num_tokens=1,
        checksum=0,
        payload=HostPayload([memoryview(bytearray(2**20))]),
    )


def test_a_sender_that_is_silent_costs_the_receiver_one_lease() -> None:
    async def scenario() -> None:
        config = replace(CONFIG, lease_s=0.5)
        prefill = await start_prefill()
        decode = await start_worker(NAME, config, hub=Hub(), num_blocks=NUM_BLOCKS, epoch=2)
        ticket = await expect(decode, blocks=BLOCKS, num_tokens=4 * NUM_BLOCKS)
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        transfer.written(0, 4, BLOCKS)
        await eventually(lambda: decode.receiver.counters.frames == 1)
        sweeping = asyncio.create_task(decode.receiver.run())

        with pytest.raises(TransferTimeout, match="no progress"):
            await decode.receiver.wait(ticket.transfer_id, ticket.epoch)
        with pytest.raises(TransferError):
            await transfer.wait()
        sweeping.cancel()
        await prefill.close()
        await decode.close()

    asyncio.run(scenario())


def test_nothing_listens_but_on_the_address_that_was_given() -> None:
    async def scenario() -> None:
        before = listening()
        async with two_workers(NAME, TransferConfig()) as (prefill, decode):
            ticket = await expect(decode, blocks=range(32), num_tokens=128)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, range(32))
            await transfer.wait()

            opened = listening() - before
            assert {host for host, _ in opened} == {"127.0.0.1"}
            assert len(opened) == 4, "the two doors, and gloo's of the two ranks"
        await eventually(lambda: listening() == before)

    asyncio.run(scenario())


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {tuple(each.laddr) for each in connections if each.status == psutil.CONN_LISTEN}


def test_pairs_leave_no_thread_and_no_file_behind() -> None:
    async def scenario() -> None:
        async def once() -> None:
            async with two_workers(NAME, TransferConfig()) as (prefill, decode):
                ticket = await expect(decode, blocks=range(32), num_tokens=128)
                transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
                write_all(transfer, ticket, range(32))
                await transfer.wait()

        await once()  # libraries keep some of what they open first
        before = resources()
        for _ in range(5):
            await once()
        await eventually(lambda: resources() <= before)

    asyncio.run(scenario())


def num_slots() -> int:
    """How many lanes have memory."""
    return sum(type(each) is HostSlots for each in gc.get_objects())


def resources() -> tuple[int, ...]:
    """Threads and open files of this process, as the kernel counts them."""
    return tuple(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd"))


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        (("nccl", "2.27.3"), ("nccl", "2.28.9"), "nccl: this worker has 2.27.3, decode-1 has 2.28.9"),
        (("gloo", "2.13.0"), ("gloo", "2.9.1"), "gloo: this worker has 2.13.0, decode-1 has 2.9.1"),
        (("gloo", "2.13.0"), ("nccl", "2.28.9"), "backend: this worker has gloo, decode-1 has nccl"),
    ],
)
def test_two_libraries_that_do_not_fit_are_refused_by_name(
    ours: tuple[str, str], theirs: tuple[str, str], problem: str
) -> None:
    lanes = GroupLanes(TransferConfig())
    lanes.backend, lanes.version = ours
    offer = {"backend": theirs[0], "version": theirs[1]}

    with pytest.raises(TransferError, match=f"^{problem}$"):
        lanes.from_peer(offer, sender_id="decode-1", local_host="127.0.0.1")


def test_a_peer_with_another_library_is_sent_to_by_the_next_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = GroupLanes.__init__

    def older(self: GroupLanes, config: TransferConfig) -> None:
        made(self, config)
        self.version = "1.0"

    async def scenario() -> None:
        hub = Hub()
        monkeypatch.setattr(GroupLanes, "__init__", older)
        prefill = await two_ways(SENDER_ID, hub)
        monkeypatch.setattr(GroupLanes, "__init__", made)
        decode = await two_ways("decode", hub)
        ticket = await receiving(decode.receiver, LAYOUT, ends=decode).expect(
            request_id="r", sender_id=SENDER_ID, blocks=range(32), num_tokens=128, timeout_s=PATIENCE_S
        )
        transfer = await SenderGroup(prefill.sender).begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, range(32))
        await transfer.wait()

        assert prefill.sender.counters.second_choices == 1
        assert decode.receiver.report(ticket.transfer_id).transport == "loopback"
        await prefill.close()
        await decode.close()

    asyncio.run(scenario())


async def two_ways(worker_id: str, hub: Hub) -> TransferEnds:
    identity = RankIdentity(worker_id=worker_id, epoch=1, secret=SECRET)
    store = NumpyStore(LAYOUT, 32).fill(seed=1)
    return await start_ends(store, SystemClock(), CONFIG, identity, names=[NAME, "loopback"], hub=hub)


def two_ranks(make: Callable[[int, KeyExchange], None]) -> list[BaseException | None]:
    """Run both ends of a group, each in a thread of its own; return what they raised."""
    ends: list[KeyExchange] = []
    for rank in (0, 1):
        ends.append(KeyExchange(partial(lambda other, data: ends[other].received(data), 1 - rank)))
    raised: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        try:
            make(rank, ends[rank])
        except TransferError as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return raised


def test_somebody_else_at_the_other_end_is_noticed() -> None:
    def make(rank: int, keys: KeyExchange) -> None:
        ranks = TwoRanks("gloo", keys, rank=rank, local_host="127.0.0.1", stall_s=1.0)
        # The receiver says another nonce than the sender was promised.
        own, expected = (NONCE, NONCE) if rank == 0 else (OTHER_NONCE, NONCE)
        ranks.prove(own, expected, torch.device("cpu"))

    sender, receiver = two_ranks(make)

    assert "somebody else" in str(sender)
    assert receiver is None


def test_a_cut_ends_whoever_waits_at_once() -> None:
    waited_s = [0.0, 0.0]

    def make(rank: int, keys: KeyExchange) -> None:
        ranks = TwoRanks("gloo", keys, rank=rank, local_host="127.0.0.1", stall_s=PATIENCE_S)
        started_s = time.monotonic()
        if rank == 0:
            threading.Timer(0.1, ranks.cut).start()
        try:
            ranks.wait(ranks.receive(torch.zeros(8, dtype=torch.uint8)))
        finally:
            waited_s[rank] = time.monotonic() - started_s

    raised = two_ranks(make)

    assert all(isinstance(error, TransferError) for error in raised)
    assert max(waited_s) < PATIENCE_S / 2


def test_pairs_are_met_over_tls_where_there_are_certificates(tmp_path: Path) -> None:
    make_files(tmp_path, Wanted())
    tls = tls_files(tmp_path, Party.WORKER)

    async def scenario() -> None:
        prefill = await start_worker(NAME, CONFIG, hub=Hub(), worker_id=SENDER_ID, tls=tls)
        decode = await start_worker(NAME, CONFIG, hub=Hub(), epoch=2, tls=tls)
        plain = await start_worker(NAME, CONFIG, hub=Hub(), worker_id=SENDER_ID)
        router = await start_worker(
            NAME, CONFIG, hub=Hub(), worker_id=SENDER_ID, tls=tls_files(tmp_path, Party.ROUTER)
        )
        for stranger in (plain, router):
            ticket = await expect(decode, blocks=range(32), num_tokens=128)
            with pytest.raises(TransferError):
                await (await stranger.sending.begin(ticket, timeout_s=2.0)).wait()
            assert not decode.receiver.report(ticket.transfer_id).transport
        ticket = await expect(decode, blocks=range(32), num_tokens=128)
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        write_all(transfer, ticket, range(32))
        await transfer.wait()
        for worker in (prefill, decode, plain, router):
            await worker.close()

    asyncio.run(scenario())


def test_it_can_be_used_where_torch_has_gloo() -> None:
    assert torch_dist.unavailable() == ""
