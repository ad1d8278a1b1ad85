"""The sending end of all transfers of one rank: begins them and counts how they end."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from kv_transfer.outgoing import OutgoingPart, PartEnd
from kv_transfer.plan import agreed_wire, check_layouts, plan_head_copies
from kv_transfer.transport import Channel, Transport
from twinpool.core.clock import Clock
from twinpool.core.errors import LayoutMismatch, TransferError, TransferRefused
from twinpool.core.ports import KVStore
from twinpool.core.secret import Secret
from twinpool.core.ticket import Endpoint, KVTicket

_REMEMBERED_TICKETS = 4096
_CLOCK_SKEW_S = 120.0  # of two workers, either of which may be 60 s off their router's clock

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SenderCounters:
    """Totals of the parts that are over since the start."""

    confirmed: int = 0
    failed: int = 0
    aborted: int = 0
    frames: int = 0  # handed over, also of parts that failed or were aborted
    bytes: int = 0
    second_choices: int = 0  # ways that failed to open, so that the next one was tried
    refused_tickets: int = 0  # that nobody of this deployment made, that are for another, over, or used


class KVSender:
    """Begins transfers from one rank.

    Args:
        store: What is read.
        transports: What this rank can send over.
        clock: Of deadlines.
        config: Message size, checksum, wire format.
        worker_id: Only tickets for this one are taken.
        secret: Only tickets signed with it are taken.
        rank: Of the worker.
        unix_s: The wall clock, for tickets that are over.
    """

    def __init__(
        self,
        store: KVStore,
        transports: Sequence[Transport],
        clock: Clock,
        config: TransferConfig,
        *,
        worker_id: str,
        secret: Secret,
        rank: int = 0,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.counters = SenderCounters()
        self._store = store
        self._transports = {transport.endpoint.transport: transport for transport in transports}
        self._clock = clock
        self._config = config
        self._worker_id = worker_id
        self._secret = secret
        self._rank = rank
        self._unix_s = unix_s
        self._open: set[OutgoingPart] = set()
        self._used: OrderedDict[str, None] = OrderedDict()  # tickets that were taken, by transfer id

    @property
    def num_open(self) -> int:
        """Parts that are not over."""
        return len(self._open)

    def begin(self, ticket: KVTicket, *, timeout_s: float) -> tuple[OutgoingPart, ...]:
        """Begin to send what this rank has to send to the holder of ``ticket``; a task of its own per part.

        Args:
            ticket: Of the decode worker; each ticket is good for one call.
            timeout_s: The request's own time.

        Raises:
            TransferRefused: The ticket is not what this worker may use.
            LayoutMismatch: The decode worker stores KV in another way.
            TransferError: The two workers have no transport in common.
        """
        self._check(ticket)
        layout = self._store.layout
        check_layouts(layout, ticket.layout, convert_dtypes=self._config.convert_dtypes)
        if len(ticket.ranks) != ticket.layout.tp_size:
            raise LayoutMismatch(
                f"tp_size: decode has {ticket.layout.tp_size} ranks, {len(ticket.ranks)} are named"
            )
        if ticket.cached_tokens == ticket.num_tokens:
            return ()
        wire = agreed_wire(layout, ticket.layout, compact=self._config.compact)
        parts = []
        for copy in plan_head_copies(layout, ticket.layout):
            if copy.source_rank != self._rank:
                continue
            hello = Hello(
                transfer_id=ticket.transfer_id,
                epoch=ticket.epoch,
                sender_id=self._worker_id,
                source_rank=copy.source_rank,
                target_rank=copy.target_rank,
                first_head=copy.first_head,
                num_heads=copy.num_heads,
                wire=wire,
            ).proved(ticket.signature)
            ways = tuple(self._ways(ticket.ranks[copy.target_rank]))
            if not ways:
                raise TransferError(self._no_way(ticket, copy.target_rank))
            parts.append((hello, ways))
        return tuple(self._start(ticket, hello, ways, timeout_s) for hello, ways in parts)

    async def close(self) -> None:
        """Abort every open part."""
        for part in list(self._open):
            await part.abort()

    def _check(self, ticket: KVTicket) -> None:
        problem = self._objection(ticket)
        if problem:
            self.counters.refused_tickets += 1
            raise TransferRefused(problem)
        self._used[ticket.transfer_id] = None
        if len(self._used) > _REMEMBERED_TICKETS:
            self._used.popitem(last=False)

    def _objection(self, ticket: KVTicket) -> str:
        if not ticket.is_signed_by(self._secret):
            return "nobody of this deployment made this ticket"
        if ticket.sender_id != self._worker_id:
            return f"the ticket is for {ticket.sender_id}, this is {self._worker_id}"
        over_s = self._unix_s() - ticket.expires_unix_s
        if over_s > _CLOCK_SKEW_S:
            return (
                f"the time of the ticket was over {over_s:.0f} s ago, {_CLOCK_SKEW_S:g} are allowed: "
                "it is old, or the clocks of the two workers differ"
            )
        if ticket.transfer_id in self._used:
            return "the ticket was used already"
        return ""

    def _start(self, ticket: KVTicket, hello: Hello, ways: Sequence[_Way], timeout_s: float) -> OutgoingPart:
        part = OutgoingPart(
            ticket,
            hello,
            partial(self._open_first, ways, hello),
            store=self._store,
            clock=self._clock,
            config=self._config,
            timeout_s=timeout_s,
            on_end=self._note_end,
        )
        self._open.add(part)
        return part

    def _ways(self, endpoints: Sequence[Endpoint]) -> Iterator[_Way]:
        """Give the ways to a rank, in the order in which it offers them."""
        for endpoint in endpoints:
            transport = self._transports.get(endpoint.transport)
            if transport is not None and transport.reaches(endpoint):
                yield _Way(transport, endpoint)

    async def _open_first(
        self, ways: Sequence[_Way], hello: Hello, *, timeout_s: float
    ) -> tuple[Channel, bool]:
        """Open the first way that opens; returns the channel and whether it takes tensors."""
        last = ways[-1]
        for way in ways:
            try:
                channel = await way.transport.open(way.endpoint, hello, timeout_s=timeout_s)
            except TransferRefused:  # the receiver has spoken; it would say the same on any way
                raise
            except TransferError as error:
                if way is last:
                    raise
                self.counters.second_choices += 1
                _log.warning("%s to %s does not open, trying the next: %s", *_names(way), error)
            else:
                return channel, way.transport.moves_tensors
        raise AssertionError("the last way opens or raises")

    def _no_way(self, ticket: KVTicket, rank: int) -> str:
        theirs = ", ".join(endpoint.transport for endpoint in ticket.ranks[rank]) or "none"
        ours = ", ".join(self._transports) or "none"
        return f"no transport in common: {ticket.worker_id} has {theirs}, this worker {ours}"

    def _note_end(self, part: OutgoingPart, end: PartEnd) -> None:
        self._open.discard(part)
        self.counters.frames += part.num_frames
        self.counters.bytes += part.num_bytes
        match end:
            case PartEnd.CONFIRMED:
                self.counters.confirmed += 1
            case PartEnd.FAILED:
                self.counters.failed += 1
            case PartEnd.ABORTED:
                self.counters.aborted += 1


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    transport: Transport
    endpoint: Endpoint


def _names(way: _Way) -> tuple[str, str]:
    return way.endpoint.transport, way.endpoint.address
