"""One whole answer of a server's other routes: which models there are, how a text is cut, what happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from twinpool.core.errors import Unavailable
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.response import Response
from twinpool.lab.bench.strangers import printable, read_json
from twinpool.lab.bench.target import Target

_MAX_BYTES = 16 * 1024 * 1024


class _Fetch:
    """An exchange that keeps the body; ``where`` begins its errors."""

    def __init__(self, request: bytes, where: str) -> None:
        self.request = request
        self._where = where
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._body = bytearray()
        self._response = Response(self._on_body)

    def started(self, now_s: float) -> None:
        self._body.clear()

    def response(self) -> Response:
        self._response = Response(self._on_body)
        return self._response

    def received(self, now_s: float) -> None:
        pass

    def ended(self, error: str, now_s: float, reason: str = "") -> None:
        if self.done.done():
            return
        status = self._response.status
        if error or status != 200:
            told = printable(reason if error else bytes(self._body[:500]).decode("utf-8", "replace"))
            problem = f"{self._where}: {error or status} {told}"
            self.done.set_exception(Unavailable(problem))
            return
        try:
            self.done.set_result(read_json(self._body))
        except ValueError:
            self.done.set_exception(Unavailable(f"{self._where}: the answer is not JSON"))

    def _on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")


async def fetch(
    pool: ConnectionPool,
    target: Target,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
) -> Any:
    """Return the JSON at a path, or what answers ``body`` there.

    Raises:
        Unavailable: Nobody answers in time, or with something else.
    """
    data = b"" if body is None else json.dumps(body).encode()
    where = f"{target.host}:{target.port}{target.prefix}{path}"
    exchange = _Fetch(target.request("GET" if body is None else "POST", path, data), where)
    pool.begin(exchange)
    try:
        async with asyncio.timeout(timeout_s):
            return await exchange.done
    except TimeoutError:
        raise Unavailable(f"{where}: no answer within {timeout_s} s") from None
    finally:
        pool.give_up(exchange)
