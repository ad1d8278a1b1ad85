"""Every error this system raises on purpose.

    ServingError
    |-- ConfigError            a deployment that cannot work; raised at start-up only
    |   |-- ModelError         a checkpoint that cannot be found, read or run
    |   `-- Untrusted          a peer that did not prove who it is
    |-- InvalidRequest         the caller's mistake; never retried
    |   `-- PromptTooLong
    |-- Unavailable            not here or not now; the router may try elsewhere
    |   |-- NoFreeBlocks
    |   |-- NoWorkers
    |   |-- QueueFull
    |   |-- WorkerDraining
    |   `-- WorkerLost
    |-- TransferError          the KV of one request did not arrive; prefill again
    |   |-- LayoutMismatch
    |   |-- TransferRefused
    |   |-- TransferDamaged
    |   `-- TransferTimeout
    |-- DeadlineExceeded       the request's own time is over
    |-- RequestCancelled       the client left, or the router gave the request up
    `-- InternalError          a bug of ours that ended one request
        `-- RankLost           one of a worker's ranks died or failed; the worker ends with all its ranks

A class says who must act; its fields say what happened.  ``rpc/status.py`` is the one
table from these classes to gRPC codes and ``router/http/errors.py`` the one to HTTP.
``assert`` guards invariants of our own code and never input, so the system behaves the
same under ``python -O``.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of every deliberate error.

    Attributes:
        retryable: Another attempt, elsewhere or later, may succeed.
    """

    retryable: bool = False


class ConfigError(ServingError):
    """A setting that cannot work.

    Args:
        field: Path of the setting, as in ``engine.block_tokens`` or ``--model``.
        problem: What is wrong with it, numbers first.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class ModelError(ConfigError):
    """A checkpoint that cannot be found, read or run."""


class Untrusted(ConfigError):
    """A peer did not prove who it is: another secret, another certificate, or none.

    The field is the setting in which the two sides differ.  Another worker may hold the right one.
    """

    retryable = True


class InvalidRequest(ServingError):
    """The caller asked for something that can never be answered.

    Args:
        param: Name of the request field at fault, as the client spells it; None when it is the whole body.
        problem: What is wrong with it.
    """

    def __init__(self, param: str | None, problem: str) -> None:
        super().__init__(problem if param is None else f"{param}: {problem}")
        self.param = param
        self.problem = problem


class PromptTooLong(InvalidRequest):
    """Prompt and answer do not fit in the model's context or in a worker's whole KV pool.

    Args:
        needed_tokens: Prompt tokens plus the answer tokens asked for.
        limit_tokens: The most that can be served.
        param: The request field at fault.
    """

    def __init__(self, *, needed_tokens: int, limit_tokens: int, param: str = "prompt") -> None:
        super().__init__(param, f"{needed_tokens} tokens are more than the {limit_tokens} that fit")
        self.needed_tokens = needed_tokens
        self.limit_tokens = limit_tokens


class Unavailable(ServingError):
    """Not here or not now.

    Args:
        message: What is missing.
        retry_after_s: When asking again makes sense.
    """

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoFreeBlocks(Unavailable):
    """The KV cache of one worker has too few free blocks.

    Args:
        needed: Blocks the request asked for.
        free: Blocks that were free at that moment.
        total: Blocks the worker owns; ``needed > total`` can never succeed here.
    """

    def __init__(self, *, needed: int, free: int, total: int) -> None:
        super().__init__(f"need {needed} KV blocks, {free} of {total} are free")
        self.needed = needed
        self.free = free
        self.total = total
        self.retryable = needed <= total


class NoWorkers(Unavailable):
    """No worker of a needed role is ready."""


class QueueFull(Unavailable):
    """The waiting line is at its limit; the client should come back later."""


class WorkerDraining(Unavailable):
    """The worker finishes what it has and takes nothing new."""


class WorkerLost(Unavailable):
    """The worker died, froze or became unreachable while it held this request."""

    def __init__(self, worker_id: str, reason: str) -> None:
        super().__init__(f"worker {worker_id} is lost: {reason}")
        self.worker_id = worker_id
        self.reason = reason


class TransferError(ServingError):
    """The KV of one request did not arrive whole; prefilling again repairs it."""

    retryable = True


class LayoutMismatch(TransferError):
    """Two workers store KV in ways that cannot be matched; found when they meet, never per request."""

    retryable = False


class TransferRefused(TransferError):
    """The receiver knows no such transfer: it ended, expired, or belongs to an earlier life of the worker."""


class TransferDamaged(TransferError):
    """A frame failed its checksum or does not fit the transfer it names."""


class TransferTimeout(TransferError):
    """The blocks did not arrive within the lease."""


class DeadlineExceeded(ServingError):
    """The request's own deadline passed."""


class RequestCancelled(ServingError):
    """Nobody waits for the answer any more."""


class InternalError(ServingError):
    """A bug of ours ended this request, and only this one."""


class RankLost(InternalError):
    """A rank of this worker is gone, or failed in the middle of a step: no rank can go on without it.

    What the worker was asked for can be answered elsewhere.
    """

    retryable = True
