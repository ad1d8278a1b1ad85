"""Every deliberate error has an HTTP answer of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from router.http.errors import VERDICTS, InvalidRequest, error_body, error_headers, verdict_of
from twinpool.core.errors import (
    InternalError,
    LayoutMismatch,
    PromptTooLong,
    QueueFull,
    ServingError,
    TransferDamaged,
    Unavailable,
    Untrusted,
    WorkerLost,
)


def tree(kind: type[ServingError] = ServingError) -> Iterator[type[ServingError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from tree(child)


def test_the_whole_tree_has_a_status_and_only_clients_mistakes_are_4xx() -> None:
    ours = [kind for kind in tree() if kind.__module__ in ("twinpool.core.errors", "router.http.errors")]

    for kind in ours:
        verdict = next(VERDICTS[each] for each in kind.__mro__ if each in VERDICTS)
        is_client = issubclass(kind, InvalidRequest) or kind.__module__ == "router.http.errors"
        is_asked_to_wait = kind.__name__ in ("QueueFull", "RequestCancelled")
        assert (400 <= verdict.status < 500) == (is_client or is_asked_to_wait), kind
    assert len(ours) > 25


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (QueueFull("full"), 429, "queue_full"),
        (Unavailable("no"), 503, "unavailable"),
        (WorkerLost("w", "died"), 503, "worker_lost"),
        (PromptTooLong(needed_tokens=9, limit_tokens=8), 400, "context_length_exceeded"),
        (TransferDamaged("bad"), 502, "transfer_failed"),
        (LayoutMismatch("differs"), 502, "transfer_failed"),
        (Untrusted("security.secret_file", "secret"), 502, "untrusted"),
        (InternalError("secret"), 500, "internal_error"),
    ],
)
def test_an_error_gets_the_verdict_of_its_nearest_class(error: ServingError, status: int, code: str) -> None:
    assert (verdict_of(error).status, verdict_of(error).code) == (status, code)
    assert "secret" not in str(error_body(error))


def test_unavailable_says_when_to_come_back_in_whole_seconds() -> None:
    assert error_headers(Unavailable("no", retry_after_s=2.1)) == {"retry-after": "3"}
    assert error_headers(QueueFull("no", retry_after_s=0.1)) == {"retry-after": "1"}
