"""The outermost layer: what holds for every request, whatever its path.

In this order: size of the headers, an id, the site that asks where there is no API key, the API key.  Every
route but the open ones asks for the key, unknown paths too.  No error of one request goes further than here,
and what a client wrote never gets into the log.
"""

from __future__ import annotations

import hmac
import logging
import re
import traceback
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.http.config import HTTPConfig
from router.http.errors import (
    ForeignPage,
    HeadersTooLarge,
    Unauthorized,
    error_bytes,
    error_headers,
    verdict_of,
)
from router.http.path_header import path_header
from router.http.same_site import foreign_page
from twinpool.core.errors import InternalError, ServingError
from twinpool.core.timeline import RequestTimeline

ID_HEADER = b"x-request-id"
PATH_HEADER = b"x-twinpool-path"
OPEN_PATHS = frozenset({"/health", "/ready"})

_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ORIGIN = re.compile(r"https?://[^/]*", re.IGNORECASE)

_log = logging.getLogger("twinpool.http")


class Edge:
    """Wraps the application.

    Args:
        app: Everything else.
        config: The key and the limits.
    """

    def __init__(self, app: ASGIApp, config: HTTPConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise InternalError(f"no {scope['type']} here")
        request_id = _client_id(scope) or f"req-{uuid.uuid4().hex}"
        scope["twinpool.request_id"] = request_id
        scope["path"] = _path_of_target(scope["path"])
        reply = _Reply(scope, receive, send, request_id)
        try:
            self._check(scope)
            await self._app(scope, reply.receive, reply.send)
        except Exception as error:  # noqa: BLE001 - the end of the request; the server goes on
            await reply.fail(logged(error, request_id))

    def _check(self, scope: Scope) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if size > self._config.max_header_bytes:
            raise HeadersTooLarge(f"the headers have more than {self._config.max_header_bytes} bytes")
        key = self._config.api_key
        if key is None and (proof := foreign_page(scope, host=self._config.host)) is not None:
            raise ForeignPage(f"a page of another site asks ({proof}); with an API key any site may")
        if key is not None and scope["path"] not in OPEN_PATHS and not _has_key(scope, key):
            raise Unauthorized("a valid API key is needed, as in: Authorization: Bearer KEY")


def request_id_of(scope: Scope) -> str:
    """Return the id that the client of this request sees."""
    request_id: str = scope["twinpool.request_id"]
    return request_id


def logged(error: Exception, request_id: str) -> ServingError:
    """Log what the client is not told of an error, and return what it may know.

    A bug is logged by its class and place, and not by its message, which may hold what a client wrote.
    """
    if isinstance(error, ServingError):
        if verdict_of(error).message is not None:
            _log.warning("request %s failed: %s: %s", request_id, type(error).__name__, error)
        return error
    frames = reversed(traceback.extract_tb(error.__traceback__))
    where = " < ".join([type(error).__name__, *(f"{frame.filename}:{frame.lineno}" for frame in frames)])
    _log.error("request %s failed: %s", request_id, where)
    return InternalError("a bug ended this request")


def set_timelines(scope: Scope, timelines: Sequence[RequestTimeline]) -> None:
    """Tell whose way through the workers the answer's headers shall name."""
    scope["twinpool.timelines"] = timelines


class _Reply:
    """What was sent of the answer to one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._receive = receive
        self._send = send
        self._request_id = request_id
        self._scope = scope
        self._is_started = False
        self._error: ServingError | None = None
        # Whether the client would take the next request's bytes for a body it was never asked to send.
        self._must_close = any(name == b"expect" for name, _ in scope["headers"])

    async def receive(self) -> Message:
        self._must_close = False
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._is_started = True
            headers = list(message.get("headers", []))
            headers.append((ID_HEADER, self._request_id.encode()))
            timelines = self._scope.get("twinpool.timelines", ())
            if (path := path_header(timelines, error=self._error)) is not None:
                headers.append((PATH_HEADER, path.encode()))
            if self._must_close:
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, error: ServingError) -> None:
        """Answer with ``error``; once an answer has begun it stays cut, which clients see."""
        if self._is_started:
            return
        self._error = error
        body = error_bytes(error)
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error_headers(error),
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.send(
            {"type": "http.response.start", "status": verdict_of(error).status, "headers": encoded}
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _path_of_target(target: str) -> str:
    """Return a path without a slash at its end; the host, which a target may name, does not matter.

    Source: RFC 9112, 3.2.2 (a server must accept the absolute form).
    """
    origin = _ORIGIN.match(target)
    return target[origin.end() if origin else 0 :].rstrip("/") or "/"


def _client_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == ID_HEADER:
            text: str = value.decode("latin-1")
            return text if _CLIENT_ID.fullmatch(text) else None
    return None


def _has_key(scope: Scope, key: str) -> bool:
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    return len(sent) == 1 and hmac.compare_digest(sent[0], f"Bearer {key}".encode())
