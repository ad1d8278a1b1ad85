"""NIXL between processes, its ports and its leavings, and what a peer may say of its memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.lanes.nixl_agent import NixlAgent
from kv_transfer.pair.keys import KeyExchange
from kv_transfer.pair.lane import Offer
from kv_transfer.transports import nixl
from tests.kv_transfer.receiver_process import CONFIG, NUM_BLOCKS, receiver_process
from tests.kv_transfer.workers import LAYOUT, SENDER_ID, expect, start_worker, two_workers, write_all
from tests.patience import PATIENCE_S, eventually
from twinpool.core.errors import TransferDamaged, TransferError, TransferTimeout

REASON = nixl.unavailable()
needs_nixl = pytest.mark.skipif(bool(REASON), reason=REASON)
ALL_BLOCKS = range(NUM_BLOCKS)


def test_it_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, package, None)

    assert nixl.unavailable.__wrapped__() == "nixl is not installed (pip install twinpool[nixl])"


@pytest.mark.parametrize(
    ("listen", "devices"),
    [("", "lo"), ("127.0.0.1:0", "lo"), ("[::1]:7000", "lo"), (":7000", ""), ("0.0.0.0:0", "")],
)
def test_ucx_has_ports_beyond_this_machine_only_where_the_worker_has(listen: str, devices: str) -> None:
    config = TransferConfig(listen=listen, advertise_host="worker.example")

    assert nixl.net_devices_of(config) == devices


def shared_memory(pids: set[int]) -> list[str]:
    """Return the shared memory that processes made, and what UCX keeps in files."""
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]
    files = [path.name for path in Path("/dev/shm").iterdir() if "ucx" in path.name]
    return files + [fields[1] for fields in lines if int(fields[4]) in pids]


@needs_nixl
def test_a_killed_peer_leaves_nothing_and_is_met_again_after_its_restart() -> None:
    async def scenario() -> None:
        prefill = await start_worker("nixl", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        pids = {os.getpid()}
        listen = ""
        for epoch in range(1, 4):
            async with receiver_process("nixl", listen=listen, epoch=epoch, num_transfers=2) as decode:
                pids.add(decode.pid)
                whole, cut = decode.tickets
                (part,) = prefill.sender.begin(whole, timeout_s=PATIENCE_S)
                write_all(part, whole, ALL_BLOCKS)
                await part.wait()
                assert await decode.next_line() == "whole"

                (part,) = prefill.sender.begin(cut, timeout_s=PATIENCE_S)
                part.written(0, 1024, ALL_BLOCKS)
                await eventually(lambda part=part: part.num_frames > 0)
                await decode.kill()
                with pytest.raises(TransferError):
                    await part.wait()
                listen = decode.address
        assert prefill.sender.num_open == 0
        await prefill.close()
        assert not shared_memory(pids)

    asyncio.run(scenario())


@needs_nixl
def test_a_stopped_peer_costs_one_lease_and_its_credit() -> None:
    async def scenario() -> None:
        prefill = await start_worker("nixl", CONFIG, hub=Hub(), num_blocks=NUM_BLOCKS, worker_id=SENDER_ID)
        async with receiver_process("nixl", num_transfers=2) as decode:
            first, second = decode.tickets
            (part,) = prefill.sender.begin(first, timeout_s=PATIENCE_S)
            part.written(0, 4, ALL_BLOCKS)
            await eventually(lambda: part.num_frames == 1)
            decode.stop()
            write_all(part, first, ALL_BLOCKS)
            with pytest.raises(TransferTimeout, match="takes nothing"):
                await part.wait()
            assert part.num_bytes <= CONFIG.credit_bytes + 4 * LAYOUT.layer_token_bytes
            decode.go_on()

            (part,) = prefill.sender.begin(second, timeout_s=PATIENCE_S)
            write_all(part, second, ALL_BLOCKS)
            await part.wait()
            assert await decode.next_line() == "TransferError"
            assert await decode.next_line() == "whole"
        await prefill.close()

    asyncio.run(scenario())


@needs_nixl
def test_without_an_address_every_port_is_on_this_machine_alone_and_goes_with_the_transport() -> None:
    def listening() -> set[Any]:
        found = psutil.Process().net_connections()
        return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}

    async def scenario() -> None:
        before = listening()
        async with two_workers("nixl", CONFIG) as (prefill, decode):
            ticket = await expect(decode, blocks=range(32), num_tokens=128)
            transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
            write_all(transfer, ticket, range(32))
            await transfer.wait()
            opened = listening() - before
            assert len(opened) >= 2
            assert {address.ip for address in opened} == {"127.0.0.1"}
        assert listening() == before

    asyncio.run(scenario())


IDLE = """
import time
from kv_transfer.lanes.nixl_agent import NixlAgent

