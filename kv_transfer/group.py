"""Transfers of a whole worker: what the services see, whatever the number of its ranks.

Rank 0 lives in this process; the others are RankPorts.  A transfer begins on all ranks or on none, and what
ends it on one rank ends it on all.  With one rank nothing here waits for anybody else.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kv_transfer.outgoing import OutgoingPart
from kv_transfer.rank import wait_for_all
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from twinpool.core.errors import TransferError, TransferRefused, WorkerLost
from twinpool.core.layout import KVLayout
from twinpool.core.rank_port import Expected, RankPort
from twinpool.core.secret import Secret
from twinpool.core.tasks import OwnedTasks
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport

_REMEMBERED_REPORTS = 4096

T = TypeVar("T")


class SenderGroup:
    """Sends from all ranks of this worker.

    Args:
        sender: Of rank 0.
        others: The other ranks, in order.
    """

    def __init__(self, sender: KVSender, others: Sequence[RankPort] = ()) -> None:
        self._sender = sender
        self._others = tuple(others)
        self._open: set[OutgoingTransfer] = set()
        self._num_beginning = 0
        self._cleaning = OwnedTasks()

    @property
    def num_open(self) -> int:
        """Transfers that are not over."""
        return len(self._open) + self._num_beginning

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> OutgoingTransfer:
        """Begin to send to the holder of ``ticket``, on every rank or on none.

        Raises:
            TransferError: As ``KVSender.begin``, of any rank.
            WorkerLost: A rank is gone.
        """
        parts = self._sender.begin(ticket, timeout_s=timeout_s)
        self._num_beginning += 1
        try:
            await _all(rank.begin(ticket, timeout_s=timeout_s) for rank in self._others)
        except BaseException:
            await self._cleaning.finish(_stop_sending(ticket.transfer_id, parts, self._others))
            raise
        finally:
            self._num_beginning -= 1
        transfer = OutgoingTransfer(ticket.transfer_id, parts, self._others, on_end=self._open.discard)
        self._open.add(transfer)
        return transfer

    async def close(self) -> None:
        """Abort every open transfer."""
        await asyncio.gather(*(transfer.abort() for transfer in self._open), return_exceptions=True)
        await self._cleaning.wait()


class OutgoingTransfer:
    """One transfer that is being sent by all ranks; only ``SenderGroup`` makes one."""

    def __init__(
        self,
        transfer_id: str,
        parts: Sequence[OutgoingPart],
        others: Sequence[RankPort],
        *,
        on_end: Callable[[OutgoingTransfer], None],
    ) -> None:
        self._transfer_id = transfer_id
        self._parts = parts
        self._others = others
        self._given_up = asyncio.Event()
        self._sending = asyncio.create_task(self._send(), name=f"transfer {transfer_id}")
        self._sending.add_done_callback(_read_error)
        self._sending.add_done_callback(lambda task: on_end(self))

    def written(self, layer: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """Say that tokens ``[0, num_tokens)`` of ``layer`` are in the cache of rank 0.

        Args:
            layer: Index from 0.
            num_tokens: Never goes down; tokens beyond the ticket's are not sent.
            blocks: The blocks of the sequence in token order, as far as it has any.
        """
        for part in self._parts:
            part.written(layer, num_tokens, blocks)

    async def wait(self) -> None:
        """Return when every receiving rank confirmed that it has everything.

        No cache is read any more after it returned or raised a TransferError; a cancelled call leaves the
        transfer running.

        Raises:
            TransferError: What a receiver or the way to it objected to, or that ``abort`` was called.
            WorkerLost: A rank is gone.  It may still read: this worker is over, and its blocks with it.
        """
        await asyncio.wait({self._sending})
        if self._sending.cancelled():
            raise TransferError("this worker gave the transfer up")
        self._sending.result()

    async def abort(self) -> None:
        """Give up; no cache is read any more after the return.  Idempotent.

        Raises:
            WorkerLost: As ``wait``.
        """
        self._given_up.set()
        await asyncio.wait({self._sending})
        if not self._sending.cancelled() and isinstance(error := self._sending.exception(), WorkerLost):
            raise error

    async def _send(self) -> None:
        sending = asyncio.ensure_future(
            _all((wait_for_all(self._parts), *(rank.sent(self._transfer_id) for rank in self._others)))
        )
        giving_up = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({sending, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise TransferError("this worker gave the transfer up")
            sending.result()
        except BaseException:
            await _stop_sending(self._transfer_id, self._parts, self._others)
            raise
        finally:
            sending.cancel()
            giving_up.cancel()
            await asyncio.gather(sending, giving_up, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a worker's tickets say of it."""

    worker_id: str
    epoch: int  # of this life of the worker
    layout: KVLayout
    ranks: tuple[tuple[Endpoint, ...], ...]  # where each rank is reached, best first


