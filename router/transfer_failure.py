"""What follows a failed transfer: three answers to one question, one of which an operator chooses.

Each is asked once per failure and says who computes the next attempt, all of it; None leaves that to the
routing policy, away from the workers of the pair that failed.  Raising ends the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from router.claim import Claim
from router.config import OnTransferFailure
from router.workers import WorkerHandle
from twinpool.core.errors import TransferError


def retry_other_pair(_error: TransferError, _claim: Claim) -> WorkerHandle | None:
    """Let other workers try."""
    return None


def recompute_on_decode(_error: TransferError, claim: Claim) -> WorkerHandle | None:
    """Stay with the decode worker; without a transfer there is none that could fail."""
    return claim.decode


def fail(error: TransferError, _claim: Claim) -> WorkerHandle | None:
    """Tell the client.

    Raises:
        TransferError: ``error``.
    """
    raise error


STRATEGIES: Mapping[OnTransferFailure, Callable[[TransferError, Claim], WorkerHandle | None]] = {
    OnTransferFailure.RETRY_OTHER_PAIR: retry_other_pair,
    OnTransferFailure.RECOMPUTE_ON_DECODE: recompute_on_decode,
    OnTransferFailure.FAIL: fail,
}
