"""What one worker of a role needs, term by term, and whether it fits on its device.

All bytes are those of one rank; of ranks that differ, the one that needs most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.lab.memory.activations import activation_bytes, step_load, step_sizes
from twinpool.lab.memory.cache_format import FORMATS, CacheFormat
from twinpool.lab.memory.cache_shape import CacheSettings
from twinpool.lab.memory.capacity import Capacity
from twinpool.lab.memory.planned_model import PlannedModel
from twinpool.lab.memory.term import Kind, Term, TermName
from twinpool.lab.memory.transfer_buffers import (
    TransferSide,
    group_bytes,
    peer_buffers,
    staging_buffers,
)

# Python, torch and gRPC with nothing loaded, and what the C library keeps of freed tensors and messages.
PROGRAM_BYTES = 240 * 2**20
HEAP_BYTES = 64 * 2**20
# A CUDA context with the kernels of torch, and the workspaces of cuBLAS.
CUDA_BYTES = 640 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLoad:
    """Conversations that are to be held at once."""

    num_tokens: int  # of each, prompt and answer together
    num_conversations: int

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_conversations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"load.{name}", f"{getattr(self, name)} is less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShape:
    """One worker of a role, and the room that each of its ranks has."""

    role: Role
    memory_bytes: int  # of the device of each rank that is free for it
    dtype: str = "bfloat16"  # of weights and activations
    cache_form: CacheFormat | None = None  # None: as dtype
    is_gpu: bool = True
    num_ranks: int = 1
    num_peers: int = 0  # workers of the other role; 0: nothing is sent or received
    peer_ranks: int = 1  # of each of those
    num_threads: int = 1  # of each rank, on a CPU
    cache_bytes: int | None = None  # of the KV cache of each rank; None: what is left
    reserve_bytes: int | None = None  # None: an estimate
    load: HeldLoad | None = None  # what must fit into the cache
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("dtype", f"{self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        for name in ("memory_bytes", "num_ranks", "peer_ranks", "num_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is less than 1")
        for name in ("num_peers", "reserve_bytes", "cache_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(name, f"{getattr(self, name)} is less than 0")

    @property
    def settings(self) -> CacheSettings:
        """How a rank keeps KV."""
        return CacheSettings(
            form=self.cache_form or FORMATS[self.dtype],
            dtype=self.dtype,
            block_tokens=self.engine.block_tokens,
            num_ranks=self.num_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The terms of a worker's memory."""

    worker: WorkerShape
    terms: tuple[Term, ...]
    capacity: Capacity
    num_blocks: int | None  # None: of a model whose layers keep unlike numbers of tokens, or states

    @property
    def total_bytes(self) -> int:
        return sum(term.num_bytes for term in self.terms)

    @property
    def missing_bytes(self) -> int:
        """How much more memory a rank needs; 0 if all fits."""
        return max(0, self.total_bytes - self.worker.memory_bytes, self._missing_cache_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def cache_bytes_that_fit(self) -> int:
        """The cache that the load needs; without one, or if it does not fit, what memory is left for it."""
        left = self.capacity.cache_bytes - (self.total_bytes - self.worker.memory_bytes)
        return min(left, self.capacity.cache_bytes + self._missing_cache_bytes)

    @property
    def kv_memory_bytes(self) -> int:
        """The KV cache of all ranks together: the setting ``kv_memory`` that gives this plan."""
        return self.capacity.cache_bytes * self.worker.num_ranks

    def term(self, name: TermName) -> Term:
        return next(term for term in self.terms if term.name is name)

    @property
    def _missing_cache_bytes(self) -> int:
        """Return what the load needs more than the cache has: only where the cache's size was told."""
        load = self.worker.load
        if load is None:
            return 0
        needed = self.capacity.needed_bytes(load.num_tokens, load.num_conversations)
        return max(0, needed - self.capacity.cache_bytes)


def plan_worker(model: PlannedModel, worker: WorkerShape) -> WorkerPlan:
    """Plan the memory of one worker.

    The KV cache takes what was told; else what the load needs; else all that the other terms leave, which
    is at least two blocks, one to finish a sequence and one to begin the next.

    Raises:
        ModelError: The model cannot be planned; the message names the field.
        ConfigError: Ranks do not divide what they share, or a setting cannot work.
    """
    shape, settings = model.cache_shape(), worker.settings
    unit = shape.block_bytes(settings) or 1  # a model with states only has no blocks
    weights, buffers = model.weights(dtype=worker.dtype, num_ranks=worker.num_ranks), _buffer_terms(worker)
    reserve = _reserve_term(worker)
    if worker.cache_bytes is not None:
        cache_bytes = _whole(worker.cache_bytes, unit)
    elif worker.load is not None:
        wanted = Capacity(shape=shape, settings=settings, cache_bytes=0)
        cache_bytes = wanted.needed_bytes(worker.load.num_tokens, worker.load.num_conversations)
    else:
        left = worker.memory_bytes - sum(term.num_bytes for term in (weights, *buffers, reserve))
        cache_bytes = _most(model, worker, unit, left)
    activations = _activations_term(model, worker, cache_bytes)
    capacity = Capacity(shape=shape, settings=settings, cache_bytes=cache_bytes)
    has_blocks = not shape.has_states and not shape.has_windows and bool(shape.kv_layers)
    return WorkerPlan(
        worker=worker,
        terms=(weights, _cache_term(model, worker, cache_bytes), activations, *buffers, reserve),
        capacity=capacity,
        num_blocks=cache_bytes // unit if has_blocks else None,
    )


def _most(model: PlannedModel, worker: WorkerShape, unit: int, left_bytes: int) -> int:
    """Return the largest cache that fits beside the activations, which grow with it; two blocks at least."""
    low, high = 2, max(3, 1 + left_bytes // unit)  # blocks: taken in any case, too many in any case
    while high - low > 1:
        middle = (low + high) // 2
        needed = middle * unit + _activations_term(model, worker, middle * unit).num_bytes
        low, high = (middle, high) if needed <= left_bytes else (low, middle)
    return low * unit


def _whole(num_bytes: int, unit: int) -> int:
    if num_bytes < 2 * unit:
        raise ConfigError("--kv-memory", f"{num_bytes} bytes hold less than 2 blocks of {unit}")
    return num_bytes // unit * unit


def _buffer_terms(worker: WorkerShape) -> tuple[Term, Term]:
    side = TransferSide(
        role=worker.role,
        config=worker.transfer,
        num_peers=worker.num_peers * -(-worker.peer_ranks // worker.num_ranks),
        num_transfers=worker.engine.max_sequences,
        is_gpu=worker.is_gpu,
    )
    staging, peers = staging_buffers(side), peer_buffers(side)
    group = group_bytes(worker.num_ranks, is_gpu=worker.is_gpu)
    return (
        Term(name=TermName.STAGING, num_bytes=staging.num_bytes, kind=staging.kind, source=staging.source),
        Term(
            name=TermName.PEERS,
            num_bytes=peers.num_bytes + group,
            kind=Kind.ESTIMATE if group else peers.kind,
            source=peers.source + (f"; {group} bytes for sums over ranks" if group else ""),
        ),
    )


def _cache_term(model: PlannedModel, worker: WorkerShape, cache_bytes: int) -> Term:
    shape, settings = model.cache_shape(), worker.settings
    states, block = shape.state_bytes(settings), shape.block_bytes(settings)
    parts = [f"blocks of {settings.block_tokens} tokens, {block} bytes each"] if block else []
    if shape.has_windows:
        parts.append("of layers with a window no more than it spans")
    if states:
        parts.append(f"{states} bytes of states per sequence")
    return Term(
        name=TermName.CACHE,
        num_bytes=cache_bytes,
        kind=Kind.BOUND if shape.has_windows else Kind.EXACT,
        source=", ".join(parts) or "nothing is kept",
    )


def _activations_term(model: PlannedModel, worker: WorkerShape, cache_bytes: int) -> Term:
    fields, engine = model.fields, worker.engine
    token_bytes = model.cache_shape().token_bytes(worker.settings)
    cached = cache_bytes // token_bytes if token_bytes else 0
    longest = max(1, min(fields.max_tokens or cached, cached))
    if not model.is_served:  # other engines neither gather what they attend to nor write masks
        longest = cached = engine.max_batch_tokens
    sizes = step_sizes(fields, num_ranks=worker.num_ranks, dtype=worker.dtype, num_threads=worker.num_threads)
    # Several ranks gather logits, and GPUs have kernels of their own: neither is followed line by line.
    is_followed = model.is_served and not worker.is_gpu and worker.num_ranks == 1
    load = step_load(engine, worker.role, longest=longest, cached_tokens=cached)
    return Term(
        name=TermName.ACTIVATIONS,
        num_bytes=activation_bytes(sizes, load),
        kind=Kind.BOUND if is_followed else Kind.ESTIMATE,
        source=f"a step of {engine.max_batch_tokens} tokens, {engine.max_sequences} sequences, "
        f"of which one may have {longest} tokens",
    )


def _reserve_term(worker: WorkerShape) -> Term:
    if worker.reserve_bytes is not None:
        return Term(name=TermName.RESERVE, num_bytes=worker.reserve_bytes, kind=Kind.EXACT, source="as told")
    return Term(
        name=TermName.RESERVE,
        num_bytes=CUDA_BYTES if worker.is_gpu else PROGRAM_BYTES + HEAP_BYTES,
        kind=Kind.ESTIMATE,
        source="a CUDA context and workspaces"
        if worker.is_gpu
        else "Python, torch and gRPC, measured, and freed memory that the C library keeps",
    )
