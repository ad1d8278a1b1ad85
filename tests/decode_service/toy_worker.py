"""Whole workers without a model: engine thread, transfers and both services, over a runner of numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from decode_service.service import DecodeService
from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transport import Transport
from prefill_service.service import PrefillService
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner
from tests.patience import PATIENCE_S
from tests.toys import layout
from twinpool.core.clock import SystemClock
from twinpool.core.payload import HostPayload
from twinpool.core.ports import BlockCounts, KVPayload, KVRange, Role, WorkerAudit
from twinpool.core.secret import Secret
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.loop import EngineLoop
from twinpool.engine.plan import BatchPlan
from twinpool.engine.worker import WorkerService

LAYOUT = layout(num_layers=2, block_tokens=4)
NUM_BLOCKS = 32


class RunnerStore:
    """The cache of a fake runner as transfers see it: the KV of a token is its id, many times.

    A received token is cached once all its layers came, so that a missing layer cannot hide.
    """

    layout = LAYOUT
    heads = LAYOUT.rank_heads(0)

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._received: dict[tuple[int, int], set[int]] = {}
        self._numbers = LAYOUT.layer_token_bytes // 2 // 4  # of one key or value

    def payload(self, part: KVRange, *, wire: str, on_device: bool = False) -> HostPayload:
        ids = self._runner.read(part.blocks, part.first_token + part.num_tokens)[part.first_token :]
        numbers = np.asarray(ids, np.int32)[None, :, None].repeat(2, 0).repeat(self._numbers, 2)
        return HostPayload([memoryview(numbers.tobytes())])

    def write(self, payload: KVPayload, part: KVRange, *, wire: str) -> None:
        data = b"".join(payload.views())
        numbers = np.frombuffer(data, np.int32).reshape(2, part.num_tokens, self._numbers)
        for i in range(part.num_tokens):
            slot = self._runner._slot(part.blocks, part.first_token + i)
            layers = self._received.setdefault(slot, set())
            layers.add(part.layer)
            if len(layers) == LAYOUT.num_layers:
                self._runner._slots[slot] = int(numbers[0, i, 0])
                del self._received[slot]


class Brake:
    """Slows the steps of an engine down, so that a test meets a sequence in the phase it wants."""

    def __init__(self) -> None:
        self.step_s = 0.0

    def __call__(self, plan: BatchPlan) -> None:
        time.sleep(self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ToyWorker:
    """One worker and its parts."""

    brake: Brake
    runner: FakeRunner
    loop: EngineLoop
    receiver: KVReceiver
    sender: KVSender
    prefill: PrefillService
    decode: DecodeService
    control: WorkerService

    async def is_clean(self) -> bool:
        """Whether nothing is left of any request."""
        return is_clean(await self.control.audit())

    async def gets_clean(self) -> bool:
        """Wait until nothing is left of any request; raises TimeoutError if that never comes."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_clean():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return True


def is_clean(audit: WorkerAudit) -> bool:
    held = (audit.blocks.owned, audit.blocks.draining, audit.tickets, audit.transfers, audit.sequences)
    return adds_up(audit.blocks) and held == (0, 0, 0, 0, 0)


def adds_up(blocks: BlockCounts) -> bool:
    return blocks.free + blocks.cached + blocks.owned + blocks.draining == blocks.total


@asynccontextmanager
async def toy_worker(
    config: TransferConfig,
    *,
    worker_id: str = "w0",
    hub: Hub | None = None,
    transport: Transport | None = None,
) -> AsyncIterator[ToyWorker]:
    """Run a worker; ``transport`` replaces its own for what it sends."""
    brake = Brake()
    runner = FakeRunner(block_tokens=LAYOUT.block_tokens, num_layers=LAYOUT.num_layers, before_step=brake)
    clock = SystemClock()
    engine = Engine(
        runner,
        config=EngineConfig(block_tokens=LAYOUT.block_tokens, max_chunk_tokens=8),
        limits=EngineLimits(num_blocks=NUM_BLOCKS, max_model_tokens=512, vocab_size=VOCAB_SIZE),
        clock=clock,
    )
    loop = EngineLoop(engine, clock)
    store = RunnerStore(runner)
    identity = RankIdentity(worker_id=worker_id, epoch=1)
    ends = await start_ends(store, clock, config, identity, names=["loopback"], hub=hub)
    receiver, sender = ends.receiver, ends.sender
    if transport is not None:
        sender = KVSender(store, [transport], clock, config, worker_id=worker_id, secret=Secret())
    tickets = Identity(worker_id=worker_id, epoch=1, layout=LAYOUT, ranks=(ends.endpoints,))
    receiving = ReceiverGroup(receiver, tickets, secret=Secret(), lease_s=config.lease_s)
    prefill, decode = PrefillService(loop, SenderGroup(sender)), DecodeService(loop, receiving)

    async def num_transfers() -> int:
        return prefill.num_transfers + decode.num_transfers

    control = WorkerService(
        loop,
        worker_id=worker_id,
        role=Role.COLOCATED,
        num_tickets=lambda: decode.num_tickets,
        num_transfers=num_transfers,
        counters=lambda: {"transfer_frames": receiver.counters.frames},
    )
    await loop.start()
    await decode.start()
    try:
        yield ToyWorker(
            brake=brake,
            runner=runner,
            loop=loop,
            receiver=receiver,
            sender=sender,
            prefill=prefill,
            decode=decode,
            control=control,
        )
    finally:
        brake.step_s = 0.0
        await prefill.close()
        await decode.close()
        await loop.close()
        await sender.close()
        await ends.close()


@asynccontextmanager
async def pair(
    config: TransferConfig | None = None, *, transport: Transport | None = None
) -> AsyncIterator[tuple[ToyWorker, ToyWorker]]:
    """Run a prefill and a decode worker; ``transport`` replaces the prefill worker's own."""
    config, hub = config or TransferConfig(lease_s=PATIENCE_S, whole_below_tokens=0), Hub()
    async with (
        toy_worker(config, worker_id="prefill", hub=hub, transport=transport) as prefill,
        toy_worker(config, worker_id="decode", hub=hub) as decode,
    ):
        yield prefill, decode
