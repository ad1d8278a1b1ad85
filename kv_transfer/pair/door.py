"""Where the pairs of a rank meet their peers: a port, or a socket that only this machine has."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from kv_transfer.addresses import listening, split, tune
from kv_transfer.arrivals import Arrivals, Known
from kv_transfer.config import TransferConfig
from kv_transfer.pair.control import Control
from kv_transfer.this_host import bound, host_id, is_own_user
from twinpool.core.errors import TransferError, Untrusted
from twinpool.core.tls import Party, TLSFiles, check_peer, names_in

_BACKLOG = 128
_NAMESPACES = ("ipc", "net", "pid")  # that processes must share to share GPU memory

Connected = Callable[[Control], Awaitable[None]]


class Door(Protocol):
    """Takes connections and makes them.

    Attributes:
        address: What peers connect to.
    """

    address: str

    async def listen(self, connected: Connected) -> None:
        """Hand every peer that connects, and is trusted, to ``connected``."""
        ...

    def reaches(self, address: str) -> bool:
        """Return whether a peer's address is one that can be connected to."""
        ...

    async def connect(self, address: str) -> Control:
        """Meet a peer.

        Raises:
            TransferError: Nobody is there, or a stranger.
        """
        ...

    def close(self) -> None:
        """Take no more connections.  Idempotent."""
        ...


class TcpDoor:
    """A port of its own.

    Args:
        config: Where to listen.
        tls: Of this process; None where peers speak in clear.

    Raises:
        ConfigError: The address is taken or cannot be bound.
    """

    def __init__(self, config: TransferConfig, tls: TLSFiles | None) -> None:
        self._socket, self.address = listening(config)
        self._handshake_s = config.connect_timeout_s
        self._server_tls = None if tls is None else tls.server_context()
        self._client_tls = None if tls is None else tls.client_context()
        self._arrivals: Arrivals | None = None

    async def listen(self, connected: Connected) -> None:
        async def serve(end: socket.socket, known: Known) -> None:
            tune(end)
            await connected(await self._control(end))

        self._arrivals = Arrivals(self._socket, serve)

    def reaches(self, address: str) -> bool:
        return True

    async def connect(self, address: str) -> Control:
        name = None if self._client_tls is None else Party.WORKER.dns_name
        try:
            host, port = split(address)
            reader, writer = await asyncio.open_connection(
                host, port, ssl=self._client_tls, server_hostname=name
            )
        except (OSError, ValueError) as error:
            raise TransferError(f"{address}: {error}") from None
        tune(writer.get_extra_info("socket"))
        return Control(reader, writer)

    def close(self) -> None:
        if self._arrivals is None:
            self._socket.close()
        else:
            self._arrivals.close()

    async def _control(self, end: socket.socket) -> Control:
        """Find out who has connected.

        Raises:
            OSError: It does not say so in time, or has no certificate of our CA.
            Untrusted: It is no worker.
        """
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, protocol = await loop.connect_accepted_socket(
            lambda: asyncio.StreamReaderProtocol(reader),
            end,
            ssl=self._server_tls,
            ssl_handshake_timeout=None if self._server_tls is None else self._handshake_s,
        )
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            try:
                check_peer(names_in(tls.getpeercert()), Party.WORKER)
            except Untrusted:
                transport.abort()
                raise
        return Control(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


class LocalDoor:
    """A Unix socket without a file; only processes of the same user, in the same namespaces, get through.

    Its address is the machine, the name of the socket, and who listens there: a peer elsewhere knows that
    there is no way.

    Args:
        config: ``listen`` counts only if it is an address of this machine.
        identity: Of who listens.
        is_reached: Tells of another one's identity whether there is a way to it.

    Raises:
        ConfigError: The address is taken.
    """

    def __init__(self, config: TransferConfig, identity: str, is_reached: Callable[[str], bool]) -> None:
        self._host = host_id(*_NAMESPACES)
        self._is_reached = is_reached
        self._socket, name = bound(config.listen, self._host)
        self.address = f"{self._host}/{name}/{identity}"
        self._server: asyncio.Server | None = None

    async def listen(self, connected: Connected) -> None:
        async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_own_user(writer.get_extra_info("socket")):
                await connected(Control(reader, writer))
            else:
                writer.transport.abort()

        self._server = await asyncio.start_unix_server(check, sock=self._socket, backlog=_BACKLOG)

    def reaches(self, address: str) -> bool:
        host, _, identity = _parts(address)
        return host == self._host and self._is_reached(identity)

    async def connect(self, address: str) -> Control:
        try:
            reader, writer = await asyncio.open_unix_connection(f"\0{_parts(address)[1]}")
        except OSError as error:
            raise TransferError(f"{address}: {error}") from None
        if not is_own_user(writer.get_extra_info("socket")):
            writer.transport.abort()
            raise TransferError(f"{address}: another user listens there")
        return Control(reader, writer)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._socket.close()


def _parts(address: str) -> tuple[str, str, str]:
    host, _, rest = address.partition("/")
    name, _, identity = rest.partition("/")
    return host, name, identity