agent = NixlAgent(net_devices="lo")
before_s = time.process_time()
time.sleep(2.0)
print(time.process_time() - before_s)
"""


@needs_nixl
def test_an_agent_with_nothing_to_do_leaves_the_processor_alone() -> None:
    idle = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, check=True, timeout=PATIENCE_S)

    assert float(idle.stdout) < 0.2  # as NIXL's own Python class sets it up it takes 2 s, or one core


@pytest.fixture
def agents() -> Iterator[tuple[NixlAgent, NixlAgent]]:
    pair = NixlAgent(net_devices="lo"), NixlAgent(net_devices="lo")
    yield pair
    for agent in pair:
        agent.close()


@needs_nixl
def test_a_read_brings_the_peers_bytes_and_no_others(agents: tuple[NixlAgent, NixlAgent]) -> None:
    theirs, ours = agents
    source = theirs.register(torch.arange(256, dtype=torch.uint8))
    target = ours.register(torch.zeros(256, dtype=torch.uint8))
    peer = ours.meet(source.introduction)

    read = ours.read(peer, source.address + 10, target, 100, 20)
    wait_for(lambda: ours.is_done(read))
    ours.end(read)

    assert target.memory[100:120].tolist() == list(range(10, 30))
    assert not target.memory[:100].any() and not target.memory[120:].any()
    with pytest.raises(TransferError, match="the peer's bytes cannot be read"):
        ours.read(peer, source.address + 250, target, 0, 20)
    with pytest.raises(TransferError):
        ours.read("somebody else", source.address, target, 0, 20)


def wait_for(is_done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end_s
        time.sleep(0.001)


@needs_nixl
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"nixl": "0.0.1"}, TransferError),
        ({"device": "cuda"}, TransferError),
        ({"introduction": ""}, TransferError),
        ({"introduction": "no base64"}, TransferDamaged),
        ({"introduction": "bm90aGluZw=="}, TransferError),
        ({"address": 1}, TransferError),
        ({"address": "here"}, TransferDamaged),
        ({"nonce": "00" * 32}, TransferError),
        ({"nonce": 5}, TransferDamaged),
        ({"slot_bytes": 2**40}, TransferDamaged),
    ],
    ids=str,
)
def test_a_peer_that_speaks_of_other_memory_is_not_read(
    agents: tuple[NixlAgent, NixlAgent], change: Offer, problem: type[TransferError]
) -> None:
    from kv_transfer.lanes.nixl import NixlLanes

    theirs, ours = (NixlLanes(CONFIG, agent, net_devices="lo") for agent in agents)
    sending = theirs.to_peer("127.0.0.1")

    def meet(offer: Offer) -> None:
        receiving = ours.from_peer(offer, sender_id="prefill", local_host="127.0.0.1")
        try:
            receiving.connect(KeyExchange(lambda message: None))
        finally:
            receiving.close()

    with pytest.raises(problem):
        meet({**sending.offer, **change})
    meet(sending.offer)
    sending.close()


@needs_nixl
def test_a_part_larger_than_all_slots_arrives_whole() -> None:
    wide = replace(LAYOUT, num_layers=2, num_kv_heads=16, head_dim=128)

    async def scenario() -> None:
        blocks = range(1024)  # 64 MiB, in slots of 8
        config = replace(CONFIG, message_bytes=2**21, credit_bytes=2**22, lease_s=PATIENCE_S)
        prefill, decode = [
            await start_worker(
                "nixl",
                config,
                hub=Hub(),
                layout=wide,
                num_blocks=len(blocks),
                epoch=epoch,
                worker_id=worker_id,
            )
            for epoch, worker_id in ((1, SENDER_ID), (2, "decode"))
        ]
        ticket = await expect(decode, blocks=blocks, num_tokens=4096)
        transfer = await prefill.sending.begin(ticket, timeout_s=PATIENCE_S)
        for layer in range(wide.num_layers):
            transfer.written(layer, 4096, blocks)
        await transfer.wait()

        assert (decode.store.bytes == prefill.store.bytes).all()
        await prefill.close()
        await decode.close()

    asyncio.run(scenario())


@needs_nixl
def test_a_cache_in_host_memory_is_moved_from_there_though_the_machine_has_a_gpu(
    agents: tuple[NixlAgent, NixlAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_transfer.lanes.nixl import NixlLanes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    lanes = NixlLanes(CONFIG, agents[0], net_devices="lo")

    assert not lanes.moves_tensors
    lane = lanes.to_peer("")
    assert lane.offer["device"] == "cpu"
    lane.close()
