"""How a server is asked, and what makes a run one that can be believed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from twinpool.core.errors import ConfigError
from twinpool.lab.metrics.limits import Limits

_OURS = ("model", "prompt", "messages", "max_tokens", "stream", "stream_options")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Everything but the workload; it is written into the result, so no key is in it."""

    url: str = "http://127.0.0.1:8000"
    model: str = ""  # empty: the first one of /v1/models
    endpoint: Literal["completions", "chat"] = "completions"
    tokenizer: str = ""  # alias, folder or hub id; empty: the server's own /tokenize, if it has one
    ignore_eos: bool = True  # answers are as long as the workload says; a server that refuses it needs false
    temperature: float = 0.0
    body: Mapping[str, Any] = field(default_factory=dict)  # more fields of every request
    timeout_s: float = 600.0  # for a whole answer, from when it was due
    connect_timeout_s: float = 10.0
    max_connections: int = 4096  # beyond, requests wait, which counts as sent late
    cancel_share: float = 0.0  # of the requests, drawn: the client leaves
    cancel_after_s: float = 1.0  # when it leaves, from when the request was due
    late_limit_s: float = 0.05  # more than one request in a hundred later than this, and the run is invalid
    warmup: int = 1  # requests before the run that do not count; the first error of one is raised
    timelines: bool = False  # ask a Twinpool server for the queue time and KV bytes of each request
    limits: Limits = field(default_factory=Limits)
    seed: int = 0  # of the prompts' content and of who leaves

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "cancel_after_s", "late_limit_s"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"bench.{name}", f"{getattr(self, name)} is not above 0")
        if not 0.0 <= self.cancel_share <= 1.0:
            raise ConfigError("bench.cancel_share", f"{self.cancel_share} is not in [0, 1]")
        if self.max_connections < 1:
            raise ConfigError("bench.max_connections", f"{self.max_connections} is less than 1")
        if self.warmup < 0:
            raise ConfigError("bench.warmup", f"{self.warmup} is negative")
        for name in self.body:
            if name in _OURS:
                raise ConfigError(f"bench.body.{name}", "is set by the workload and the other settings")
