"""Workers of several ranks in one process, as transfers see them: every rank has a store and both ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_transfer.config import TransferConfig
from kv_transfer.ends import RankIdentity, TransferEnds, start_ends
from kv_transfer.group import Identity, OutgoingTransfer, ReceiverGroup, SenderGroup
from kv_transfer.hub import Hub
from kv_transfer.rank import RankTransfers
from tests.kv_transfer.workers import SECRET, SENDER_ID
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.layout import KVLayout
from twinpool.core.ports import KVStore
from twinpool.core.rank_port import RankPort
from twinpool.core.ticket import KVTicket

Store = TypeVar("Store", bound=KVStore)
PortOf = Callable[[int, RankTransfers], RankPort]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankedWorker(Generic[Store]):
    """One worker and its ranks."""

    stores: tuple[Store, ...]
    ends: tuple[TransferEnds, ...]
    others: tuple[RankTransfers, ...]  # of ranks 1 and on
    sending: SenderGroup
    receiving: ReceiverGroup

    async def expect(
        self, *, blocks: Sequence[int], num_tokens: int, cached_tokens: int = 0, timeout_s: float = 1e6
    ) -> KVTicket:
        return await self.receiving.expect(
            request_id="r0",
            sender_id=SENDER_ID,
            blocks=blocks,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            timeout_s=timeout_s,
        )

    def written(
        self,
        transfer: OutgoingTransfer,
        num_tokens: int,
        blocks: Sequence[int],
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Say that ``ranks``, or all, have computed the first tokens of request r0 in every layer."""
        for rank in range(len(self.stores)) if ranks is None else ranks:
            for layer in range(self.stores[0].layout.num_layers):
                if rank == 0:
                    transfer.written(layer, num_tokens, blocks)
                else:
                    self.others[rank - 1].written("r0", layer, num_tokens, blocks)

    @property
    def is_idle(self) -> bool:
        """Whether no rank holds anything of any transfer."""
        return self.sending.num_open == 0 and not any(
            (*(ends.sender.num_open + ends.receiver.num_open for ends in self.ends), *self._num_open)
        )

    @property
    def _num_open(self) -> tuple[int, ...]:
        return tuple(rank.num_open for rank in self.others)

    def counters(self) -> Mapping[str, int]:
        """Return the totals over all ranks."""
        totals: dict[str, int] = {}
        for ends in self.ends:
            for name, value in ends.counters().items():
                totals[name] = totals.get(name, 0) + value
        return totals

    async def close(self) -> None:
        await self.sending.close()
        for ends in self.ends:
            await ends.close()


@asynccontextmanager
async def ranked_worker(
    layout: KVLayout,
    config: TransferConfig,
    *,
    hub: Hub,
    make_store: Callable[[KVLayout, int], Store],
    worker_id: str,
    epoch: int = 1,
    clock: Clock | None = None,
    port_of: PortOf = lambda rank, transfers: transfers,
) -> AsyncIterator[RankedWorker[Store]]:
    """Start every rank of a worker over loopback.

    Args:
        layout: Of the worker; tells how many ranks it has.
        config: Of all ranks.
        hub: Where its peers are.
        make_store: Makes the store of a rank.
        worker_id: Of the worker.
        epoch: Of its life.
        clock: Of all ranks.
        port_of: Gives rank 0 what it drives another rank by.
    """
    clock = SystemClock() if clock is None else clock
    stores, ends = [], []
    for rank in range(layout.tp_size):
        store = make_store(layout, rank)
        identity = RankIdentity(worker_id=worker_id, epoch=epoch, secret=SECRET, rank=rank)
        stores.append(store)
        ends.append(await start_ends(store, clock, config, identity, names=["loopback"], hub=hub))
    others = tuple(RankTransfers(each.sender, each.receiver) for each in ends[1:])
    ports = [port_of(rank, transfers) for rank, transfers in enumerate(others, start=1)]
    identity_of_all = Identity(
        worker_id=worker_id, epoch=epoch, layout=layout, ranks=tuple(each.endpoints for each in ends)
    )
    worker = RankedWorker(
        stores=tuple(stores),
        ends=tuple(ends),
        others=others,
        sending=SenderGroup(ends[0].sender, ports),
        receiving=ReceiverGroup(
            ends[0].receiver, identity_of_all, secret=SECRET, lease_s=config.lease_s, others=ports
        ),
    )
    try:
        yield worker
    finally:
        await worker.close()
