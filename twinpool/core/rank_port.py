"""What the ranks of a tensor-parallel worker say to each other, and how rank 0 drives another's transfers.

The other rank itself, its gRPC client and a fake in a test fit the same small Protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from twinpool.core.ticket import Endpoint, KVTicket, TransferReport


def rank_name(worker_id: str, rank: int) -> str:
    """Return what a rank is called in tokens, logs and errors."""
    return f"{worker_id}/rank{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHello:
    """The first thing another rank says to rank 0."""

    rank: int  # of the one that speaks, from 1
    num_ranks: int  # that it was told of, itself and rank 0 included
    generation: int  # of the worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """What another rank says of itself once it can work."""

    address: str  # of its gRPC service
    endpoints: tuple[Endpoint, ...]  # where KV reaches it, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one rank is to receive.

    ``cached_tokens`` are the first tokens, already there; they are never written.  After ``timeout_s`` the
    transfer is over, whatever its progress.
    """

    transfer_id: str
    sender_id: str  # the only worker that may send
    key: bytes  # the ticket's signature; a sender proves that it holds it
    blocks: tuple[int, ...]  # of the sequence in token order, those of the cached tokens included
    num_tokens: int  # tokens whose KV must be there before ``wait`` returns
    cached_tokens: int = 0
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """A rank at one moment."""

    num_transfers: int = 0  # incoming and outgoing, not yet over
    asked_to_stop: bool = False  # somebody wants it to end, and so the whole worker
    counters: Mapping[str, int] = field(default_factory=dict)  # totals since the start, by name


class RankPort(Protocol):
    """One other rank of this worker.

    All calls raise WorkerLost if the rank does not answer.  Nobody knows what it does to its blocks then, so
    the worker is over.  What a rank was told to end it does not begin any more, in whatever order the two
    calls reach it.
    """

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        """Open a transfer into the rank's own blocks; it has no lease once it is whole."""
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
        """Return when the rank's KV was confirmed; raise the TransferError that ended it otherwise.

        Called once.  Whoever cancels the call gives the transfer up.
        """
        ...

    async def abort(self, transfer_id: str) -> None:
        """Give up sending; the rank's blocks are not read any more after the return.  Idempotent."""
        ...

    async def state(self) -> RankState:
        """Tell how the rank is."""
        ...
