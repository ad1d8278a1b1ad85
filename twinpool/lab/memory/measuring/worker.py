"""The process of a measured worker: the parts of a real one, and somebody who looks at its memory.

    in   the settings               out   {"address": ..., "worker_id": ...}
    in   {"do": "trace"}            out   {}                 every step is traced from now on
    in   {"do": "tell"}             out   the measurement
    in   the end of the input             it ends

One JSON object per line.  What goes wrong is said as {"error": ...}, and it ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_service.service import DecodeService
from kv_transfer.ends import RankIdentity, start_ends
from kv_transfer.group import Identity, ReceiverGroup, SenderGroup
from kv_transfer.registry import chosen_transports
from prefill_service.service import PrefillService
from twinpool.core.clock import SystemClock
from twinpool.core.config import bind, unbind
from twinpool.core.errors import ConfigError, ServingError
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.load import LoadedModel, load_model
from twinpool.engine.loop import EngineLoop
from twinpool.engine.memory import num_blocks_for
from twinpool.engine.runner import TorchRunner
from twinpool.engine.worker import WorkerService
from twinpool.lab.memory.measuring import process_memory
from twinpool.lab.memory.measuring.settings import MeasuredWorker, Measurement
from twinpool.lab.memory.measuring.tracing import TracingRunner
from twinpool.rpc.door import Door
from twinpool.rpc.server import WorkerServer

_GRACE_S = 0.5  # for calls that are answering when the server stops


async def _main() -> int:
    lines = _lines()
    try:
        settings = bind(MeasuredWorker, json.loads(await anext(lines)))
        await _serve(settings, lines)
    except ServingError as error:
        _say({"error": str(error)})
        return 1
    return 0


async def _serve(settings: MeasuredWorker, lines: AsyncIterator[str]) -> None:
    torch.set_num_threads(settings.threads)
    loaded = load_model(Path(settings.folder), device=settings.device, dtype=settings.dtype)
    layout = loaded.spec.layout(block_tokens=settings.engine.block_tokens)
    cache = KVCache(layout, num_blocks_for(layout, settings.cache_bytes), settings.device)
    cache_bytes = _fill(cache)
    gc.freeze()  # as a worker process does
    runner = TracingRunner(TorchRunner(loaded, cache))
    async with AsyncExitStack() as stack:
        engine = _engine(settings, loaded, cache, runner)
        _say({"address": await _start(settings, engine, cache, stack), "worker_id": str(settings.role)})
        async for line in lines:
            match json.loads(line):
                case {"do": "trace"}:
                    runner.start()
                    _say({})
                case {"do": "tell"}:
                    measured = Measurement(
                        weight_bytes=_num_bytes(vars(loaded.model).values()),
                        cache_bytes=cache_bytes,
                        activation_bytes=runner.peak_bytes,
                        shared_bytes=process_memory.shared_bytes(),
                        peak_bytes=_peak_bytes(),
                    )
                    _say(unbind(measured))
                case other:
                    raise ConfigError("do", f"{other!r} is none of trace, tell")


def _engine(
    settings: MeasuredWorker, loaded: LoadedModel, cache: KVCache, runner: TracingRunner
) -> EngineLoop:
    clock, spec = SystemClock(), loaded.spec
    limits = EngineLimits(
        num_blocks=cache.num_blocks,
        max_model_tokens=spec.max_model_tokens,
        vocab_size=spec.vocab_size,
        eos_ids=frozenset(spec.eos_ids),
    )
    return EngineLoop(Engine(runner, config=settings.engine, limits=limits, clock=clock), clock)


async def _start(settings: MeasuredWorker, loop: EngineLoop, cache: KVCache, stack: AsyncExitStack) -> str:
    """Start what a worker process starts, in its order, and return where it is called."""
    clock, worker_id = SystemClock(), str(settings.role)
    trust = Trust(party=Party.WORKER, secret=Secret(bytes.fromhex(settings.secret)))
    transfer = replace(settings.transfer, listen=settings.transfer.listen or "127.0.0.1:0")
    me = RankIdentity(worker_id=worker_id, epoch=1, secret=trust.secret)
    ends = await start_ends(cache, clock, transfer, me, names=chosen_transports(transfer.transports))
    stack.push_async_callback(ends.close)
    identity = Identity(worker_id=worker_id, epoch=1, layout=cache.layout, ranks=(ends.endpoints,))
    receiving = ReceiverGroup(ends.receiver, identity, secret=trust.secret, lease_s=transfer.lease_s)
    await loop.start()
    stack.push_async_callback(loop.close)
    prefill, decode = PrefillService(loop, SenderGroup(ends.sender)), DecodeService(loop, receiving)
    stack.push_async_callback(prefill.close)
    await decode.start()
    stack.push_async_callback(decode.close)

    async def num_transfers() -> int:
        return prefill.num_transfers + decode.num_transfers

    worker = WorkerService(
        loop,
        worker_id=worker_id,
        role=settings.role,
        num_tickets=lambda: decode.num_tickets,
        num_transfers=num_transfers,
        counters=dict,
    )
    door = Door(trust, callers=Party.ROUTER, audience=worker_id)
    server = WorkerServer(prefill=prefill, decode=decode, worker=worker, door=door)
    await server.start()
    stack.push_async_callback(server.stop, grace_s=_GRACE_S)
    return server.address


def _fill(cache: KVCache) -> int:
    """Write every slot, as when every block has been used, and return the bytes of all of them."""
    total = 0
    for layer in range(cache.layout.num_layers):
        for slots in cache.slots(layer):
            slots.zero_()
            total += slots.nbytes
    return total


def _num_bytes(parts: Iterable[Any]) -> int:
    """Return the bytes of all tensors in dataclasses and lists; one that has two names counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for part in parts for tensor in _tensors(part)}.values())


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [tensor for field in fields(value) for tensor in _tensors(getattr(value, field.name))]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list) else []


def _peak_bytes() -> int:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_reserved()
    return process_memory.peak_resident_bytes()


async def _lines() -> AsyncIterator[str]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode()


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
