"""What a worker offers and says of itself.  The service, its gRPC client and a fake all fit these."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from twinpool.core.layout import KVLayout
from twinpool.core.request import Request, TokenOutput
from twinpool.core.ticket import Endpoint, KVTicket, TransferReport


class Role(StrEnum):
    """What the router uses a worker for; the engine has no mode."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker says of itself when it joins; fixed for its life but for the role."""

    worker_id: str
    role: Role
    address: str  # of its gRPC services
    pid: int
    host: str
    generation: int  # larger in each life of the same worker_id; the epoch of its tickets
    model: str  # name served to clients
    fingerprint: Mapping[str, str]  # every setting two workers must share, by name
    layout: KVLayout
    num_blocks: int
    max_model_tokens: int  # the model's context, prompt and answer together
    ranks: tuple[tuple[Endpoint, ...], ...]  # the KV transports of each rank, best first

    @property
    def max_request_tokens(self) -> int:
        """The largest request this worker can ever hold, prompt and answer together."""
        return min(self.max_model_tokens, self.num_blocks * self.layout.block_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's state at one moment; sent with every heartbeat."""

    running: int = 0  # sequences that are being computed or hold blocks
    queued: int = 0  # sequences that wait for their first step
    free_blocks: int = 0  # that a newcomer can get: cached ones are among them
    draining: bool = False
    stalled_s: float = 0.0  # how long there has been work and no step; 0 when idle or moving
    counters: Mapping[str, int] = field(default_factory=dict)  # totals since the start, by metric name


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCounts:
    """Where the blocks of a pool are; ``free + owned + cached + draining == total`` always."""

    total: int
    free: int
    cached: int
    owned: int
    draining: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAudit:
    """A worker's books, taken between two steps."""

    worker_id: str
    role: Role
    blocks: BlockCounts
    tickets: int  # reservations not yet resumed, released or expired
    transfers: int  # incoming and outgoing, not yet over
    sequences: int


class PrefillPort(Protocol):
    """Computes prompts."""

    async def prefill(self, request: Request, ticket: KVTicket | None) -> TokenOutput:
        """Compute the prompt, send its KV to the ticket's holder, and return the first token.

        Returns as soon as the token is known; the tail of the KV may still be on its way.  Without
        a ticket the answer must end with its first token (``max_tokens`` reached) and nothing is sent.
        Cancelling the call aborts the prompt and its transfer.

        Raises:
            InvalidRequest: The request can never be run here.
            Unavailable: Not now or not here.
            TransferError: The ticket's holder refused the KV.
        """
        ...


class DecodePort(Protocol):
    """Holds KV and generates tokens."""

    async def reserve(self, request: Request, *, sender_id: str) -> KVTicket:
        """Set room aside for the KV of ``request``, all of it or none.

        Args:
            request: Whose prompt is computed elsewhere.
            sender_id: The worker that computes it; only that one may send.

        Raises:
            NoFreeBlocks: Nothing was taken.
            PromptTooLong: It can never fit.
            WorkerDraining: The worker takes nothing new.
        """
        ...

    def resume(self, ticket: KVTicket, first: TokenOutput) -> AsyncGenerator[TokenOutput, None]:
        """Wait for proof that all KV arrived, then generate what follows ``first``.

        Raises:
            TransferError: The KV did not arrive whole; the ticket is over.
        """
        ...

    def generate(self, request: Request) -> AsyncGenerator[TokenOutput, None]:
        """Compute the prompt here and generate the whole answer: colocated serving."""
        ...

    async def release(self, ticket: KVTicket) -> TransferReport:
        """Give a ticket's room back.  Idempotent; an unknown ticket gives an empty report."""
        ...


class WorkerPort(Protocol):
    """What every worker answers, whatever its role."""

    async def status(self) -> WorkerLoad: ...

    async def drain(self, *, timeout_s: float) -> bool:
        """Take nothing new, wait for what runs; return whether all of it ended in time."""
        ...

    async def audit(self) -> WorkerAudit: ...

    async def clear_cache(self) -> int:
        """Forget the KV that is kept for later requests; return how many blocks became free.

        What runs keeps its own, and may leave it in the cache when it ends.
        """
        ...

    async def assign(self, role: Role) -> None:
        """Have ``role`` from now on, also where the worker joins again; what runs goes on.

        Raises:
            WorkerDraining: The worker ends.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRange:
    """Some tokens of some heads of one layer of one sequence."""

    layer: int
    blocks: Sequence[int]  # of the sequence, in token order
    first_token: int
    num_tokens: int
    heads: range  # by their number in the model


class KVPayload(Protocol):
    """Bytes of KV that travel, wherever they are."""

    @property
    def nbytes(self) -> int: ...

    def views(self) -> tuple[memoryview, ...]:
        """Return the bytes as buffers in host memory, in order."""
        ...

    def copy_into(self, target: memoryview) -> None:
        """Copy the bytes to ``target``, which has just their size."""
        ...

    def tensor(self) -> Any | None:
        """Return the bytes as one uint8 tensor on their device; None if they are in host memory."""
        ...

    def checksum(self, identity: bytes) -> int:
        """Return 64 bits over ``identity`` and the bytes: XXH3, or `device_checksum` off the host."""
        ...


class KVStore(Protocol):
    """KV of one rank by token position, as transfers need it.

    What travels is ``[2, num_tokens, len(heads), head_dim]`` elements of one layer, keys before values,
    contiguous, in a wire format (``layout.WIRE_FORMATS``): independent of block sizes and ranks on either
    side.  The store converts between its own dtype and the wire format.
    """

    layout: KVLayout
    heads: range  # kept here, by their number in the model

    def payload(self, part: KVRange, *, wire: str, on_device: bool = False) -> KVPayload:
        """Return the bytes of ``part``.

        They may be views of the store: valid as long as nobody writes those tokens, which is as long as the
        transfer lasts.

        Args:
            part: Whose heads are all kept here.
            wire: Format of the bytes.
            on_device: Leave the bytes on the store's device, for a transport that moves tensors.
        """
        ...

    def write(self, payload: KVPayload, part: KVRange, *, wire: str) -> None:
        """Copy ``payload``, exactly the bytes of ``part``, into the store."""
        ...
