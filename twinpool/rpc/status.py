"""The one table between ServingError classes and gRPC status codes.

The code is for people and foreign clients.  Our own clients get the very class with its fields back:
both travel in the call's trailing metadata as a small JSON object, bounded in size.  Nothing in it is
evaluated: the class name picks a row of the table, and the row builds the error from checked fields.

    class               code                  who acts
    InvalidRequest      INVALID_ARGUMENT      the caller
    ConfigError         FAILED_PRECONDITION   the operator
    Untrusted           UNAUTHENTICATED       the operator
    Unavailable         UNAVAILABLE or        the router, elsewhere or later
                        RESOURCE_EXHAUSTED
    TransferError       ABORTED, DATA_LOSS    the router, by prefilling again
    DeadlineExceeded    DEADLINE_EXCEEDED     nobody
    RequestCancelled    CANCELLED             nobody
    InternalError       INTERNAL              us
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from twinpool.core import errors
from twinpool.core.errors import DeadlineExceeded, InternalError, ServingError, WorkerLost

ERROR_KEY = "twinpool-error-bin"
MAX_TEXT_CHARS = 400  # of one field; a longer text is cut
MAX_ERROR_BYTES = 4096  # of the JSON: gRPC takes 8 KiB of metadata by default


class Fields:
    """The fields of an error that arrived; a missing or mistyped one raises ValueError."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str):
            raise ValueError(name)
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._values.get(name) is None else self.text(name)

    def integer(self, name: str) -> int:
        value = self._values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(name)
        return value

    def seconds(self, name: str) -> float:
        value = self._values.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(name)
        return float(value)


@dataclass(frozen=True, slots=True)
class StatusRow:
    """How one class travels."""

    code: grpc.StatusCode
    fields: tuple[str, ...]  # attributes to carry; "message" is the error's text
    build: Callable[[Fields], ServingError]


def _with_message(code: grpc.StatusCode, kind: type[ServingError]) -> StatusRow:
    return StatusRow(code, ("message",), lambda f: kind(f.text("message")))


def _with_retry(code: grpc.StatusCode, kind: type[errors.Unavailable]) -> StatusRow:
    return StatusRow(
        code,
        ("message", "retry_after_s"),
        lambda f: kind(f.text("message"), retry_after_s=f.seconds("retry_after_s")),
    )


def _with_setting(code: grpc.StatusCode, kind: type[errors.ConfigError]) -> StatusRow:
    return StatusRow(
        code,
        ("field", "problem"),
        lambda f: kind(f.text("field"), f.text("problem")),
    )


