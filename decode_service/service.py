"""Holds KV and generates tokens: an engine and the receiving end of transfers, made one port.

    reserve -> reserved --(resume, KV whole)--> decoding -> over
                  |                                |
                  `- release, or lease over        `- release, failure, or the consumer leaves

Who may touch the blocks of a reservation: the receiver writes them until ``cancel`` has returned or
``on_expired`` was called, the engine from ``arrived`` on.  So however a reservation ends, the receiver is
ended before the engine is told that the blocks are drained; that order stands in ``_end`` and ``_expire``
alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from kv_transfer.group import ReceiverGroup
from twinpool.core.errors import ServingError, TransferRefused
from twinpool.core.request import Request, TokenOutput
from twinpool.core.tasks import OwnedTasks
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.engine.loop import EngineLoop, SequenceHandle


class DecodeService:
    """The DecodePort of a worker; alone, it is the colocated worker.

    Args:
        loop: Runs the sequences; started and closed by the caller.
        receiver: Takes KV in; this service sweeps its leases and is told when one is over.
    """

    def __init__(self, loop: EngineLoop, receiver: ReceiverGroup) -> None:
        self._loop = loop
        self._receiver = receiver
        self._receiver.call_on_expiry(self._expire)
        self._reservations: dict[str, _Reservation] = {}  # by transfer id, until they are over
        self._sweeping = OwnedTasks()
        self._cleaning = OwnedTasks()

    @property
    def num_tickets(self) -> int:
        """Reservations that are neither resumed nor released nor expired."""
        return sum(not reservation.is_resumed for reservation in self._reservations.values())

    @property
    def num_transfers(self) -> int:
        """Reservations whose KV is not whole yet."""
        return sum(not self._receiver.is_whole(name) for name in self._reservations)

    async def start(self) -> None:
        """Watch the leases from now on."""
        self._sweeping.start(self._receiver.run())

    async def close(self) -> None:
        """End every reservation and wait until the engine has been told."""
        await self._sweeping.close()
        for transfer_id, reservation in tuple(self._reservations.items()):
            await self._end(transfer_id, reservation)
        await self._cleaning.wait()

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        handle = await self._loop.reserve(request)
        try:
            ticket = await self._receiver.expect(
                request_id=request.request_id,
                sender_id=sender_id,
                blocks=handle.blocks,
                num_tokens=request.num_tokens,
                cached_tokens=handle.cached_tokens,
                timeout_s=request.timeout_s,
            )
        except BaseException:  # no rank expects it any more
            await self._cleaning.finish(self._give_back(handle))
            raise
        self._reservations[ticket.transfer_id] = _Reservation(ticket, handle)
        return ticket

    async def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        transfer_id = ticket.transfer_id
        reservation = self._claim(ticket)
        is_answered = False
        try:
            self._receiver.resumed(transfer_id)
            await self._receiver.wait(transfer_id, ticket.epoch)
            await self._loop.arrived(reservation.handle, first)
            async with aclosing(reservation.handle.outputs()) as outputs:
                async for output in outputs:
                    is_answered = output.finish is not None
                    yield output
        finally:
            if is_answered:  # the engine has its blocks back already
                self._reservations.pop(transfer_id, None)
                await self._cleaning.finish(self._receiver.cancel(transfer_id))
            else:
                await self._cleaning.finish(self._end(transfer_id, reservation))

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        handle = await self._loop.submit(request)
        async with aclosing(handle.outputs()) as outputs:
            async for output in outputs:
                yield output

    async def release(self, ticket: KVTicket) -> TransferReport:
        """As the port says; a stream that still runs on the ticket ends with RequestCancelled."""
        reservation = self._find(ticket)
        if reservation is not None:
            await self._cleaning.finish(self._end(ticket.transfer_id, reservation))
        return self._receiver.report(ticket.transfer_id)

    def _claim(self, ticket: KVTicket) -> _Reservation:
        """Return the reservation of a ticket, for the one resume that a ticket gives right to."""
        reservation = self._find(ticket)
        if reservation is None:
            raise TransferRefused(f"transfer {ticket.transfer_id} is not expected here, or is over")
        if reservation.is_resumed:
            raise TransferRefused(f"transfer {ticket.transfer_id} is resumed already")
        reservation.is_resumed = True
        return reservation

    def _find(self, ticket: KVTicket) -> _Reservation | None:
        """Return a ticket's reservation; None if it is over or of another life of the worker."""
        reservation = self._reservations.get(ticket.transfer_id)
        return reservation if reservation is not None and reservation.ticket.epoch == ticket.epoch else None

    async def _end(self, transfer_id: str, reservation: _Reservation) -> None:
        """End a reservation in any phase.  Idempotent."""
        self._reservations.pop(transfer_id, None)
        await self._receiver.cancel(transfer_id)
        await self._give_back(reservation.handle)

    async def _give_back(self, handle: SequenceHandle) -> None:
        with suppress(ServingError):  # the engine is closed, and its blocks are gone with it
            await self._loop.abort(handle)
            await self._loop.drained(handle)

    def _expire(self, transfer_id: str) -> None:
        """Take the room of a ticket back whose lease is over; the receiver writes no more."""
        reservation = self._reservations.pop(transfer_id, None)
        if reservation is not None:
            self._cleaning.start(self._end(transfer_id, reservation))


@dataclass(slots=True, eq=False)
class _Reservation:
    ticket: KVTicket
    handle: SequenceHandle
    is_resumed: bool = False
