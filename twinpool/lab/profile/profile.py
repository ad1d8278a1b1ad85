"""A hardware profile: how long one worker's steps take, how much KV it holds, and who says so.

A profile is a YAML file; those that ship lie in ``data``.  Knows no simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from twinpool.core.config import bind, load_yaml
from twinpool.core.errors import ConfigError
from twinpool.core.layout import DTYPE_BYTES, KVLayout
from twinpool.lab.profile.batch_tokens import BatchTokens
from twinpool.lab.profile.cost import CostModel
from twinpool.lab.profile.measured import Measured
from twinpool.lab.profile.polynomial import Polynomial
from twinpool.lab.profile.slowdown import Slowdown

_SHIPPED = Path(__file__).parent / "data"
_LINKS = "links.yaml"
_MOST_BLOCKS = 10**7  # a hundred times those of the largest profile that ships


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a transfer and a cache must know of a model."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int  # prompt and answer together
    dtype: str = "bfloat16"  # of the KV

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", f"{getattr(self, name)} is less than 1")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError("model.dtype", f"{self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")


class Per(StrEnum):
    """Who has a link of its own."""

    WORKER = "worker"  # all ranks of a worker together
    RANK = "rank"  # each rank, that is each GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A way between two workers: a transfer takes ``latency_s`` and its bytes at ``bytes_s``."""

    latency_s: float
    bytes_s: float  # each way
    per: Per = Per.WORKER
    source: str = ""

    def __post_init__(self) -> None:
        if self.bytes_s <= 0.0:
            raise ConfigError("link.bytes_s", f"{self.bytes_s} is not above 0")
        if self.latency_s < 0.0:
            raise ConfigError("link.latency_s", f"{self.latency_s} is less than 0")

    def text(self) -> str:
        """Return it in words, with its source."""
        return f"{self.bytes_s / 1e9:g} GB/s for each {self.per}, {self.latency_s * 1e3:g} ms; {self.source}"

    def worker_bytes_s(self, num_ranks: int) -> float:
        """Return what leaves a worker of so many ranks in a second."""
        return self.bytes_s * num_ranks if self.per is Per.RANK else self.bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One worker: a model on a number of devices.

    Attributes:
        source: Where the times come from: who measured, when, with which software; its licence.
        kv_cache_bytes: Of all ranks together.
        measured, polynomial, batch_tokens: The times; one of the three.
        transfers: By transport, as measured with this worker.
        hop_s: From the router to the worker, and back, each; for simulations that say none.
        slowdown: Workers of this profile share the one machine that was measured.  None: each has its own.
    """

    name: str
    source: str
    hardware: str
    engine: str  # the software that was measured, with its version
    model: ModelShape
    tp: int = 1  # ranks of the worker, one device each
    kv_cache_bytes: int
    kv_cache_source: str = ""
    measured: Measured | None = None
    polynomial: Polynomial | None = None
    batch_tokens: BatchTokens | None = None
    transfers: Mapping[str, Link] = field(default_factory=dict)
    hop_s: float = 0.0
    slowdown: Slowdown | None = None

    def __post_init__(self) -> None:
        if len(self._times()) != 1:
            raise ConfigError("profile", "has not one of measured, polynomial, batch_tokens")
        for name in ("tp", "kv_cache_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(name, f"{getattr(self, name)} is less than 1")
        if self.hop_s < 0.0:
            raise ConfigError("hop_s", f"{self.hop_s} is less than 0")

    def cost_model(self) -> CostModel:
        """Return the times of any step."""
        return self._times()[0].cost_model()

    def layout(self, *, block_tokens: int) -> KVLayout:
        """Return the layout of the worker's KV cache."""
        model = self.model
        return KVLayout(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_tokens=block_tokens,
            dtype=model.dtype,
            tp_size=self.tp,
        )

    def num_blocks(self, *, block_tokens: int) -> int:
        """Return how many blocks the cache has: each rank keeps its heads of every block.

        Raises:
            ConfigError: Not one, or more than a simulation keeps count of.
        """
        layout = self.layout(block_tokens=block_tokens)
        num_blocks = self.kv_cache_bytes // (layout.rank_block_bytes * self.tp)
        if not num_blocks:
            raise ConfigError("kv_cache_bytes", f"{self.kv_cache_bytes} holds no block of {block_tokens}")
        if num_blocks > _MOST_BLOCKS:
            raise ConfigError(
                "kv_cache_bytes", f"{self.kv_cache_bytes} holds {num_blocks} blocks, more than {_MOST_BLOCKS}"
            )
        return num_blocks

    def _times(self) -> list[Measured | Polynomial | BatchTokens]:
        return [times for times in (self.measured, self.polynomial, self.batch_tokens) if times is not None]


def hop_s_of(profiles: Iterable[Profile], *, asked_s: float | None) -> float:
    """Return how long a hop between router and worker takes: as asked, or the longest that a profile says."""
    return max(profile.hop_s for profile in profiles) if asked_s is None else asked_s


def profile_names() -> tuple[str, ...]:
    """Return the names of the profiles that ship, sorted."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml") if path.name != _LINKS))


def load_profile(name: str) -> Profile:
    """Read a profile that ships, by its name, or any other, by its path.

    Raises:
        ConfigError: There is none, or it is not right.
    """
    if name.endswith((".yaml", ".yml")):
        return bind(Profile, load_yaml(Path(name)))
    if name not in profile_names():
        raise ConfigError(
            "profile", f"{name} is no path to a .yaml file and none of {', '.join(profile_names())}"
        )
    return bind(Profile, load_yaml(_SHIPPED / f"{name}.yaml"))


def load_links() -> Mapping[str, Link]:
    """Return the links that ship, by name."""
    return {name: bind(Link, given, name) for name, given in load_yaml(_SHIPPED / _LINKS).items()}