STATUS_TABLE: dict[type[ServingError], StatusRow] = {
    ServingError: _with_message(grpc.StatusCode.INTERNAL, ServingError),
    errors.ConfigError: _with_setting(grpc.StatusCode.FAILED_PRECONDITION, errors.ConfigError),
    errors.ModelError: _with_setting(grpc.StatusCode.FAILED_PRECONDITION, errors.ModelError),
    errors.Untrusted: _with_setting(grpc.StatusCode.UNAUTHENTICATED, errors.Untrusted),
    errors.InvalidRequest: StatusRow(
        grpc.StatusCode.INVALID_ARGUMENT,
        ("param", "problem"),
        lambda f: errors.InvalidRequest(f.optional_text("param"), f.text("problem")),
    ),
    errors.PromptTooLong: StatusRow(
        grpc.StatusCode.INVALID_ARGUMENT,
        ("needed_tokens", "limit_tokens"),
        lambda f: errors.PromptTooLong(
            needed_tokens=f.integer("needed_tokens"), limit_tokens=f.integer("limit_tokens")
        ),
    ),
    errors.Unavailable: _with_retry(grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
    errors.NoFreeBlocks: StatusRow(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        ("needed", "free", "total"),
        lambda f: errors.NoFreeBlocks(
            needed=f.integer("needed"), free=f.integer("free"), total=f.integer("total")
        ),
    ),
    errors.NoWorkers: _with_retry(grpc.StatusCode.UNAVAILABLE, errors.NoWorkers),
    errors.QueueFull: _with_retry(grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFull),
    errors.WorkerDraining: _with_retry(grpc.StatusCode.UNAVAILABLE, errors.WorkerDraining),
    WorkerLost: StatusRow(
        grpc.StatusCode.UNAVAILABLE,
        ("worker_id", "reason"),
        lambda f: WorkerLost(f.text("worker_id"), f.text("reason")),
    ),
    errors.TransferError: _with_message(grpc.StatusCode.ABORTED, errors.TransferError),
    errors.LayoutMismatch: _with_message(grpc.StatusCode.FAILED_PRECONDITION, errors.LayoutMismatch),
    errors.TransferRefused: _with_message(grpc.StatusCode.ABORTED, errors.TransferRefused),
    errors.TransferDamaged: _with_message(grpc.StatusCode.DATA_LOSS, errors.TransferDamaged),
    errors.TransferTimeout: _with_message(grpc.StatusCode.ABORTED, errors.TransferTimeout),
    DeadlineExceeded: _with_message(grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
    errors.RequestCancelled: _with_message(grpc.StatusCode.CANCELLED, errors.RequestCancelled),
    InternalError: _with_message(grpc.StatusCode.INTERNAL, InternalError),
    errors.RankLost: _with_message(grpc.StatusCode.INTERNAL, errors.RankLost),
}

_CLASS_NAMES = {kind.__name__: kind for kind in STATUS_TABLE}
_LOST_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: ServingError) -> NoReturn:
    """End the call with the error's code, its text, and its class and fields in the trailing metadata."""
    code, detail, metadata = status_of(error)
    await context.abort(code, detail, metadata)
    raise AssertionError("abort raises")


def status_of(error: ServingError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return code, detail and trailing metadata; a class without a row travels as its nearest base."""
    kind = next(base for base in type(error).__mro__ if base in STATUS_TABLE)
    row = STATUS_TABLE[kind]
    fields = {name: _short(str(error) if name == "message" else getattr(error, name)) for name in row.fields}
    payload = json.dumps({"class": kind.__name__, "fields": fields}).encode()
    if len(payload) > MAX_ERROR_BYTES:  # escapes can make six bytes of one character
        payload = b""
    return row.code, _short(str(error)), ((ERROR_KEY, payload),)


def error_of(
    call_error: grpc.aio.AioRpcError, *, worker_id: str, explain: Callable[[str], str] = str
) -> ServingError:
    """Return the error that ended a call.

    With our metadata it is the error the peer raised, class and fields.  Without, nobody on the other
    side got to say anything: a connection that broke, could not be made or was closed is a lost worker.

    Args:
        call_error: What gRPC raised.
        worker_id: Who was called.
        explain: Adds to gRPC's words what they mean.
    """
    sent = _error_in(call_error.trailing_metadata() or ())
    if sent is not None:
        return sent
    code = call_error.code()
    detail = _short(explain(call_error.details() or code.name))
    if code in _LOST_CODES:
        return WorkerLost(worker_id, detail)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the request's deadline passed while a worker had it")
    return InternalError(f"worker {worker_id} answered {code.name}: {detail}")


def _error_in(metadata: Iterable[Any]) -> ServingError | None:
    """The error in trailing metadata, or None when there is none that can be read."""
    payload = next((value for key, value in metadata if key == ERROR_KEY), b"")
    if not payload or len(payload) > MAX_ERROR_BYTES:
        return None
    try:
        message = json.loads(payload)
        row = STATUS_TABLE[_CLASS_NAMES[message["class"]]]
        return row.build(Fields(dict(message["fields"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _short(value: Any) -> Any:
    """Cut a text, so that no error can outgrow the metadata, and replace what UTF-8 cannot hold."""
    if not isinstance(value, str):
        return value
    return value[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode("utf-8")
