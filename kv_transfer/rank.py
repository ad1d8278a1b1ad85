"""The transfers of one rank of a worker, as its rank 0 drives them.

Rank 0 speaks with the router and decides; each rank moves its own heads.  A transfer of a worker is over when
it is over on every rank.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kv_transfer.outgoing import OutgoingPart
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from twinpool.core.errors import TransferRefused
from twinpool.core.rank_port import Expected, RankState
from twinpool.core.ticket import KVTicket, TransferReport

_REMEMBERED_ENDS = 4096


class RankTransfers:
    """The RankPort of the rank that lives in this process.

    Args:
        sender: Of this rank.
        receiver: Of this rank; whoever starts this runs it.  Rank 0 watches the leases of what is whole.
        counters: Tells the rank's totals by name.
        asked_to_stop: Tells whether somebody wants this rank to end.
    """

    def __init__(
        self,
        sender: KVSender,
        receiver: KVReceiver,
        *,
        counters: Callable[[], Mapping[str, int]] = dict,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sender = sender
        self._receiver = receiver
        self._counters = counters
        self._asked_to_stop = asked_to_stop
        self._outgoing: dict[str, _Outgoing] = {}  # by transfer id, until sent or aborted
        self._transfer_ids: dict[str, str] = {}  # of what is sent, by request id
        # Calls may overtake each other: what has been ended is not begun afterwards.
        self._over: OrderedDict[str, None] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Transfers that are not over: not sent, or not whole."""
        return len(self._outgoing) + self._receiver.num_incomplete

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        self._check_not_over(expected.transfer_id)
        if epoch != self._receiver.epoch:
            raise TransferRefused(f"epoch {epoch} is over, this is {self._receiver.epoch}")
        self._receiver.expect(expected)
        self._receiver.resumed(expected.transfer_id)

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        await self._receiver.wait(transfer_id, epoch)

    async def cancel(self, transfer_id: str) -> TransferReport:
        self._note_over(transfer_id)
        return self._receiver.cancel(transfer_id)

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        self._check_not_over(ticket.transfer_id)
        parts = self._sender.begin(ticket, timeout_s=timeout_s)
        self._outgoing[ticket.transfer_id] = _Outgoing(ticket.request_id, parts)
        self._transfer_ids[ticket.request_id] = ticket.transfer_id

    def written(self, request_id: str, layer: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """Say that tokens ``[0, num_tokens)`` of a request are in the cache in ``layer``."""
        outgoing = self._outgoing.get(self._transfer_ids.get(request_id, ""))
        if outgoing is not None:
            for part in outgoing.parts:
                part.written(layer, num_tokens, blocks)

    async def sent(self, transfer_id: str) -> None:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            raise TransferRefused(f"transfer {transfer_id} was not begun here, or is over")
        try:
            await wait_for_all(outgoing.parts)
        finally:
            await self.abort(transfer_id)

    async def abort(self, transfer_id: str) -> None:
        self._note_over(transfer_id)
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return
        await asyncio.gather(*(part.abort() for part in outgoing.parts))
        self._outgoing.pop(transfer_id, None)
        if self._transfer_ids.get(outgoing.request_id) == transfer_id:
            del self._transfer_ids[outgoing.request_id]

    async def state(self) -> RankState:
        return RankState(
            num_transfers=self.num_open, asked_to_stop=self._asked_to_stop(), counters=self._counters()
        )

    def _check_not_over(self, transfer_id: str) -> None:
        if transfer_id in self._over:
            raise TransferRefused(f"transfer {transfer_id} is over")

    def _note_over(self, transfer_id: str) -> None:
        self._over[transfer_id] = None
        if len(self._over) > _REMEMBERED_ENDS:
            self._over.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Outgoing:
    request_id: str
    parts: tuple[OutgoingPart, ...]


async def wait_for_all(parts: Sequence[OutgoingPart]) -> None:
    """Return when all parts are confirmed; raise what ended the first that was not.

    Raises:
        TransferError: That; the other parts go on.
    """
    waiting = [asyncio.ensure_future(part.wait()) for part in parts]
    try:
        for finished in asyncio.as_completed(waiting):
            await finished
    finally:
        for wait in waiting:
            wait.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