class ReceiverGroup:
    """Receives on all ranks of this worker.

    Args:
        receiver: Of rank 0.
        identity: Goes into tickets.
        secret: Signs them.
        lease_s: Goes into tickets; the receivers keep it.
        others: The other ranks, in order.
        unix_s: The wall clock.
    """

    def __init__(
        self,
        receiver: KVReceiver,
        identity: Identity,
        *,
        secret: Secret,
        lease_s: float,
        others: Sequence[RankPort] = (),
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._receiver = receiver
        self._identity = identity
        self._secret = secret
        self._lease_s = lease_s
        self._others = tuple(others)
        self._unix_s = unix_s
        self._arriving: dict[str, asyncio.Future[list[None]]] = {}  # on the other ranks, by transfer id
        self._reports: OrderedDict[str, TransferReport] = OrderedDict()  # of what is over, over all ranks
        self._cleaning = OwnedTasks()

    def call_on_expiry(self, call: Callable[[str], None]) -> None:
        """Let the lender of the blocks know, once with the transfer id, when rank 0's lease has run out.

        It calls ``cancel`` then, and takes its blocks back after it.
        """
        self._receiver.on_expired = call

    async def expect(
        self,
        *,
        request_id: str,
        sender_id: str,
        blocks: Sequence[int],
        num_tokens: int,
        cached_tokens: int = 0,
        timeout_s: float,
    ) -> KVTicket:
        """Open a transfer of tokens ``[cached_tokens, num_tokens)`` into ``blocks``, on all ranks or on none.

        Args:
            request_id: Goes into the ticket.
            sender_id: The only worker that may send.
            blocks: The blocks of the sequence in token order, those of the cached tokens included.
            num_tokens: Tokens whose KV must be there before ``wait`` returns.
            cached_tokens: The first tokens, already there; never written.
            timeout_s: The request's own time; the transfer is over then, whatever its progress.

        Raises:
            WorkerLost: A rank is gone.
        """
        identity = self._identity
        ticket = KVTicket(
            transfer_id=secrets.token_hex(16),
            epoch=identity.epoch,
            request_id=request_id,
            worker_id=identity.worker_id,
            sender_id=sender_id,
            ranks=identity.ranks,
            layout=identity.layout,
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            lease_s=self._lease_s,
            expires_unix_s=self._unix_s() + timeout_s,
        ).signed(self._secret)
        expected = Expected(
            transfer_id=ticket.transfer_id,
            sender_id=sender_id,
            key=ticket.signature,
            blocks=tuple(blocks),
            num_tokens=num_tokens,
            cached_tokens=cached_tokens,
            timeout_s=timeout_s,
        )
        self._receiver.expect(expected)
        if self._others:
            try:
                await _all(rank.expect(expected, epoch=identity.epoch) for rank in self._others)
            except BaseException:
                await self._cleaning.finish(self.cancel(ticket.transfer_id))
                raise
            arriving = asyncio.ensure_future(
                _all(rank.received(ticket.transfer_id, epoch=identity.epoch) for rank in self._others)
            )
            arriving.add_done_callback(_read_error)
            self._arriving[ticket.transfer_id] = arriving
        return ticket

    async def wait(self, transfer_id: str, epoch: int) -> None:
        """Return when all KV is whole on all ranks; ends at the latest with the lease.

        Raises:
            TransferTimeout: The lease or the request's time ran out.
            TransferRefused: It was cancelled, is unknown, or is of another life of this worker.
            TransferError: Its sender failed.
            WorkerLost: A rank is gone.
        """
        arriving = self._arriving.get(transfer_id)
        if arriving is None:
            await self._receiver.wait(transfer_id, epoch)
        else:
            await _all((self._receiver.wait(transfer_id, epoch), _ended(arriving)))

    def is_whole(self, transfer_id: str) -> bool:
        """Return whether everything of a transfer has arrived, on all ranks."""
        arriving = self._arriving.get(transfer_id)
        is_there = arriving is None or (
            arriving.done() and not arriving.cancelled() and not arriving.exception()
        )
        return is_there and self._receiver.report(transfer_id).complete_s is not None

    def resumed(self, transfer_id: str) -> None:
        """Note that the tokens were asked for; a whole transfer has no lease from then on."""
        self._receiver.resumed(transfer_id)

    def report(self, transfer_id: str) -> TransferReport:
        """Return what is known of a transfer, over all ranks once it is over; empty if unknown."""
        return self._reports.get(transfer_id) or self._receiver.report(transfer_id)

    async def cancel(self, transfer_id: str) -> TransferReport:
        """End a transfer, whole or not; nothing is written for it on any rank after the return.

        Who waits for it gets TransferRefused, and so does its sender.  Idempotent; an unknown transfer
        gives an empty report.

        Raises:
            WorkerLost: A rank is gone.  It may still write: this worker is over, and its blocks with it.
        """
        report = self._receiver.cancel(transfer_id)
        if not self._others or transfer_id in self._reports:
            return self.report(transfer_id)
        try:
            others = await _each(rank.cancel(transfer_id) for rank in self._others)
        finally:
            arriving = self._arriving.pop(transfer_id, None)
            if arriving is not None:
                arriving.cancel()
                await asyncio.gather(arriving, return_exceptions=True)
        self._reports[transfer_id] = _merged(report, others)
        if len(self._reports) > _REMEMBERED_REPORTS:
            self._reports.popitem(last=False)
        return self._reports[transfer_id]

    async def run(self) -> None:
        """Watch the leases of rank 0 for ever; the others watch their own."""
        await self._receiver.run()


def _merged(first: TransferReport, others: Iterable[TransferReport]) -> TransferReport:
    """Return the report of a worker; what is not known of a rank is not known of the worker."""
    reports = (first, *others)
    starts = [report.first_frame_s for report in reports if report.first_frame_s is not None]
    ends = [report.complete_s for report in reports if report.complete_s is not None]
    names = {name for report in reports for name in report.transport.split("+") if name}
    return replace(
        first,
        kv_bytes=sum(report.kv_bytes for report in reports),
        num_frames=sum(report.num_frames for report in reports),
        first_frame_s=min(starts, default=None),
        complete_s=max(ends) if len(ends) == len(reports) else None,
        transport="+".join(sorted(names)),
    )


async def _stop_sending(transfer_id: str, parts: Sequence[OutgoingPart], others: Sequence[RankPort]) -> None:
    """Return when no rank reads for a transfer any more.

    Raises:
        WorkerLost: A rank does not say so.
    """
    await _each((*(part.abort() for part in parts), *(rank.abort(transfer_id) for rank in others)))


async def _ended(arriving: asyncio.Future[list[None]]) -> None:
    """Return what a wait for other ranks returned, or raise what it raised; leaves it alone if cancelled."""
    await asyncio.wait({arriving})
    if arriving.cancelled():
        raise TransferRefused("the transfer was released")
    arriving.result()


def _read_error(future: asyncio.Future[Any]) -> None:
    """Read what a future raised: it is told to whoever waits, if anybody does."""
    if not future.cancelled():
        future.exception()


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; if one call fails, end the others and raise what it raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _each(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results; if calls fail, wait for the others all the same and raise what the first raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
