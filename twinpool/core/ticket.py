"""A ticket: the right to deliver one request's KV to one decode worker, once, for a while."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker's transport can be reached."""

    transport: str  # file name in kv_transfer/transports
    address: str  # what that transport connects to


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTicket:
    """Room reserved on a decode worker for the KV of one request.

    Blocks are named by token position, never by number: which blocks they are is the decode
    worker's own business, since only it writes into its pool.
    """

    transfer_id: str  # 32 hex digits, random
    epoch: int  # of the decode worker's life; a restarted worker has another one
    request_id: str
    worker_id: str
    endpoints: tuple[Endpoint, ...]  # best first
    num_tokens: int  # tokens whose KV the decode worker waits for, cached ones included
    cached_tokens: int  # the first tokens, already held there and not sent
    lease_s: float  # without any progress for so long, the decode worker takes its room back


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What became of a ticket, in times of the decode worker's clock since the reservation."""

    kv_bytes: int = 0  # payload accepted
    num_frames: int = 0
    cached_tokens: int = 0
    first_frame_s: float | None = None
    complete_s: float | None = None  # None: the KV never was whole
    resumed_s: float | None = None  # when the router asked for the tokens
