"""A ticket: the right to deliver one request's KV to one decode worker, once, for a while."""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.core.layout import KVLayout
from twinpool.core.secret import Secret


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
    worker_id: str  # who reserved the room
    sender_id: str  # the only worker that may send
    ranks: tuple[tuple[Endpoint, ...], ...]  # where each rank of the decode worker is reached, best first
    layout: KVLayout  # of the decode worker
    num_tokens: int  # tokens whose KV the decode worker waits for, cached ones included
    cached_tokens: int  # the first tokens, already held there and not sent
    lease_s: float  # without any progress for so long, the decode worker takes its room back
    expires_unix_s: float  # when the request's own time is over, by the decode worker's wall clock
    signature: bytes = b""  # HMAC of the deployment's secret over everything above; keys the transfer

    def signed(self, secret: Secret) -> KVTicket:
        """Return the ticket with its signature."""
        return replace(self, signature=secret.sign("ticket", *self._signed_fields()))

    def is_signed_by(self, secret: Secret) -> bool:
        """Return whether a holder of ``secret`` made this ticket, just so."""
        return secret.is_signed(self.signature, "ticket", *self._signed_fields())

    def _signed_fields(self) -> tuple[str | int | float, ...]:
        layout = self.layout
        return (
            self.transfer_id,
            self.epoch,
            self.request_id,
            self.worker_id,
            self.sender_id,
            self.num_tokens,
            self.cached_tokens,
            float(self.lease_s),  # an int would be signed as one, and come back as a float
            float(self.expires_unix_s),
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            layout.block_tokens,
            layout.dtype,
            layout.tp_size,
            *(
                text
                for rank, endpoints in enumerate(self.ranks)
                for endpoint in endpoints
                for text in (rank, endpoint.transport, endpoint.address)
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferReport:
    """What became of a ticket, in times of the decode worker's clock since the reservation."""

    kv_bytes: int = 0  # payload accepted, over all ranks
    num_frames: int = 0
    cached_tokens: int = 0
    first_frame_s: float | None = None
    complete_s: float | None = None  # None: the KV never was whole
    resumed_s: float | None = None  # when the router asked for the tokens
    transport: str = ""  # how the KV came; several names are joined by "+"
