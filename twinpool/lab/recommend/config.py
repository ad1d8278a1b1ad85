"""What is asked: which GPUs there may be, how quick answers must be, and how hard to look."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.config import RouterConfig
from twinpool.core.errors import ConfigError
from twinpool.engine.config import EngineConfig
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.simulate.config import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """A worker that there may be: its profile, which says how many GPUs it has, and what each of them costs.

    Attributes:
        profile: The name of one that ships, or a path to a YAML file.
    """

    profile: str
    cost: float = 0.0  # of one GPU, in the unit of the budget
    watts: float = 0.0  # of one GPU
    memory_bytes: int = 0  # of one GPU that is free for a worker; needed where a model's memory is planned

    def __post_init__(self) -> None:
        for name in ("cost", "watts", "memory_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"kinds.{name}", f"{getattr(self, name)} is less than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendConfig:
    """A question to ``recommend_layout``.

    Attributes:
        kinds: Every pool is made of one of these, so that pools may differ in GPU and ranks.
        gpus, budget, watts: What there is of each; 0 does not count.  Every kind says what it takes of each.
        limits: Of one request; without any, the question is how much is answered if all is sent at once.
        percentile: A rate is met if so many percent of the requests are answered within all limits.
        load_rate: Requests per second that are to be answered; 0: as many as can be.
        has_mixed: Whether to look at layouts of a prefill, a decode and a colocated pool, too.
        has_what_if: Whether to ask again with twice the load, longer prompts and a slower link.
        repeats: Workloads, each offered to every layout in question.
        precision: Ratio of a rate that is tried and the one below, less 1.
        hop_s: From the router to a worker, and back, each; None: the longest that a profile says.
    """

    kinds: tuple[WorkerKind, ...]
    gpus: int = 0
    budget: float = 0.0
    watts: float = 0.0
    limits: Limits = field(default_factory=Limits)
    percentile: float = 90.0
    load_rate: float = 0.0
    has_mixed: bool = True
    has_what_if: bool = True
    repeats: int = 3
    precision: float = 0.02
    max_layouts: int = 500
    engine: EngineConfig = field(default_factory=EngineConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    transfer: Transfer = field(default_factory=Transfer)
    hop_s: float | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            raise ConfigError("recommend.kinds", "are missing")
        for name in ("gpus", "budget", "watts", "load_rate"):
            if getattr(self, name) < 0:
                raise ConfigError(f"recommend.{name}", f"{getattr(self, name)} is less than 0")
        if not (self.gpus or self.budget or self.watts):
            raise ConfigError(
                "recommend.gpus", "is missing, and neither a budget nor watts bound the workers"
            )
        for kind in self.kinds:
            for what, taken in (("budget", "cost"), ("watts", "watts")):
                if getattr(self, what) and not getattr(kind, taken):
                    raise ConfigError(
                        f"kinds.{taken}", f"is missing for {kind.profile}: recommend.{what} is given"
                    )
        if self.hop_s is not None and self.hop_s < 0.0:
            raise ConfigError("recommend.hop_s", f"{self.hop_s} is less than 0")
        if not 0.0 < self.percentile <= 100.0:
            raise ConfigError("recommend.percentile", f"{self.percentile} is not in (0, 100]")
        if not 0.001 <= self.precision <= 0.5:
            raise ConfigError("recommend.precision", f"{self.precision} is not in [0.001, 0.5]")
        for name in ("repeats", "max_layouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"recommend.{name}", f"{getattr(self, name)} is less than 1")
        if self.limits.ttft_s is None and self.limits.tpot_s is not None:
            problem = "is missing: with a limit per token alone, any rate is met by letting requests wait"
            raise ConfigError("recommend.limits.ttft_s", problem)
        if self.load_rate and not self.has_limits:
            raise ConfigError("recommend.load_rate", "needs limits: without them all is sent at once")

    @property
    def has_limits(self) -> bool:
        return self.limits.ttft_s is not None
