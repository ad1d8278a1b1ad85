"""A uvicorn server that lives inside somebody else's event loop.

It installs no signal handler, writes no access log and configures no logging.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from router.http.config import HTTPConfig
from router.http.protocol import Connection
from twinpool.core.errors import ConfigError

LAST_WORDS_S = 1.0


class HTTPServer:
    """Serves ``app`` from ``start`` until ``stop``.

    Args:
        app: What answers.
        config: Where to listen, and the limits of one connection.
    """

    def __init__(self, app: ASGIApp, config: HTTPConfig) -> None:
        self._config = config
        connection = functools.partial(Connection, header_timeout_s=config.header_timeout_s)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=cast("type[asyncio.Protocol]", connection),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=max(1, round(config.keep_alive_s)),
                timeout_graceful_shutdown=round(config.stop_timeout_s),
                h11_max_incomplete_event_size=config.max_header_bytes,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self._port = config.port

    @property
    def port(self) -> int:
        """The port that is listened on; the real one after ``start``."""
        return self._port

    @property
    def url(self) -> str:
        """Where clients of this machine find the server."""
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "") else self._config.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Listen; returns when connections are accepted.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        listener = await _listen(self._config.host, self._config.port)
        self._port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http server")
        started = asyncio.create_task(self._server.is_up.wait())
        await asyncio.wait((self._task, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Accept nothing new, let open answers end for ``stop_timeout_s``, cut the rest.  Idempotent."""
        if self._task is None:
            return
        self._server.should_exit = True
        await self._task
        open_answers = set(self._server.server_state.tasks)
        if open_answers:  # cancelled by now; each says so to its client, if that still reads
            await asyncio.wait(open_answers, timeout=LAST_WORDS_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(*open_answers, return_exceptions=True)
        self._task = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signals alone."""
        yield


async def _listen(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError("http.port", f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener
