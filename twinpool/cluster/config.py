"""What a deployment is: a model, its pools, and every limit of its parts.

Read from YAML and options by ``twinpool.core.config``.  Colocated and disaggregated serving differ in the
number of workers per pool and in nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from kv_transfer.config import TransferConfig
from kv_transfer.registry import check_between_processes
from router.config import RouterConfig
from router.http.config import HTTPConfig
from twinpool.cluster.pools import Life
from twinpool.core.doors import is_loopback
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.core.security import SecurityConfig
from twinpool.core.units import parse_bytes
from twinpool.engine.config import EngineConfig

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
RanksOn = Literal["one_machine", "trusted_network"]
MAX_RANKS = 64  # of one worker


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The workers of one role."""

    workers: int = 0
    tensor_parallel: int = 1  # ranks of each worker: processes that compute one model together
    ranks_on: RanksOn = "one_machine"  # what ranks tell each other is not encrypted
    num_cpus: float = 1.0  # what Ray sets aside for each rank
    num_gpus: float | None = None  # per rank; null: 1 on device cuda, 0 on cpu; 0.5 lets two share one
    block_tokens: int | None = None  # null: engine.block_tokens
    dtype: Dtype | None = None  # null: that of the deployment

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError("pools", f"{self.workers} workers are less than 0")
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise ConfigError("pools", f"tensor_parallel {self.tensor_parallel} is not in [1, {MAX_RANKS}]")
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ConfigError("pools", f"block_tokens {self.block_tokens} is less than 1")
        if self.num_cpus < 0 or (self.num_gpus or 0) < 0:
            raise ConfigError("pools", "num_cpus and num_gpus are at least 0")
        if not self.num_cpus and self.num_gpus == 0:
            raise ConfigError("pools", "a worker needs some CPU or GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsConfig:
    """How many workers of each role; either colocated ones, or prefill and decode ones."""

    prefill: PoolConfig = PoolConfig(workers=1)
    decode: PoolConfig = PoolConfig(workers=1)
    colocated: PoolConfig = PoolConfig()

    def __post_init__(self) -> None:
        split = self.prefill.workers + self.decode.workers
        if self.colocated.workers and split:
            raise ConfigError(
                "pools",
                f"{self.colocated.workers} colocated workers beside {self.prefill.workers} prefill and "
                f"{self.decode.workers} decode ones: a deployment is either colocated or split",
            )
        if not self.colocated.workers and not (self.prefill.workers and self.decode.workers):
            raise ConfigError(
                "pools",
                f"{self.prefill.workers} prefill, {self.decode.workers} decode and no colocated workers "
                "cannot answer",
            )

    def by_role(self) -> dict[Role, PoolConfig]:
        """Return the pools by role."""
        return {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}

    def workers(self) -> dict[Role, int]:
        """Return how many workers of each role there are at first."""
        return {role: pool.workers for role, pool in self.by_role().items()}

    @property
    def num_ranks(self) -> int:
        """Ranks of all workers of all roles: each is a process that computes."""
        return sum(pool.workers * pool.tensor_parallel for pool in self.by_role().values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutsConfig:
    """How long the parts of a deployment may take to start and to end."""

    ray_start_s: float = 180.0
    worker_start_s: float = 600.0  # from the start of a worker to the moment the router takes it
    drain_s: float = 30.0  # for what runs when a worker or the whole deployment is asked to end
    orphan_s: float = 6.0  # a worker that cannot reach its router for so long ends
    hung_s: float = 300.0  # a worker with work and without a step for so long ends, and is replaced

    def __post_init__(self) -> None:
        for name in ("ray_start_s", "worker_start_s", "orphan_s", "hung_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"timeouts.{name}", f"{getattr(self, name)} is not above 0")
        if self.drain_s < 0:
            raise ConfigError("timeouts.drain_s", f"{self.drain_s} is less than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSecurityConfig(SecurityConfig):
    """As above for a router, and for the workers that it starts."""

    worker_tls_cert: Path | None = None  # of those workers, on every machine that runs one
    worker_tls_key: Path | None = None

    def of_workers(self) -> SecurityConfig:
        """Return what those workers are told; relative paths are of the present folder."""
        return SecurityConfig(
            secret_file=_absolute(self.secret_file),
            tls_cert=_absolute(self.worker_tls_cert),
            tls_key=_absolute(self.worker_tls_key),
            tls_ca=_absolute(self.tls_ca),
            insecure=self.insecure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every worker of a deployment loads, and how."""

    model: str = "smollm2-135m-instruct"  # the alias, a folder, a .gguf file or a hub id
    model_name: str | None = None  # what clients call it; null: after the model
    device: str = "cpu"  # cpu, cuda or cuda:N
    dtype: Dtype = "auto"  # auto: float32 on cpu
    kv_memory: str | None = None  # of each worker's KV cache, as in 2GiB; null: from what is free
    threads: int = 0  # per rank, on cpu; 0: the machine's cores shared among the ranks on it

    def __post_init__(self) -> None:
        if self.kv_memory is not None:
            parse_bytes(self.kv_memory, field="kv_memory")
        if self.threads < 0:
            raise ConfigError("threads", f"{self.threads} is less than 0")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise ConfigError("device", f"{self.device} is none of cpu, cuda, cuda:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig(ModelConfig):
    """Everything `twinpool serve` is told."""

    pools: PoolsConfig = PoolsConfig()
    placement: Literal["PACK", "SPREAD"] = "PACK"  # of a pool's workers on the machines of the cluster
    ray_address: str | None = None  # null: start Ray here, for this deployment alone
    join_host: str = "127.0.0.1"  # where workers find the router; an address of this machine
    join_port: int = 0  # 0 takes a free one
    without_ray: bool = False  # start no workers; they are started elsewhere with `twinpool worker --join`
    http: HTTPConfig = field(default_factory=HTTPConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    timeouts: TimeoutsConfig = TimeoutsConfig()
    security: DeploymentSecurityConfig = DeploymentSecurityConfig()

    def __post_init__(self) -> None:
        # The decorator makes a class with slots anew, so ``super()`` would look for one that is not there.
        ModelConfig.__post_init__(self)
        check_between_processes(self.transfer.transports)
        prefill, decode = (pool.dtype or self.dtype for pool in (self.pools.prefill, self.pools.decode))
        if prefill != decode and not self.transfer.convert_dtypes:
            raise ConfigError(
                "transfer.convert_dtypes",
                f"is off, and prefill workers use {prefill}, decode workers {decode}",
            )

    def resources(self, role: Role) -> Mapping[str, float]:
        """Return what Ray sets aside for one rank of a worker of ``role``, without zeros."""
        pool = self.pools.by_role()[role]
        default_gpus = 1.0 if self.device.startswith("cuda") else 0.0
        gpus = default_gpus if pool.num_gpus is None else pool.num_gpus
        return {name: amount for name, amount in (("CPU", pool.num_cpus), ("GPU", gpus)) if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ModelConfig):
    """Everything one worker process is told; ``model`` is a folder and ``model_name`` is set."""

    worker_id: str
    role: Role
    generation: int
    join: str  # HOST:PORT of the router
    host: str = "127.0.0.1"  # an address of this machine that the router and other workers reach
    port: int = 0  # of its gRPC services; 0 takes a free one
    tensor_parallel: int = 1  # ranks: this process and others
    starts_ranks: bool = True  # the others, here; false: whoever starts this process does
    ranks_on: RanksOn = "one_machine"
    num_neighbours: int = 0  # ranks of other workers of the deployment that may share this machine
    gpu_share: float = 1.0  # of its GPU's free memory, for its KV cache
    drain_s: float = 30.0
    orphan_s: float | None = None  # null: keep trying to join for ever
    hung_s: float = 300.0  # far more than the longest step takes; without one for so long it ends
    start_s: float = 600.0  # until all ranks are there
    supervisor_pid: int | None = None  # while this process lives, the worker ends with its parent
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    secret: str = field(default="", repr=False)  # in hex, from whoever starts the worker; "": of secret_file

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_between_processes(self.transfer.transports)
        if not 1 <= self.tensor_parallel <= MAX_RANKS:
            raise ConfigError("tensor_parallel", f"{self.tensor_parallel} is not in [1, {MAX_RANKS}]")

    @property
    def rank_host(self) -> str:
        """Where this rank listens to the others of its worker."""
        return "127.0.0.1" if self.ranks_on == "one_machine" else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What a rank of a worker is told that is not rank 0."""

    worker: WorkerConfig
    rank: int
    meeting: str  # HOST:PORT where rank 0 waits
    secret: str = field(default="", repr=False)  # in hex, among the ranks; "": that of the deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpec:
    """One running deployment, as the processes between a server and its workers are told of it."""

    name: str  # unlike that of any other
    config: DeploymentConfig
    worker: WorkerConfig  # of every worker, but for what ``worker_of`` sets

    def worker_of(self, life: Life) -> WorkerConfig:
        """Return what one life of one worker is told."""
        pool, common = self.config.pools.by_role()[life.pool], self.worker
        block_tokens = pool.block_tokens or common.engine.block_tokens
        return replace(
            common,
            worker_id=life.worker_id,
            role=life.role,
            generation=life.generation,
            tensor_parallel=pool.tensor_parallel,
            ranks_on=pool.ranks_on,
            dtype=pool.dtype or common.dtype,
            engine=replace(common.engine, block_tokens=block_tokens),
            num_neighbours=max(0, self.config.pools.num_ranks - pool.tensor_parallel),
        )

    @property
    def is_local(self) -> bool:
        """Whether Ray is started for this deployment, on this machine."""
        return self.config.ray_address is None

    @property
    def is_on_loopback(self) -> bool:
        """Whether only workers on this machine can find the router, so that loopback is enough for all."""
        return is_loopback("join_host", self.worker.join.rpartition(":")[0])


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()
