"""What is simulated: the pools, the way between them, and what happens to workers on the way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from router.config import RouterConfig
from twinpool.core.errors import ConfigError
from twinpool.core.ports import Role
from twinpool.engine.config import EngineConfig
from twinpool.lab.profile.profile import Link, Per, load_links

MOST_WORKERS = 1_000  # of a deployment: each has an engine with all its blocks
LONGEST_S = 86_400.0  # of a step or a hop: meanwhile workers go on sending heartbeats


class Overlap(StrEnum):
    """When the KV of a prompt may leave."""

    LAYERS = "layers"  # each layer of each step once it is computed: what Twinpool does
    STEPS = "steps"  # what a step computed, after the step
    NONE = "none"  # all of it after the whole prompt


class Emulate(StrEnum):
    """A public simulator whose known mistakes are made too, to compare with its results."""

    SPLITWISE_SIM = (
        "splitwise_sim"  # transfers never share a link; decodes in a step of prompts cost 10 % of it
    )
    SIMDISTSERVE = "simdistserve"  # transfers take no time; one decode step too many; fixed cost of each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal workers of one role.

    Attributes:
        profile: The name of one that ships, or a path to a YAML file.
        kv_cache_bytes: Instead of what the profile says; 0 takes that.
    """

    role: Role
    workers: int
    profile: str
    kv_cache_bytes: int = 0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("pools.workers", f"{self.workers} is less than 1")
        if self.kv_cache_bytes < 0:
            raise ConfigError("pools.kv_cache_bytes", f"{self.kv_cache_bytes} is less than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How KV goes from worker to worker.

    Each worker has one network link, in and out apart, which its transfers share; or each of its ranks has.

    Attributes:
        link: The name of one that ships, or of a transport that was measured with the profile of the first
            pool; ``latency_s`` and ``bytes_s``, of a worker, count instead where they are given.
        slowdown: So many times fewer bytes a second than that.
        compact: KV travels as int8 with scales.
    """

    link: str = "ib_ndr_400g"
    bytes_s: float | None = None
    latency_s: float | None = None
    slowdown: float = 1.0
    overlap: Overlap = Overlap.LAYERS
    compact: bool = False

    def __post_init__(self) -> None:
        for name in ("bytes_s", "slowdown"):
            value = getattr(self, name)
            if value is not None and value <= 0.0:
                raise ConfigError(f"transfer.{name}", f"{value} is not above 0")
        if self.latency_s is not None and self.latency_s < 0.0:
            raise ConfigError("transfer.latency_s", f"{self.latency_s} is less than 0")

    def resolve(self, measured: Mapping[str, Link] = MappingProxyType({})) -> Link:
        """Return the link.

        Args:
            measured: Links by transport, beside those that ship.

        Raises:
            ConfigError: There is no such link.
        """
        known = {**load_links(), **measured}
        if self.link not in known:
            raise ConfigError("transfer.link", f"{self.link} is none of {', '.join(known)}")
        link = known[self.link]
        return Link(
            latency_s=link.latency_s if self.latency_s is None else self.latency_s,
            bytes_s=(link.bytes_s if self.bytes_s is None else self.bytes_s) / self.slowdown,
            per=link.per if self.bytes_s is None else Per.WORKER,
            source=link.source if self.bytes_s is None else "as asked",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """From a moment on a worker takes nothing new, and once it is empty it has another role.

    One that would leave nobody to answer is refused, as the router does; one whose requests nobody else could
    go on with when the time is over does not happen.
    """

    at_s: float
    worker: str  # role and number, as in decode-0
    role: Role
    timeout_s: float = 30.0  # then what still runs there goes on elsewhere

    def __post_init__(self) -> None:
        if self.timeout_s < 0.0:
            raise ConfigError("role_changes.timeout_s", f"{self.timeout_s} is less than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker dies; its successor, with an empty cache, joins ``back_after_s`` later, or never."""

    at_s: float
    worker: str
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.back_after_s is not None and self.back_after_s < 0.0:
            raise ConfigError("losses.back_after_s", f"{self.back_after_s} is less than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """A deployment to simulate.

    Attributes:
        hop_s: From the router to a worker, and back, each; None: the longest that a profile says.
        max_model_tokens: Instead of the model's own limit; 0 keeps that.
    """

    pools: tuple[Pool, ...]
    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: Transfer = field(default_factory=Transfer)
    hop_s: float | None = None
    max_model_tokens: int = 0
    role_changes: tuple[RoleChange, ...] = ()
    losses: tuple[Loss, ...] = ()
    emulate: Emulate | None = None

    def __post_init__(self) -> None:
        if not self.pools:
            raise ConfigError("pools", "are missing")
        roles = {pool.role for pool in self.pools}
        if Role.COLOCATED not in roles and Role.DECODE not in roles:
            raise ConfigError("pools", "nobody decodes")
        num_workers = sum(pool.workers for pool in self.pools)
        if num_workers > MOST_WORKERS:
            raise ConfigError("pools", f"{num_workers} workers are more than {MOST_WORKERS:,}")
        if self.max_model_tokens < 0:
            raise ConfigError("max_model_tokens", f"{self.max_model_tokens} is less than 0")
        if self.hop_s is not None and self.hop_s < 0.0:
            raise ConfigError("hop_s", f"{self.hop_s} is less than 0")
        names = set(self.worker_ids())
        events: list[tuple[str, RoleChange | Loss]] = []
        events += [(f"role_changes[{number}]", change) for number, change in enumerate(self.role_changes)]
        events += [(f"losses[{number}]", loss) for number, loss in enumerate(self.losses)]
        for path, event in events:
            if event.worker not in names:
                raise ConfigError(f"{path}.worker", f"{event.worker} is none of {', '.join(sorted(names))}")
            if event.at_s < 0.0:
                raise ConfigError(f"{path}.at_s", f"{event.at_s} is less than 0")

    def worker_ids(self) -> list[str]:
        """List the workers, pool by pool: role and number within the role."""
        counts: dict[Role, int] = {}
        names = []
        for pool in self.pools:
            first = counts.get(pool.role, 0)
            names += [f"{pool.role}-{first + number}" for number in range(pool.workers)]
            counts[pool.role] = first + pool.workers
        return names


ROLE_LETTERS: Mapping[Role, str] = MappingProxyType(
    {Role.PREFILL: "P", Role.DECODE: "D", Role.COLOCATED: "C"}
)  # in the name of a layout, as in 2P1D
_ROLES = {letter: role for role, letter in ROLE_LETTERS.items()}
_LAYOUT = re.compile(r"(\d{1,9})([PDC])", re.ASCII)


def parse_layout(text: str) -> list[tuple[Role, int]]:
    """Read ``2P1D``, ``3C`` or ``1P1D1C``: how many workers of each role.

    Raises:
        ConfigError: It is none.
    """
    parts = _LAYOUT.findall(text.upper())
    if not parts or "".join(count + role for count, role in parts) != text.upper():
        raise ConfigError("--layout", f"{text!r} is no layout such as 2P1D or 3C")
    return [(_ROLES[role], int(count)) for count, role in parts]
