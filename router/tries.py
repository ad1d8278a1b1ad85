"""What one answer has been through: how often it failed, and which workers failed or refused it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.claim import Claim
from router.config import OnTransferFailure
from router.tenure import Reassigned
from router.transfer_failure import STRATEGIES
from router.workers import WorkerHandle, WorkerState
from twinpool.core.errors import (
    NoFreeBlocks,
    QueueFull,
    RequestCancelled,
    ServingError,
    TransferError,
    WorkerDraining,
    WorkerLost,
)
from twinpool.core.ports import Role

REFUSALS = (NoFreeBlocks, QueueFull, WorkerDraining)
"""Before the first token: the worker had no room and did nothing, so asking again is not another attempt."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A worker's life, and how far it was when something went wrong there."""

    handle: WorkerHandle
    count: int


@dataclass(frozen=True, slots=True)
class Recomputation:
    """The next attempt, if it is to be without a transfer."""

    worker: WorkerHandle  # computes all of it
    reason: str  # class of the error that ended the transfer


class Tries:
    """Bounds the attempts of one answer.

    Args:
        max_attempts: Attempts that may fail after a worker took them up; the last error is the client's.
        on_transfer_failure: What follows a failed transfer.
    """

    def __init__(self, *, max_attempts: int, on_transfer_failure: OnTransferFailure) -> None:
        self.num_failed = 0
        self._max_attempts = max_attempts
        self._after_transfer = STRATEGIES[on_transfer_failure]
        self._recomputation: Recomputation | None = None
        self._failures: dict[str, _Mark] = {}
        self._refusals: dict[str, _Mark] = {}

    def failed(self, error: ServingError, claim: Claim) -> None:
        """Write down that an attempt ended with ``error``.

        A worker that says "cancelled" to a router that waits has given the request up, as one does
        that stops: for the answer it is lost.

        Raises:
            ServingError: ``error``, if there must not be another attempt.
        """
        if isinstance(error, RequestCancelled):
            error = WorkerLost(claim.asked[0].worker_id, f"it gave the request up: {error}")
        if not error.retryable:
            raise error
        if is_refusal(error, claim):
            for handle in claim.asked:
                self._refusals[handle.worker_id] = _Mark(handle, handle.num_changes)
            return
        self._recomputation = None
        if isinstance(error, Reassigned) or _gave_way(
            error, claim
        ):  # once per role or life, nobody's failure
            return
        self.num_failed += 1
        if self.num_failed >= self._max_attempts:
            raise error
        for handle in suspects(error, claim):
            self._failures[handle.worker_id] = _Mark(handle, handle.num_heard)
        if isinstance(error, TransferError):
            worker = self._after_transfer(error, claim)
            self._recomputation = None if worker is None else Recomputation(worker, type(error).__name__)

    @property
    def recomputation(self) -> Recomputation | None:
        """The next attempt, if one worker is to compute all of it and still speaks."""
        planned = self._recomputation
        return planned if planned is not None and planned.worker.state is WorkerState.READY else None

    def avoidances(self) -> tuple[Callable[[WorkerHandle], bool], ...]:
        """Return which workers to leave out of the next attempt; the best choice first.

        Two workers that cannot reach each other fail every transfer between them, and both go on speaking.
        So a decode worker that speaks is asked without the prefill worker before it is asked with it again.
        """
        if not self._failures:
            return (self.is_suspect,)
        return (self.is_suspect, self._is_suspect_prefill_or_silent, self.is_silent)

    def is_suspect(self, handle: WorkerHandle) -> bool:
        """Return whether an attempt failed on this life of the worker."""
        mark = self._failures.get(handle.worker_id)
        return mark is not None and mark.handle is handle

    def is_silent(self, handle: WorkerHandle) -> bool:
        """Return whether an attempt failed there and the worker has not spoken since."""
        return self.is_suspect(handle) and self._failures[handle.worker_id].count == handle.num_heard

    def _is_suspect_prefill_or_silent(self, handle: WorkerHandle) -> bool:
        return self.is_silent(handle) or (handle.info.role is Role.PREFILL and self.is_suspect(handle))

    def is_full(self, handle: WorkerHandle) -> bool:
        """Return whether the worker refused this answer and nothing has changed there since."""
        mark = self._refusals.get(handle.worker_id)
        return mark is not None and mark.handle is handle and mark.count == handle.num_changes


def is_refusal(error: ServingError, claim: Claim) -> bool:
    """Return whether a worker only had no room, so that nothing was lost but time."""
    return isinstance(error, REFUSALS) and not claim.has_answered


def _gave_way(error: ServingError, claim: Claim) -> bool:
    """Return whether the worker that was lost has a successor that took its place while it worked."""
    workers = (handle for handle in (claim.prefill, claim.decode) if handle is not None)
    return isinstance(error, WorkerLost) and any(
        handle.worker_id == error.worker_id and handle.has_successor for handle in workers
    )


def suspects(error: ServingError, claim: Claim) -> tuple[WorkerHandle, ...]:
    """Return the workers that the next attempt avoids if it can."""
    involved = tuple(handle for handle in (claim.prefill, claim.decode) if handle is not None)
    if isinstance(error, WorkerLost):
        named = tuple(handle for handle in involved if handle.worker_id == error.worker_id)
        return named or claim.asked
    if isinstance(error, TransferError) and claim.ticket is not None:
        return involved
    return claim.asked
