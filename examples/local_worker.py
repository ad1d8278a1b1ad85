"""One worker from its parts, in this process; `in_process.py` runs two of them."""

import asyncio
import os

from decode_service.service import DecodeService
from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.registry import load_transport
from kv_transfer.sender import KVSender
from prefill_service.service import PrefillService
from router.workers import WorkerPool, WorkerPorts
from twinpool.core.clock import SystemClock
from twinpool.core.ports import Role, WorkerInfo
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.loop import EngineLoop
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService

NUM_BLOCKS = 64


class LocalWorker:
    """An engine and the services around it; ``ports`` are what a router asks, ``info`` is what it knows."""

    def __init__(self, model: LoadedModel, role: Role, hub: Hub) -> None:
        clock, engine, spec, transfer = SystemClock(), EngineConfig(), model.spec, TransferConfig()
        self.cache = KVCache(spec.layout(block_tokens=engine.block_tokens), NUM_BLOCKS, "cpu")
        limits = EngineLimits(
            num_blocks=NUM_BLOCKS,
            max_model_tokens=spec.max_model_tokens,
            vocab_size=spec.vocab_size,
            eos_ids=frozenset(spec.eos_ids),
        )
        runner = TorchRunner(model, self.cache)
        self.loop = EngineLoop(Engine(runner, config=engine, limits=limits, clock=clock), clock)
        self.transport = load_transport("loopback", transfer, hub)
        endpoints = [self.transport.endpoint]
        self.receiver = KVReceiver(
            self.cache, clock, worker_id=role, epoch=1, endpoints=endpoints, config=transfer
        )
        self.prefill = PrefillService(self.loop, KVSender(self.cache, [self.transport], clock, transfer))
        self.decode = DecodeService(self.loop, self.receiver)
        self.service = WorkerService(
            self.loop, worker_id=role, role=role, num_tickets=int, num_transfers=int, counters=dict
        )
        self.ports = WorkerPorts(
            prefill=self.prefill, decode=self.decode, worker=self.service, connection=self
        )
        self.info = WorkerInfo(
            worker_id=role,
            role=role,
            address="",
            pid=os.getpid(),
            host="",
            generation=1,
            model="example",
            fingerprint=spec.fingerprint,
            layout=self.cache.layout,
            num_blocks=NUM_BLOCKS,
            max_model_tokens=spec.max_model_tokens,
            endpoints=tuple(endpoints),
        )

    async def start(self) -> None:
        """Take requests from now on."""
        await self.transport.start(self.receiver)
        await self.loop.start()
        await self.decode.start()

    async def join(self, pool: WorkerPool) -> None:
        """Say who this is and then how it is, as a worker process does over its join stream."""
        pool.joined(self.info)
        while True:
            pool.heard(self.info.worker_id, self.info.generation, self.service.load())
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End what runs, sender before engine, engine before transport."""
        for part in (self.decode, self.prefill, self.loop, self.transport):
            await part.close()
