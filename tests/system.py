"""A whole deployment in one process: real engines, real transfers, the real router.

What is missing here, processes and HTTP, is in ``tests/e2e`` and ``tests/chaos``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from decode_service.service import DecodeService
from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.hub import Hub
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transport import Transport
from prefill_service.service import PrefillService
from router.config import RouterConfig
from router.router import Router
from router.workers import WorkerPool, WorkerPorts
from twinpool.core.clock import SystemClock
from twinpool.core.ports import Role, WorkerInfo
from twinpool.core.request import Request, TokenOutput
from twinpool.core.secret import Secret
from twinpool.core.timeline import RequestTimeline
from twinpool.engine.config import EngineConfig
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.loop import EngineLoop
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService

SECRET = Secret(b"known to every worker of the tests")
PATIENCE_S = 60.0  # far more than anything here takes; only a hang gets there


@dataclass(frozen=True, kw_only=True, eq=False)
class Worker:
    """One worker and its parts."""

    info: WorkerInfo
    cache: KVCache
    loop: EngineLoop
    receiver: KVReceiver
    transports: tuple[Transport, ...]  # that it sends over
    prefill: PrefillService
    decode: DecodeService
    service: WorkerService


class System:
    """A router over running workers."""

    def __init__(self, router: Router, workers: Sequence[Worker]) -> None:
        self.router = router
        self.workers = tuple(workers)
        self._num_asked = 0

    async def answer(self, request: Request) -> list[TokenOutput]:
        """Return the whole answer."""
        outputs, _ = await self.follow(request)
        return outputs

    async def follow(self, request: Request) -> tuple[list[TokenOutput], RequestTimeline]:
        """Return the whole answer and what happened on the way."""
        self._num_asked += 1
        timeline = RequestTimeline(f"t{self._num_asked}", SystemClock())
        outputs = []
        async with (
            asyncio.timeout(PATIENCE_S),
            aclosing(
                self.router.generate(replace(request, request_id=f"q{self._num_asked}"), timeline)
            ) as stream,
        ):
            async for output in stream:
                outputs.append(output)
        return outputs, timeline

    async def settled(self) -> dict[str, object]:
        """Wait until no worker holds anything; return the last audit, whose ``ok`` tells whether it came."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                audit = await self.router.audit()
                if audit["ok"] and not any(_holds(worker) for worker in audit["workers"]):  # type: ignore[attr-defined]
                    return audit
                await asyncio.sleep(0.01)


class _Connection:
    async def close(self) -> None:
        pass


@asynccontextmanager
async def system(
    folder: Path | LoadedModel,
    *,
    prefill: int = 0,
    decode: int = 0,
    colocated: int = 0,
    transport: str = "loopback",
    engine: EngineConfig | None = None,
    transfer: TransferConfig | None = None,
    router: RouterConfig | None = None,
    num_blocks: int = 64,
    cache_type: type[KVCache] = KVCache,
    wrap_transport: Callable[[Transport], Transport] = lambda transport: transport,
) -> AsyncIterator[System]:
    """Run a deployment; everything is closed however the block ends.

    Args:
        wrap_transport: Puts something between a worker's sender and its transport.
    """
    loaded = load_model(folder, dtype="float32") if isinstance(folder, Path) else folder
    config = router or RouterConfig()
    engine = engine or EngineConfig()
    transfer = transfer or TransferConfig(whole_below_tokens=0)  # toys have short prompts
    clock, hub = SystemClock(), Hub()
    ports: dict[str, WorkerPorts] = {}
    pool = WorkerPool(
        config, clock=clock, connect=lambda info: ports[info.worker_id], needs_prefill=prefill > 0
    )
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * decode + [Role.COLOCATED] * colocated
    async with AsyncExitStack() as stack:
        workers = []
        for number, role in enumerate(roles):
            cache = cache_type(loaded.spec.layout(block_tokens=engine.block_tokens), num_blocks, "cpu")
            worker = await _start(
                stack,
                loaded,
                cache,
                worker_id=f"{role}-{number}",
                role=role,
                engine=engine,
                transfer=transfer,
                transport_name=transport,
                hub=hub,
                wrap_transport=wrap_transport,
            )
            ports[worker.info.worker_id] = WorkerPorts(
                prefill=worker.prefill, decode=worker.decode, worker=worker.service, connection=_Connection()
            )
            pool.joined(worker.info)
            pool.heard(worker.info.worker_id, worker.info.generation, worker.service.load())
            workers.append(worker)
        the_router = Router(config, pool=pool, clock=clock)
        beats = asyncio.create_task(_beat(pool, workers))
        try:
            yield System(the_router, workers)
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
            await the_router.close()
            await pool.close()


async def _beat(pool: WorkerPool, workers: Sequence[Worker]) -> None:
    while True:
        for worker in workers:
            pool.heard(worker.info.worker_id, worker.info.generation, worker.service.load())
        await asyncio.sleep(0.05)


async def _start(
    stack: AsyncExitStack,
    loaded: LoadedModel,
    cache: KVCache,
    *,
    worker_id: str,
    role: Role,
    engine: EngineConfig,
    transfer: TransferConfig,
    transport_name: str,
    hub: Hub,
    wrap_transport: Callable[[Transport], Transport],
) -> Worker:
    clock, spec = SystemClock(), loaded.spec
    limits = EngineLimits(
        num_blocks=cache.num_blocks,
        max_model_tokens=spec.max_model_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
    )
    loop = EngineLoop(Engine(TorchRunner(loaded, cache), config=engine, limits=limits, clock=clock), clock)
    rank = RankIdentity(worker_id=worker_id, epoch=1, secret=SECRET)
    ends = await start_ends(cache, clock, transfer, rank, names=[transport_name], hub=hub)
    stack.push_async_callback(ends.close)
    await loop.start()
    stack.push_async_callback(loop.close)
    transports = tuple(wrap_transport(transport) for transport in ends.transports)
    sender = KVSender(cache, transports, clock, transfer, worker_id=worker_id, secret=SECRET)
    prefill = PrefillService(loop, SenderGroup(sender))
    stack.push_async_callback(prefill.close)
    identity = Identity(worker_id=worker_id, epoch=1, layout=cache.layout, ranks=(ends.endpoints,))
    receiving = ReceiverGroup(ends.receiver, identity, secret=SECRET, lease_s=transfer.lease_s)
    decode = DecodeService(loop, receiving)
    await decode.start()
    stack.push_async_callback(decode.close)

    async def num_transfers() -> int:
        return prefill.num_transfers + decode.num_transfers

    service = WorkerService(
        loop,
        worker_id=worker_id,
        role=role,
        num_tickets=lambda: decode.num_tickets,
        num_transfers=num_transfers,
        counters=dict,
    )
    info = WorkerInfo(
        worker_id=worker_id,
        role=role,
        address="",
        pid=0,
        host="",
        generation=1,
        model="toy",
        fingerprint=spec.fingerprint,
        layout=cache.layout,
        num_blocks=cache.num_blocks,
        max_model_tokens=spec.max_model_tokens,
        ranks=(ends.endpoints,),
    )
    return Worker(
        info=info,
        cache=cache,
        loop=loop,
        receiver=ends.receiver,
        transports=transports,
        prefill=prefill,
        decode=decode,
        service=service,
    )


def _holds(worker: dict[str, object]) -> bool:
    blocks = worker["blocks"]
    assert isinstance(blocks, dict)
    return bool(
        blocks["owned"]
        or blocks["draining"]
        or worker["tickets"]
        or worker["transfers"]
        or worker["sequences"]
    )
