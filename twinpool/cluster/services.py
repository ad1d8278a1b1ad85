"""The parts of a worker that runs, as its rank 0 has them: engine, transfers, services, server.

Started in order and stopped in the other; knows nothing of routers, signals or why a worker ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from decode_service.service import DecodeService
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from prefill_service.service import PrefillService
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.ranks import OtherRanks, summed
from twinpool.cluster.share import LeadingRank, start_transfers
from twinpool.core.clock import Clock
from twinpool.core.ports import WorkerInfo
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.loop import EngineLoop
from twinpool.engine.worker import WorkerService
from twinpool.rpc.door import Door
from twinpool.rpc.server import WorkerServer

_STOP_GRACE_S = 0.5  # for calls that are answering when the server stops


@dataclass(frozen=True, slots=True)
class Services:
    """A running worker."""

    started: WorkerInfo  # as it was when it started
    engine: EngineLoop
    worker: WorkerService

    def info(self) -> WorkerInfo:
        """Return what the worker says of itself where it joins; it may have got another role since."""
        return replace(self.started, role=self.worker.role)


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    trust: Trust,
    clock: Clock,
    *,
    rank_0: LeadingRank,
    others: OtherRanks,
) -> AsyncIterator[Services]:
    """Run a worker until the block ends.

    Args:
        config: Of the worker.
        trust: Of this process.
        clock: Of everything.
        rank_0: What computes.
        others: The other ranks, ready.

    Raises:
        ConfigError: An address cannot be listened on, or a transport cannot be used.
    """
    spec, cache = rank_0.spec, rank_0.cache
    limits = EngineLimits(
        num_blocks=cache.num_blocks,
        max_model_tokens=spec.max_model_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
    )
    engine = EngineLoop(Engine(rank_0.runner, config=config.engine, limits=limits, clock=clock), clock)
    async with AsyncExitStack() as stack:
        ends = await start_transfers(cache, clock, config, trust, rank=0)
        stack.push_async_callback(ends.close)
        identity = Identity(
            worker_id=config.worker_id,
            epoch=config.generation,
            layout=cache.layout,
            ranks=(ends.endpoints, *others.endpoints),
        )
        receiving = ReceiverGroup(
            ends.receiver,
            identity,
            secret=trust.secret,
            lease_s=config.transfer.lease_s,
            others=others.ports,
        )
        await engine.start()
        stack.push_async_callback(engine.close)
        prefill = PrefillService(engine, SenderGroup(ends.sender, others.ports))
        decode = DecodeService(engine, receiving)
        stack.push_async_callback(prefill.close)
        await decode.start()
        stack.push_async_callback(decode.close)
        door = Door(trust, callers=Party.ROUTER, audience=config.worker_id)

        async def num_transfers() -> int:
            return prefill.num_transfers + decode.num_transfers + await others.num_transfers()

        worker = WorkerService(
            engine,
            worker_id=config.worker_id,
            role=config.role,
            num_tickets=lambda: decode.num_tickets,
            num_transfers=num_transfers,
            counters=lambda: summed(
                [ends.counters(), others.counters(), {"refused_calls": door.num_refused}]
            ),
        )
        server = WorkerServer(
            prefill=prefill,
            decode=decode,
            worker=worker,
            door=door,
            host=config.host,
            port=config.port,
        )
        await server.start()
        stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
        started = WorkerInfo(
            worker_id=config.worker_id,
            role=config.role,
            address=server.address,
            pid=os.getpid(),
            host=socket.gethostname(),
            generation=config.generation,
            model=config.model_name or config.model,
            fingerprint={**spec.fingerprint, **config.transfer.fingerprint},
            layout=cache.layout,
            num_blocks=cache.num_blocks,
            max_model_tokens=spec.max_model_tokens,
            ranks=identity.ranks,
        )
        yield Services(started, engine, worker)
