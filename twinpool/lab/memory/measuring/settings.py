"""What the process of a measured worker is told, and what it says when it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWorker:
    """One worker of one rank."""

    folder: str  # of the model
    role: Role
    device: str
    dtype: str
    cache_bytes: int
    threads: int
    secret: str = field(repr=False)  # in hex: of this measurement
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a worker has taken; on a CPU of the process, on a GPU of its allocator."""

    weight_bytes: int  # of the model's tensors
    cache_bytes: int  # of the cache's tensors
    activation_bytes: int  # most that torch had allocated at once in one step, beside those
    shared_bytes: int  # resident memory that it shares with peers
    peak_bytes: int  # most that was resident at once; on a GPU, that the allocator had reserved
