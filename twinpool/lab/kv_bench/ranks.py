"""The ranks of one peer, all in its process: caches with KV, and transfers over one transport at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import xxhash

from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.group import Identity, ReceiverGroup
from kv_transfer.rank import RankTransfers
from twinpool.core.clock import Clock
from twinpool.core.layout import COMPACT, KVLayout
from twinpool.core.ports import KVRange
from twinpool.engine.kv_cache import KVCache
from twinpool.lab.kv_bench.probe import Probe


def blocks_of(probe: Probe, *, seed: int) -> tuple[int, ...]:
    """Return the blocks of the sequence in token order."""
    blocks = list(range(probe.num_blocks))
    if probe.scattered:
        random.Random(seed).shuffle(blocks)
    return tuple(blocks)


def make_caches(probe: Probe, layout: KVLayout) -> list[KVCache]:
    """Return the cache of each rank, without KV."""
    return [KVCache(layout, probe.num_blocks, probe.device, rank=rank) for rank in range(layout.tp_size)]


def fill(caches: Sequence[KVCache], *, seed: int) -> None:
    """Put numbers like those of a model into every slot; each head has the same ones on all its ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randn(1_000_003, generator=generator)  # a prime, so no two blocks hold the same
    for cache in caches:
        for layer in range(cache.layout.num_layers):
            for side, slots_SKD in enumerate(cache.slots(layer)):
                for index, head in enumerate(cache.heads):
                    shift = 7919 * (2 * (layer * cache.layout.num_kv_heads + head) + side)
                    values_SD = slots_SKD[:, index]
                    numbers = torch.arange(shift, shift + values_SD.numel()) % len(pattern)
                    values_SD.copy_(pattern[numbers].view(values_SD.shape))


def clear(caches: Sequence[KVCache]) -> None:
    """Set every slot to zero."""
    for cache in caches:
        for layer in range(cache.layout.num_layers):
            for slots_SKD in cache.slots(layer):
                slots_SKD.zero_()


def digests(caches: Sequence[KVCache], blocks: Sequence[int], num_tokens: int) -> list[list[str]]:
    """Return the digest of the sequence's KV for each rank and each of its heads."""
    return [[_digest(cache, blocks, num_tokens, head) for head in cache.heads] for cache in caches]


def as_received(probe: Probe, caches: Sequence[KVCache], blocks: Sequence[int]) -> list[KVCache]:
    """Return caches of the same ranks as a transfer leaves them: what is compact on the way is rounded."""
    if not probe.compact:
        return list(caches)
    rounded = make_caches(probe, caches[0].layout)
    for source, target in zip(caches, rounded, strict=True):
        for layer in range(probe.layout.num_layers):
            part = _part(layer, blocks, probe.num_tokens, source.heads)
            target.write(source.payload(part, wire=COMPACT), part, wire=COMPACT)
    return rounded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenRanks:
    """The ranks while their transports are open."""

    ends: Sequence[TransferEnds]  # of each rank
    stack: AsyncExitStack

    @property
    def others(self) -> list[RankTransfers]:
        """All ranks but the first, as the first one drives them."""
        return [RankTransfers(ends.sender, ends.receiver) for ends in self.ends[1:]]

    async def close(self) -> None:
        await self.stack.aclose()


async def open_ranks(
    caches: Sequence[KVCache], clock: Clock, config: TransferConfig, identity: RankIdentity, *, transport: str
) -> OpenRanks:
    """Open one transport on every rank, and watch the leases of what is received.

    Raises:
        ConfigError: It cannot listen.
    """
    async with AsyncExitStack() as stack:
        ends = []
        for rank, cache in enumerate(caches):
            end = await start_ends(cache, clock, config, replace(identity, rank=rank), names=[transport])
            stack.push_async_callback(end.close)
            watching = asyncio.create_task(end.receiver.run())
            stack.push_async_callback(_stop, watching)
            ends.append(end)
        return OpenRanks(ends=ends, stack=stack.pop_all())


def receiving(ranks: OpenRanks, layout: KVLayout, identity: RankIdentity, *, lease_s: float) -> ReceiverGroup:
    """Return what gives tickets for transfers to these ranks."""
    own = Identity(
        worker_id=identity.worker_id,
        epoch=identity.epoch,
        layout=layout,
        ranks=tuple(ends.endpoints for ends in ranks.ends),
    )
    return ReceiverGroup(
        ranks.ends[0].receiver, own, secret=identity.secret, lease_s=lease_s, others=ranks.others
    )


def _digest(cache: KVCache, blocks: Sequence[int], num_tokens: int, head: int) -> str:
    hasher = xxhash.xxh3_128()
    for layer in range(cache.layout.num_layers):
        part = _part(layer, blocks, num_tokens, range(head, head + 1))
        for view in cache.payload(part, wire=cache.layout.dtype).views():
            hasher.update(view)
    return str(hasher.hexdigest())


def _part(layer: int, blocks: Sequence[int], num_tokens: int, heads: range) -> KVRange:
    return KVRange(layer=layer, blocks=blocks, first_token=0, num_tokens=num_tokens, heads=heads)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
