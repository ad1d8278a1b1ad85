"""One worker from its parts, in this process; `in_process.py` runs two of them."""

import asyncio
import os

from decode_service.service import DecodeService
from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.hub import Hub
from prefill_service.service import PrefillService
from router.workers import WorkerPool, WorkerPorts
from twinpool.core.clock import SystemClock
from twinpool.core.ports import Role, WorkerInfo
from twinpool.core.secret import Secret
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel
from twinpool.engine.loop import EngineLoop
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService

NUM_BLOCKS = 64
SECRET = Secret.random()  # every process of a deployment has the same one


class LocalWorker:
    """An engine and the services around it; ``ports`` are what a router asks, ``info`` is what it knows."""

    def __init__(self, cache: KVCache, loop: EngineLoop, ends: TransferEnds, info: WorkerInfo) -> None:
        self.info = info
        self._parts = ends, loop
        identity = Identity(worker_id=info.worker_id, epoch=1, layout=cache.layout, ranks=info.ranks)
        receivers = ReceiverGroup(ends.receiver, identity, secret=SECRET, lease_s=30.0)
        self.prefill = PrefillService(loop, SenderGroup(ends.sender))
        self.decode = DecodeService(loop, receivers)
        self.service = WorkerService(
            loop, worker_id=info.worker_id, role=info.role, num_tickets=int, num_transfers=int, counters=dict
        )
        self.ports = WorkerPorts(
            prefill=self.prefill, decode=self.decode, worker=self.service, connection=self
        )

    @classmethod
    async def start(cls, model: LoadedModel, role: Role, hub: Hub) -> "LocalWorker":
        """Return a worker that takes requests."""
        clock, engine, spec, transfer = SystemClock(), EngineConfig(), model.spec, TransferConfig()
        cache = KVCache(spec.layout(block_tokens=engine.block_tokens), NUM_BLOCKS, "cpu")
        limits = EngineLimits(
            num_blocks=NUM_BLOCKS,
            max_model_tokens=spec.max_model_tokens,
            vocab_size=spec.vocab_size,
            eos_ids=frozenset(spec.eos_ids),
        )
        runner = TorchRunner(model, cache)
        loop = EngineLoop(Engine(runner, config=engine, limits=limits, clock=clock), clock)
        me = RankIdentity(worker_id=role, epoch=1, secret=SECRET)
        ends = await start_ends(cache, clock, transfer, me, names=["loopback"], hub=hub)
        info = WorkerInfo(
            worker_id=role,
            role=role,
            address="",
            pid=os.getpid(),
            host="",
            generation=1,
            model="example",
            fingerprint=spec.fingerprint,
            layout=cache.layout,
            num_blocks=NUM_BLOCKS,
            max_model_tokens=spec.max_model_tokens,
            ranks=(ends.endpoints,),
        )
        worker = cls(cache, loop, ends, info)
        await loop.start()
        await worker.decode.start()
        return worker

    async def join(self, pool: WorkerPool) -> None:
        """Say who this is and then how it is, as a worker process does over its join stream."""
        pool.joined(self.info)
        while True:
            pool.heard(self.info.worker_id, self.info.generation, self.service.load())
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End what runs, sender before engine, engine before transport."""
        ends, loop = self._parts
        for part in (self.decode, self.prefill, loop, ends):
            await part.close()
