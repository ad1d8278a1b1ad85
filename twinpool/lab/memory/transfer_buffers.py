"""Memory that transfers of KV take beside the cache: per peer, and per transfer under way.

Follows the transports in ``kv_transfer``; of what libraries take by themselves there are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.config import TransferConfig
from kv_transfer.pair.lane import slot_shape
from kv_transfer.registry import PREFERENCE, transport_names
from kv_transfer.shm_line.segment import MAX_SLOTS
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.lab.memory.term import Kind

# Of an NCCL communicator of two ranks with 8 channels; about 100 MB with 16.
NCCL_PAIR_BYTES = 52 * 10**6
_GPU_COPIES = 4  # gathered and encoded on the way out, placed and decoded on the way in
_TCP_SPARE = 4  # kv_transfer/tcp_line/incoming.py keeps so many buffers for the next messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Bytes of one rank, and where the number comes from."""

    num_bytes: int
    kind: Kind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSide:
    """One rank of a worker, as its transfers see it."""

    role: Role
    config: TransferConfig
    num_peers: int  # ranks of the other role that it meets
    num_transfers: int  # that may be under way at once
    is_gpu: bool

    @property
    def transport(self) -> str:
        """The transport between workers that all offer the same: the best they have.

        Raises:
            ConfigError: There is none of that name.
        """
        name = (self.config.transports or PREFERENCE)[0]
        if name not in transport_names():
            raise ConfigError("transfer.transports", f"{name} is none of {', '.join(transport_names())}")
        return name


def peer_buffers(side: TransferSide) -> Buffers:
    """Return what is kept for each peer from the first transfer on."""
    name = side.transport
    if not side.num_peers or name not in ("shm", "torch_dist", "cuda_ipc", "nixl"):
        return Buffers(num_bytes=0, kind=Kind.EXACT, source=_none(side, "nothing is kept per peer"))
    if name == "shm":
        return _shm_lines(side)
    shape = slot_shape(side.config.credit_bytes)
    slots = shape.num_slots * shape.slot_bytes
    library = NCCL_PAIR_BYTES if name == "torch_dist" and side.is_gpu else 0
    return Buffers(
        num_bytes=side.num_peers * (slots + library),
        kind=Kind.ESTIMATE if library else Kind.BOUND,
        source=f"{name}: {side.num_peers} peers x {shape.num_slots} slots of {shape.slot_bytes} bytes"
        + (f", and {NCCL_PAIR_BYTES} bytes of NCCL each (vLLM's P2pNccl, 8 channels)" if library else ""),
    )


def staging_buffers(side: TransferSide) -> Buffers:
    """Return what transfers under way take beside that: copies of KV on their way in or out."""
    config, name = side.config, side.transport
    if not side.num_peers:
        return Buffers(num_bytes=0, kind=Kind.EXACT, source=_none(side, ""))
    if side.is_gpu and name in PREFERENCE:
        return Buffers(
            num_bytes=_GPU_COPIES * config.message_bytes,
            kind=Kind.ESTIMATE,
            source=f"{_GPU_COPIES} x transfer.message_bytes on the GPU; the rest is host memory",
        )
    if side.is_gpu or config.compact or config.convert_dtypes:
        return Buffers(
            num_bytes=side.num_transfers * config.message_bytes,
            kind=Kind.ESTIMATE,
            source=f"{side.num_transfers} transfers x transfer.message_bytes, copied out of the cache",
        )
    if name == "grpc":
        return Buffers(
            num_bytes=side.num_transfers * config.credit_bytes,
            kind=Kind.BOUND,
            source=f"grpc: {side.num_transfers} transfers x transfer.credit_bytes, as messages",
        )
    if name == "tcp" and side.role is not Role.PREFILL:
        buffers = side.num_transfers + _TCP_SPARE
        return Buffers(
            num_bytes=buffers * config.message_bytes,
            kind=Kind.BOUND,
            source=f"tcp: {buffers} buffers x transfer.message_bytes",
        )
    return Buffers(num_bytes=0, kind=Kind.EXACT, source=f"{name}: frames are views of the cache")


def group_bytes(num_ranks: int, *, is_gpu: bool) -> int:
    """Return about what the ranks of one worker need to add up their parts."""
    return (num_ranks - 1) * NCCL_PAIR_BYTES if is_gpu else 0


def _shm_lines(side: TransferSide) -> Buffers:
    if side.is_gpu:
        return Buffers(num_bytes=0, kind=Kind.EXACT, source="shm: host memory")
    config = side.config
    num_slots = min(MAX_SLOTS, 2 * (config.credit_bytes // config.message_bytes))
    return Buffers(
        num_bytes=side.num_peers * num_slots * config.message_bytes,
        kind=Kind.BOUND,
        source=f"shm: {side.num_peers} peers x {num_slots} slots x transfer.message_bytes, shared by both",
    )


def _none(side: TransferSide, otherwise: str) -> str:
    return f"{side.transport}: {otherwise}" if side.num_peers else "no transfers"
