"""status: each error class has its row, and comes out of a call as it went in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from twinpool.core import errors
from twinpool.core.errors import ServingError
from twinpool.rpc.status import ERROR_KEY, MAX_ERROR_BYTES, STATUS_TABLE, error_of, status_of

ERRORS = [
    ServingError("odd"),
    errors.ConfigError("engine.block_tokens", "0 is less than 1"),
    errors.ModelError("--model", "no such folder"),
    errors.Untrusted("security.secret_file", "no token"),
    errors.InvalidRequest("top_p", "2.0 is more than 1"),
    errors.InvalidRequest(None, "not an object"),
    errors.PromptTooLong(needed_tokens=300, limit_tokens=256),
    errors.Unavailable("not now", retry_after_s=2.5),
    errors.NoFreeBlocks(needed=5, free=1, total=8),
    errors.NoFreeBlocks(needed=9, free=8, total=8),
    errors.NoWorkers("no decode worker", retry_after_s=3.0),
    errors.QueueFull("256 wait", retry_after_s=4.0),
    errors.WorkerDraining("leaving", retry_after_s=0.5),
    errors.WorkerLost("decode-1", "killed"),
    errors.TransferError("broken"),
    errors.LayoutMismatch("head_dim: 4 and 8"),
    errors.TransferRefused("unknown"),
    errors.TransferDamaged("checksum"),
    errors.TransferTimeout("3.0 s without a frame"),
    errors.DeadlineExceeded("late"),
    errors.RequestCancelled("gone"),
    errors.InternalError("a bug"),
    errors.RankLost("rank 1 is gone"),
]


def family(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from family(child)


def over_the_wire(error: ServingError) -> ServingError:
    code, detail, metadata = status_of(error)
    return error_of(call_error(code, detail, metadata), worker_id="me")


def call_error(code: grpc.StatusCode, detail: str = "", metadata: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), detail, None)


def fields(error: ServingError) -> dict[str, Any]:
    return {**vars(error), "message": str(error), "retryable": error.retryable}


def test_every_class_of_the_tree_has_a_row() -> None:
    own = [kind for kind in family(ServingError) if kind.__module__ == errors.__name__]

    assert [kind.__name__ for kind in own if kind not in STATUS_TABLE] == []
    assert {type(error) for error in ERRORS} == set(own)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_as_the_same_class_with_the_same_fields(error: ServingError) -> None:
    arrived = over_the_wire(error)

    assert type(arrived) is type(error)
    assert fields(arrived) == fields(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_is_told_as_success(error: ServingError) -> None:
    assert status_of(error)[0] is not grpc.StatusCode.OK


def test_a_class_made_elsewhere_travels_as_its_base() -> None:
    class FullUp(errors.QueueFull):
        pass

    arrived = over_the_wire(FullUp("full", retry_after_s=9.0))

    assert type(arrived) is errors.QueueFull
    assert fields(arrived) == fields(errors.QueueFull("full", retry_after_s=9.0))


@pytest.mark.parametrize("text", ["x" * 100_000, "\ud83d" * 5000, "\x00\n\u00e9" * 5000])
def test_a_text_of_any_length_and_kind_fits_into_the_metadata(text: str) -> None:
    code, detail, metadata = status_of(errors.InvalidRequest("p" * 100_000, text))

    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(metadata[0][1]) <= MAX_ERROR_BYTES
    assert len(detail.encode()) <= MAX_ERROR_BYTES
    assert isinstance(over_the_wire(errors.WorkerDraining(text)), errors.WorkerDraining)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
def test_a_call_that_the_transport_ended_is_a_lost_worker(code: grpc.StatusCode) -> None:
    error = error_of(call_error(code, "Socket closed"), worker_id="decode-1")

    assert isinstance(error, errors.WorkerLost)
    assert (error.worker_id, error.reason) == ("decode-1", "Socket closed")


def test_a_deadline_that_passed_is_the_requests_own() -> None:
    error = error_of(call_error(grpc.StatusCode.DEADLINE_EXCEEDED), worker_id="decode-1")

    assert isinstance(error, errors.DeadlineExceeded)


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED]
)
def test_any_other_status_is_a_bug_of_ours(code: grpc.StatusCode) -> None:
    error = error_of(call_error(code, "what"), worker_id="decode-1")

    assert isinstance(error, errors.InternalError)
    assert str(error) == f"worker decode-1 answered {code.name}: what"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"class": "SystemExit", "fields": {"message": "x"}}',
        b'{"class": "NoFreeBlocks", "fields": {"needed": "1", "free": 1, "total": 1}}',
        b'{"class": "NoFreeBlocks", "fields": {"needed": true, "free": 1, "total": 1}}',
        b'{"class": "QueueFull", "fields": {"message": "x", "retry_after_s": NaN}}',
        b'{"class": ["QueueFull"], "fields": {}}',
        b'{"class": "QueueFull", "fields": 3}',
        b"[" * 4000,
        json.dumps({"class": "InternalError", "fields": {"message": "x" * 5000}}).encode(),
    ],
)
def test_metadata_that_is_not_ours_leaves_the_code_to_speak(payload: bytes) -> None:
    error = error_of(
        call_error(grpc.StatusCode.UNAVAILABLE, "gone", ((ERROR_KEY, payload),)), worker_id="decode-1"
    )

    assert isinstance(error, errors.WorkerLost)
    assert error.reason == "gone"
