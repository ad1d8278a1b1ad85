"""The transfers of one rank of a worker, as its rank 0 drives them.

Rank 0 speaks with the router and decides; each rank moves its own heads.  A transfer of a worker is over when
it is over on every rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from kv_transfer.outgoing import OutgoingPart
from kv_transfer.receiver import Expected, KVReceiver
from kv_transfer.sender import KVSender
from twinpool.core.errors import TransferRefused
from twinpool.core.ticket import KVTicket, TransferReport


class RankPort(Protocol):
    """One other rank of this worker.  All calls raise WorkerLost if it is gone."""

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        """Open a transfer into the rank's own blocks."""
        ...

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        """Return when the rank has everything; raise the TransferError that ended it otherwise."""
        ...

    async def cancel(self, transfer_id: str) -> TransferReport:
        """End a transfer; the rank writes nothing for it after the return.  Idempotent."""
        ...

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        """Begin to send what the rank has to send to the ticket's holder, as it is computed."""
        ...

    async def sent(self, transfer_id: str) -> None:
        """Return when the rank's KV was confirmed; raise the TransferError that ended it otherwise."""
        ...

    async def abort(self, transfer_id: str) -> None:
        """Give up sending; the rank's blocks are not read any more after the return.  Idempotent."""
        ...


class RankTransfers:
    """The RankPort of the rank that lives in this process.

    Args:
        sender: Of this rank.
        receiver: Of this rank; rank 0 watches the leases of what is whole.
    """

    def __init__(self, sender: KVSender, receiver: KVReceiver) -> None:
        self._sender = sender
        self._receiver = receiver
        self._parts: dict[str, tuple[OutgoingPart, ...]] = {}  # by transfer id, until sent or aborted
        self._requests: dict[str, str] = {}  # transfer ids by request id

    @property
    def num_open(self) -> int:
        """Transfers that are not over, in both directions."""
        return len(self._parts) + self._receiver.num_open

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        assert epoch == self._receiver.epoch, "all ranks of a worker live one life"
        self._receiver.expect(expected)
        self._receiver.resumed(expected.transfer_id)

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        await self._receiver.wait(transfer_id, epoch)

    async def cancel(self, transfer_id: str) -> TransferReport:
        return self._receiver.cancel(transfer_id)

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        self._parts[ticket.transfer_id] = self._sender.begin(ticket, timeout_s=timeout_s)
        self._requests[ticket.request_id] = ticket.transfer_id

    def written(self, request_id: str, layer: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """Say that tokens ``[0, num_tokens)`` of a request are in the cache in ``layer``."""
        transfer_id = self._requests.get(request_id)
        for part in self._parts.get(transfer_id, ()) if transfer_id is not None else ():
            part.written(layer, num_tokens, blocks)

    async def sent(self, transfer_id: str) -> None:
        parts = self._parts.get(transfer_id)
        if parts is None:
            raise TransferRefused(f"transfer {transfer_id} was not begun here, or is over")
        try:
            await wait_for_all(parts)
        finally:
            await self.abort(transfer_id)

    async def abort(self, transfer_id: str) -> None:
        for part in self._parts.get(transfer_id, ()):
            await part.abort()
        self._parts.pop(transfer_id, None)
        for request_id in [name for name, value in self._requests.items() if value == transfer_id]:
            del self._requests[request_id]


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
