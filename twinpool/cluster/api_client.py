"""A small client of the HTTP API: what `complete`, `chat`, `status` and the demo need of it.

Knows JSON over HTTP and server-sent events; knows nothing of what stands behind the URL.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from twinpool.core.errors import ConfigError, InvalidRequest, ServingError, Unavailable

_TIMEOUT_S = 600.0  # for an answer
_LOOK_TIMEOUT_S = 30.0  # for what is only looked up


@dataclass(slots=True)
class Stream:
    """A streamed answer: its headers, and its chunks as they come."""

    headers: Mapping[str, str]
    chunks: Iterator[Mapping[str, Any]] = field(repr=False)


class ApiClient:
    """One server, one connection per call.

    Args:
        url: Of the server, without a path.
        api_key: Sent as a bearer token if it is not None.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = None
        if host is None or parts.scheme not in ("http", "https"):
            raise ConfigError("--url", f"{url} does not begin with http://HOST:PORT")
        if "@" in parts.netloc:  # it is not shown: a password may be in it
            raise ConfigError("--url", "has a name or a password before the host; a key goes with --api-key")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = host, port
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``.

        Raises:
            ServingError: The server does not answer, or answers with an error.
        """
        with self._call("GET", path, None, timeout_s=_LOOK_TIMEOUT_S) as reply:
            return json.loads(reply.read())

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = _TIMEOUT_S) -> Any:
        """Return the JSON that answers ``body``; raises as ``get``."""
        with self._call("POST", path, body, timeout_s=timeout_s) as reply:
            return json.loads(reply.read())

    @contextmanager
    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Stream]:
        """Ask for an answer in chunks; raises as ``get``, and so does the iteration.

        A stream that ends without ``[DONE]`` raises too: it was cut.
        """
        with self._call("POST", path, {**body, "stream": True}, timeout_s=_TIMEOUT_S) as reply:
            yield Stream({name.lower(): value for name, value in reply.getheaders()}, _chunks(reply))

    @contextmanager
    def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, self._headers)
            reply = connection.getresponse()
            if reply.status >= 400:
                raise _error_of(reply)
            yield reply
        except ConnectionRefusedError:
            raise Unavailable(f"nothing listens at {self.url}: `twinpool serve` starts a server") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self.url} does not answer: {error or type(error).__name__}") from error
        except ValueError as error:
            raise Unavailable(f"{self.url} does not answer as twinpool does: {error}") from error
        finally:
            connection.close()


def _chunks(reply: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    for raw in reply:
        line = raw.decode("utf-8").strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise Unavailable(str(event["error"].get("message")))
            yield event
    raise Unavailable("the answer was cut")


def _error_of(reply: http.client.HTTPResponse) -> ServingError:
    text = reply.read().decode(errors="replace")
    try:
        error = json.loads(text)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return Unavailable(f"HTTP {reply.status}: {text[:200]}")
    if reply.status < 500 and reply.status != 429:
        return InvalidRequest(
            None if param is None or message.startswith(str(param)) else str(param), message
        )
    return Unavailable(message)
