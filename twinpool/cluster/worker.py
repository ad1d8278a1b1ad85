"""One worker process, put together: model, cache, engine, transfers, services, and the stay at a router.

A worker is the same whatever its role; the role is a label that the router acts on.  Knows no Ray.

    load the model -> start the engine, the transports, the server -> join the router
      SIGTERM            take nothing new, finish what runs for at most ``drain_s``, leave, exit 0
      a second SIGTERM   exit at once
      refused            ends with the router's reason: the same settings would be refused again
      engine dead        ends with what killed it
      engine hung        after ``hung_s`` with work and without a step: exit 1, at once
      router away        keep trying; after ``orphan_s``, if set, exit 1
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from decode_service.service import DecodeService
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.registry import chosen_transports
from prefill_service.service import PrefillService
from twinpool.cluster.child import threads_of
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.trust import worker_trust
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.errors import ServingError
from twinpool.core.ports import WorkerInfo, WorkerLoad
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.core.units import parse_bytes
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.loop import EngineLoop
from twinpool.engine.memory import default_budget_bytes, num_blocks_for
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService
from twinpool.rpc.door import Door
from twinpool.rpc.join import join
from twinpool.rpc.server import WorkerServer

_LOOK_EVERY_S = 1.0  # at the engine, for whether it hangs
_STOP_GRACE_S = 0.5  # for calls that are answering when the server stops

Report = Callable[[str, str], None]
"""``(event, text)``: ``progress`` with what it does, or ``joined``."""


def run_worker(
    config: WorkerConfig, *, report: Report, watch: Callable[[Callable[[], None]], None] | None = None
) -> int:
    """Run a worker until its end and return the process's exit code.

    Args:
        config: All it needs to know.
        report: Told what it does and when the router took it.
        watch: Called once with what to call, from any thread, when whoever watches over this process is
            gone; the worker drains then.

    Raises:
        ServingError: It cannot start, the router does not take it, or its engine died of a bug.
    """
    trust = worker_trust(config)
    torch.set_num_threads(threads_of(config))
    report("progress", f"loading {config.model_name}")
    loaded = load_model(Path(config.model), device=config.device, dtype=config.dtype)
    return asyncio.run(_Life(config, trust, report, watch).run(loaded))


class _Life:
    def __init__(
        self,
        config: WorkerConfig,
        trust: Trust,
        report: Report,
        watch: Callable[[Callable[[], None]], None] | None,
    ) -> None:
        self._config = config
        self._trust = trust
        self._report = report
        self._watch = watch
        self._clock: Clock = SystemClock()
        self._asked_to_stop = asyncio.Event()
        self._has_joined = False
        self._heard_s = 0.0  # when the router last heard us, or when we began to call it

    async def run(self, loaded: LoadedModel) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if self._watch is not None:
            self._watch(partial(self._stop_from_any_thread, loop))
        async with self._running(loaded) as (info, engine, service):
            self._report("progress", f"joining {self._config.join}")
            self._heard_s = self._clock.now_s()
            joining = asyncio.create_task(
                join(self._config.join, info, lambda: self._heartbeat(service), trust=self._trust)
            )
            failing = asyncio.create_task(engine.failed())
            endings = {
                joining,
                failing,
                asyncio.create_task(self._asked_to_stop.wait()),
                asyncio.create_task(self._orphaned()),
                asyncio.create_task(self._end_if_hung(service)),
            }
            try:
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
                if joining.done():
                    joining.result()
                if failing.done():
                    raise failing.result()
                if self._asked_to_stop.is_set():
                    await service.drain(timeout_s=self._config.drain_s)
                    return 0
                return 1
            finally:
                for task in endings:
                    task.cancel()
                await asyncio.gather(*endings, return_exceptions=True)

    def _stop(self) -> None:
        if self._asked_to_stop.is_set():
            os._exit(1)
        self._asked_to_stop.set()

    def _stop_from_any_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._asked_to_stop.set)

    def _heartbeat(self, service: WorkerService) -> WorkerLoad:
        if not self._has_joined:
            self._report("joined", "")
        self._has_joined = True
        self._heard_s = self._clock.now_s()
        return service.load()

    async def _orphaned(self) -> None:
        """Return when the router was away for longer than a worker of its kind waits."""
        if self._config.orphan_s is None:
            await asyncio.Event().wait()
            return
        while True:
            left_s = self._heard_s + self._config.orphan_s - self._clock.now_s()
            if left_s <= 0:
                self._report("progress", f"no router for {self._config.orphan_s:g} s")
                return
            await asyncio.sleep(left_s)

    async def _end_if_hung(self, service: WorkerService) -> None:
        """End the process when its engine hangs: no thread can be ended, and no block be given back.

        Two looks decide, since a process that was frozen as a whole may look at the engine before it moves.
        """
        was_hung = False
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._config.hung_s / 4))
            stalled_s = service.load().stalled_s
            is_hung = stalled_s >= self._config.hung_s
            if is_hung and was_hung:
                self._report("failed", f"the engine has work and has taken no step for {stalled_s:.0f} s")
                os._exit(1)
            was_hung = is_hung

    @asynccontextmanager
    async def _running(
        self, loaded: LoadedModel
    ) -> AsyncIterator[tuple[WorkerInfo, EngineLoop, WorkerService]]:
        """Start the parts in order; stop them in the other."""
        config, spec, clock = self._config, loaded.spec, self._clock
        cache = _make_cache(loaded, config)
        limits = EngineLimits(
            num_blocks=cache.num_blocks,
            max_model_tokens=spec.max_model_tokens,
            vocab_size=spec.vocab_size,
            eos_ids=frozenset(spec.eos_ids),
        )
        engine = EngineLoop(
            Engine(TorchRunner(loaded, cache), config=config.engine, limits=limits, clock=clock), clock
        )
        async with AsyncExitStack() as stack:
            ends = await _start_ends(cache, clock, config, self._trust)
            stack.push_async_callback(ends.close)
            identity = Identity(
                worker_id=config.worker_id,
                epoch=config.generation,
                layout=cache.layout,
                ranks=(ends.endpoints,),
            )
            receiving = ReceiverGroup(
                ends.receiver, identity, secret=self._trust.secret, lease_s=config.transfer.lease_s
            )
            await engine.start()
            stack.push_async_callback(engine.close)
            prefill = PrefillService(engine, SenderGroup(ends.sender))
            decode = DecodeService(engine, receiving)
            stack.push_async_callback(prefill.close)
            await decode.start()
            stack.push_async_callback(decode.close)
            door = Door(self._trust, callers=Party.ROUTER, audience=config.worker_id)
            service = WorkerService(
                engine,
                worker_id=config.worker_id,
                role=config.role,
                num_tickets=lambda: decode.num_tickets,
                num_transfers=lambda: prefill.num_transfers + decode.num_transfers,
                counters=lambda: {**ends.counters(), "refused_calls": door.num_refused},
            )
            server = WorkerServer(
                prefill=prefill,
                decode=decode,
                worker=service,
                door=door,
                host=config.host,
                port=config.port,
            )
            await server.start()
            stack.push_async_callback(server.stop, grace_s=_STOP_GRACE_S)
            info = WorkerInfo(
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
            yield info, engine, service


def _make_cache(loaded: LoadedModel, config: WorkerConfig) -> KVCache:
    """Make the KV cache as large as told, or as large as this worker's share of the free memory allows."""
    layout = loaded.spec.layout(block_tokens=config.engine.block_tokens)
    if config.kv_memory is not None:
        budget_bytes = parse_bytes(config.kv_memory)
    elif config.device == "cpu":
        budget_bytes = default_budget_bytes(config.device) // (config.num_neighbours + 1)
    else:
        budget_bytes = int(default_budget_bytes(config.device) * config.gpu_share)
    return KVCache(layout, num_blocks_for(layout, budget_bytes), config.device)


async def _start_ends(cache: KVCache, clock: Clock, config: WorkerConfig, trust: Trust) -> TransferEnds:
    """Open every transport that the worker is to use."""
    transfer = replace(config.transfer, listen=config.transfer.listen or f"{config.host}:0")
    identity = RankIdentity(
        worker_id=config.worker_id, epoch=config.generation, secret=trust.secret, tls=trust.tls
    )
    return await start_ends(cache, clock, transfer, identity, names=chosen_transports(transfer.transports))


def describe_failure(error: BaseException) -> str | None:
    """Return why a worker cannot run, in one line, if it is a reason that people understand."""
    if isinstance(error, ServingError):
        return str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return f"out of memory: {str(error).splitlines()[0] if str(error) else 'MemoryError'}"
    return None
