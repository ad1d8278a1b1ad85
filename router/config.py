"""Limits of the router; knows nothing of sockets, models or HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from twinpool.core.errors import ConfigError


class Fallback(StrEnum):
    """What to do while no prefill worker is ready but a decode worker is."""

    LOCAL = "local"  # the decode worker computes the prompt too; counted, never silent
    REFUSE = "refuse"  # wait for a prefill worker, then 503


class OnTransferFailure(StrEnum):
    """What to do when the KV of an answer did not arrive."""

    RETRY_OTHER_PAIR = "retry_other_pair"  # another attempt, by other workers if there are some
    RECOMPUTE_ON_DECODE = "recompute_on_decode"  # another attempt, by the same decode worker alone
    FAIL = "fail"  # no other attempt: the client is told


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How the router queues, places, retries and judges its workers."""

    policy: str = "least_loaded"  # file name in router/policies
    fallback: Fallback = Fallback.LOCAL
    on_transfer_failure: OnTransferFailure = OnTransferFailure.RETRY_OTHER_PAIR
    max_queued: int = 256  # requests that may wait for room; one more is refused at once
    prefill_depth: int = 2  # prompts at one prefill worker at a time: one runs, one is about to
    max_running_per_worker: int = 64  # answers at one decode or colocated worker at a time
    max_attempts: int = 3  # times one answer is started before its last error is given to the client
    request_timeout_s: float = 600.0  # deadline of a request that names none
    queue_timeout_s: float = 30.0  # longest wait for room or for a lost worker's successor
    overtake_s: float = 5.0  # a request that waited longer is not overtaken by smaller ones
    release_timeout_s: float = 5.0  # after it, a ticket is left to its lease
    release_wait_s: float = 1.0  # longest time that the end of an answer waits for its release
    audit_timeout_s: float = 2.0  # of an answer that a worker gives at once
    role_settle_s: float = 10.0  # for a worker to be empty, once its requests went elsewhere
    heartbeat_s: float = 0.5  # how often a worker is asked to speak
    lost_after_s: float = 3.0  # silence after which a worker is frozen and its requests go elsewhere
    stalled_after_s: float = 5.0  # a worker with work and without a step for so long is not ready

    def __post_init__(self) -> None:
        for name in ("max_queued", "prefill_depth", "max_running_per_worker", "max_attempts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name}", f"{getattr(self, name)} is less than 1")
        for name in (
            "request_timeout_s",
            "queue_timeout_s",
            "release_timeout_s",
            "audit_timeout_s",
            "role_settle_s",
            "heartbeat_s",
            "stalled_after_s",
        ):
            if getattr(self, name) <= 0.0:
                raise ConfigError(f"router.{name}", f"{getattr(self, name)} is not above 0")
        for name in ("overtake_s", "release_wait_s"):
            if getattr(self, name) < 0.0:
                raise ConfigError(f"router.{name}", f"{getattr(self, name)} is less than 0")
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ConfigError(
                "router.lost_after_s",
                f"{self.lost_after_s} is less than two heartbeats of {self.heartbeat_s}",
            )
