"""The one table from errors to HTTP answers, in the shape OpenAI's clients parse.

    ServingError (twinpool.core.errors)
    |-- InvalidRequest
    |   |-- ModelNotFound      404: the model named is not the one served
    |   `-- MalformedBody      400: no JSON object could be read
    `-- HTTPRefusal            refused for the way it was sent, not for what it asks
        |-- Unauthorized       401
        |-- ForeignPage        403
        |-- NotFound           404
        |-- MethodNotAllowed   405
        |-- BodyTimeout        408
        |-- BodyTooLarge       413
        `-- HeadersTooLarge    431

It knows no route.  Messages of bugs and of broken transfers stay inside: the client gets a plain sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from twinpool.core.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoFreeBlocks,
    NoWorkers,
    PromptTooLong,
    QueueFull,
    RequestCancelled,
    ServingError,
    TransferError,
    TransferTimeout,
    Unavailable,
    Untrusted,
    WorkerDraining,
    WorkerLost,
)


class ModelNotFound(InvalidRequest):
    """The request names a model that is not served here."""

    def __init__(self, served: str) -> None:
        super().__init__("model", f"no such model; this server has {served}")


class MalformedBody(InvalidRequest):
    """The body is no JSON object."""

    def __init__(self, problem: str) -> None:
        super().__init__(None, problem)


class HTTPRefusal(ServingError):
    """A request refused for the way it was sent."""


class Unauthorized(HTTPRefusal):
    """The API key is missing or wrong."""


class ForeignPage(HTTPRefusal):
    """A page of another site asks through somebody's browser, and there is no API key to tell them apart."""


class NotFound(HTTPRefusal):
    """Nothing lives at this path, or under this id."""


class MethodNotAllowed(HTTPRefusal):
    """The path exists for other methods.

    Args:
        allowed: Those methods, as the header spells them.
    """

    def __init__(self, *, allowed: str) -> None:
        super().__init__(f"this path takes {allowed}")
        self.allowed = allowed


class BodyTimeout(HTTPRefusal):
    """The body came too slowly."""


class BodyTooLarge(HTTPRefusal):
    """The body has more bytes than allowed."""


class HeadersTooLarge(HTTPRefusal):
    """The request line and headers have more bytes than allowed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one class of error looks over HTTP."""

    status: int
    type: str
    code: str
    message: str | None = None  # said instead of the error's own words, which are for the log


VERDICTS: Mapping[type[ServingError], Verdict] = {
    ServingError: Verdict(500, "server_error", "internal_error", "the server failed on this request"),
    ConfigError: Verdict(500, "server_error", "internal_error", "the server failed on this request"),
    InternalError: Verdict(500, "server_error", "internal_error", "the server failed on this request"),
    InvalidRequest: Verdict(400, "invalid_request_error", "invalid_value"),
    PromptTooLong: Verdict(400, "invalid_request_error", "context_length_exceeded"),
    MalformedBody: Verdict(400, "invalid_request_error", "malformed_body"),
    ModelNotFound: Verdict(404, "invalid_request_error", "model_not_found"),
    Unauthorized: Verdict(401, "authentication_error", "invalid_api_key"),
    ForeignPage: Verdict(403, "permission_error", "foreign_page"),
    NotFound: Verdict(404, "invalid_request_error", "not_found"),
    MethodNotAllowed: Verdict(405, "invalid_request_error", "method_not_allowed"),
    BodyTimeout: Verdict(408, "invalid_request_error", "body_timeout"),
    BodyTooLarge: Verdict(413, "invalid_request_error", "body_too_large"),
    HeadersTooLarge: Verdict(431, "invalid_request_error", "headers_too_large"),
    HTTPRefusal: Verdict(400, "invalid_request_error", "refused"),
    QueueFull: Verdict(429, "rate_limit_error", "queue_full"),
    Unavailable: Verdict(503, "service_unavailable_error", "unavailable"),
    NoFreeBlocks: Verdict(503, "service_unavailable_error", "no_free_blocks"),
    NoWorkers: Verdict(503, "service_unavailable_error", "no_workers"),
    WorkerDraining: Verdict(503, "service_unavailable_error", "worker_draining"),
    WorkerLost: Verdict(
        503, "service_unavailable_error", "worker_lost", "the worker of this request is lost"
    ),
    Untrusted: Verdict(
        502, "server_error", "untrusted", "the router and its workers do not trust each other"
    ),
    TransferError: Verdict(502, "server_error", "transfer_failed", "the KV of this request did not arrive"),
    TransferTimeout: Verdict(504, "server_error", "transfer_timeout", "the KV did not arrive in time"),
    DeadlineExceeded: Verdict(504, "timeout_error", "deadline_exceeded"),
    RequestCancelled: Verdict(499, "request_cancelled", "request_cancelled"),
}


def verdict_of(error: ServingError) -> Verdict:
    """Return the verdict on the nearest class of ``error`` that has one."""
    for kind in type(error).__mro__:
        if issubclass(kind, ServingError) and kind in VERDICTS:
            return VERDICTS[kind]
    raise AssertionError("ServingError itself has a verdict")


def error_body(error: ServingError) -> dict[str, object]:
    """Return the JSON object that tells a client of ``error``."""
    verdict = verdict_of(error)
    return {
        "error": {
            "message": verdict.message or str(error) or type(error).__name__,
            "type": verdict.type,
            "param": error.param if isinstance(error, InvalidRequest) else None,
            "code": verdict.code,
        }
    }


def error_bytes(error: ServingError) -> bytes:
    """Return ``error_body`` as JSON."""
    return json.dumps(error_body(error)).encode()


def error_headers(error: ServingError) -> dict[str, str]:
    """Return the headers that go with ``error``."""
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, MethodNotAllowed):
        return {"allow": error.allowed}
    if isinstance(error, Unavailable):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return {}
