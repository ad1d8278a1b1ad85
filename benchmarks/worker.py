"""One worker without a router, in a process of its own, for benchmarks that are their own router.

Its argument is a `WorkerSpec` as JSON.  It prints a line of JSON once it answers, and ends when its standard
input does, so that none is left over.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from decode_service.service import DecodeService
from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.sender import KVSender
from prefill_service.service import PrefillService
from twinpool.core.clock import SystemClock
from twinpool.core.config import bind
from twinpool.core.ports import Role
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import load_model
from twinpool.engine.loop import EngineLoop
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService
from twinpool.lab.shaper import LinkShape, ShapedTransport
from twinpool.rpc.door import Door
from twinpool.rpc.server import WorkerServer

SECRET = Secret(b"known to every worker of a benchmark")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the worker is."""

    worker_id: str
    model: Path
    dtype: str = "auto"
    transport: str
    num_tokens: int  # that its cache holds
    threads: int = 1
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    link: LinkShape = field(default_factory=LinkShape)  # over which it sends


@asynccontextmanager
async def running(spec: WorkerSpec) -> AsyncIterator[tuple[str, int]]:
    """Run the worker until the block ends; give its address and the bytes of one token's KV."""
    torch.set_num_threads(spec.threads)
    loaded, clock = load_model(spec.model, dtype=spec.dtype), SystemClock()
    layout = loaded.spec.layout(block_tokens=spec.engine.block_tokens)
    cache = KVCache(layout, layout.num_blocks(spec.num_tokens), "cpu")
    limits = EngineLimits(
        num_blocks=cache.num_blocks,
        max_model_tokens=loaded.spec.max_model_tokens,
        vocab_size=loaded.spec.vocab_size,
        eos_ids=frozenset(),
    )
    engine = Engine(TorchRunner(loaded, cache), config=spec.engine, limits=limits, clock=clock)
    loop = EngineLoop(engine, clock)
    identity = RankIdentity(worker_id=spec.worker_id, epoch=1, secret=SECRET)
    async with AsyncExitStack() as stack:
        ends = await start_ends(cache, clock, spec.transfer, identity, names=[spec.transport])
        stack.push_async_callback(ends.close)
        await loop.start()
        stack.push_async_callback(loop.close)
        shaped = [ShapedTransport(transport, spec.link) for transport in ends.transports]
        ways = ends.transports if spec.link == LinkShape() else shaped
        sender = KVSender(cache, ways, clock, spec.transfer, worker_id=spec.worker_id, secret=SECRET)
        prefill = PrefillService(loop, SenderGroup(sender))
        stack.push_async_callback(prefill.close)
        own = Identity(worker_id=spec.worker_id, epoch=1, layout=layout, ranks=(ends.endpoints,))
        decode = DecodeService(
            loop, ReceiverGroup(ends.receiver, own, secret=SECRET, lease_s=spec.transfer.lease_s)
        )
        await decode.start()
        stack.push_async_callback(decode.close)
        server = WorkerServer(
            prefill=prefill,
            decode=decode,
            worker=_service(spec, loop, prefill, decode),
            door=Door(Trust(party=Party.WORKER), callers=Party.ROUTER, audience=spec.worker_id),
        )
        await server.start()
        stack.push_async_callback(server.stop, grace_s=0.5)
        yield server.address, layout.token_bytes


def _service(
    spec: WorkerSpec, loop: EngineLoop, prefill: PrefillService, decode: DecodeService
) -> WorkerService:
    async def num_transfers() -> int:
        return prefill.num_transfers + decode.num_transfers

    return WorkerService(
        loop,
        worker_id=spec.worker_id,
        role=Role.COLOCATED,
        num_tickets=lambda: decode.num_tickets,
        num_transfers=num_transfers,
        counters=dict,
    )


async def _main(spec: WorkerSpec) -> None:
    async with running(spec) as (address, token_bytes):
        print(json.dumps({"address": address, "token_bytes": token_bytes}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main(bind(WorkerSpec, json.loads(sys.argv[1]))))
