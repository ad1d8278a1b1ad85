"""Between any two hosts: a TCP connection per part, in clear or under TLS, which later parts use again.

    sender                                        receiver
      | -- length, hello --------------------------> |
      | <- length, reply with the first credit ----- |
      | -- length, message ------------------------> |  read into a buffer, proved, copied into blocks
      | <- length, reply with more credit ---------- |
      | -- 0: that was all ------------------------> |
      | <- length, reply: how it ended ------------- |

Lengths are 4 bytes, little endian; hello, messages and replies are those of ``proto/kv.proto``.  A connection
on which a part was whole is kept; any other end of a part is its end too.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.stream.byte_stream import ByteStream, StreamLost
from kv_transfer.stream.channel import TcpChannel
from kv_transfer.stream.idle import IdleStreams
from kv_transfer.stream.incoming import Incoming
from kv_transfer.stream.tls_stream import secured
from kv_transfer.transport import FrameSink
from twinpool.core.errors import ConfigError, TransferError, TransferTimeout, Untrusted
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party, TLSFiles, check_peer, names_in

_MAX_STRANGERS = 64  # connections that have not shown a right to send; the oldest gives way to a new one
_RETRY_S = 0.05  # while this process has no room for one more
_WILDCARDS = ("", "0.0.0.0", "::")
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 3,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 15_000,  # ms
}

_Place = tuple[int, int, int, str, Any]  # family, type, protocol, name, socket address

_log = logging.getLogger(__name__)


class TcpTransport:
    """A port of its own, and connections to peers that are kept for a while."""

    moves_tensors = False

    def __init__(self, config: TransferConfig, tls: TLSFiles | None) -> None:
        self._config = config
        self._server_tls = None if tls is None else tls.server_context()
        self._client_tls = None if tls is None else tls.client_context()
        listen = config.listen or "127.0.0.1:0"
        self._listener = _listener(listen)
        host = config.advertise_host or _split(listen)[0]
        if host in _WILDCARDS:
            self._listener.close()
            raise ConfigError("transfer.advertise_host", f"needed, since no peer can connect to {listen}")
        self._endpoint = Endpoint("tcp", _joined(host, self._listener.getsockname()[1]))
        self._accepting: asyncio.Task[None] | None = None
        self._receiving: set[asyncio.Task[None]] = set()
        self._strangers: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self._sending: set[TcpChannel] = set()
        self._idle = IdleStreams()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return True

    async def start(self, sink: FrameSink) -> None:
        self._accepting = asyncio.create_task(self._accept(sink), name="tcp")

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> TcpChannel:
        try:
            async with asyncio.timeout(timeout_s):
                kept = self._idle.take(peer.address)
                if kept is not None:
                    with suppress(StreamLost):  # the peer has closed it, and this was not known yet
                        return await self._meet(kept, peer.address, hello)
                return await self._meet(await self._connect(peer.address), peer.address, hello)
        except TimeoutError:
            raise TransferTimeout(f"no answer from {peer.address} in {timeout_s:g} s") from None

    async def close(self) -> None:
        tasks = [*self._receiving, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        for channel in list(self._sending):
            await channel.abort()
        self._idle.close()

    async def _connect(self, address: str) -> ByteStream:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                host, port = _split(address)
                family, kind, _, _, place = await _resolved(host, port)
                end = stack.enter_context(socket.socket(family, kind))
                _tune(end)
                await loop.sock_connect(end, place)
                stream = await self._stream(end, self._client_tls, stack)
            except (OSError, ValueError, Untrusted) as error:
                raise TransferError(f"{address}: {error}") from None
            stack.pop_all()
        return stream

    async def _meet(self, stream: ByteStream, address: str, hello: Hello) -> TcpChannel:
        channel = TcpChannel(stream, address, self._idle)
        self._sending.add(channel)
        channel.on_end(self._sending.discard)
        try:
            await channel.meet(hello)
        except BaseException:
            await channel.abort()
            raise
        return channel

    async def _accept(self, sink: FrameSink) -> None:
        """Take connections until it is cancelled."""
        incoming = Incoming(sink, self._config)
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # this process has too many files open
                _log.warning("nobody can connect: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = asyncio.create_task(self._serve(end, incoming))
            self._receiving.add(task)
            self._strangers[end] = task
            task.add_done_callback(partial(self._forget, end))
            if len(self._strangers) > _MAX_STRANGERS:
                next(iter(self._strangers.values())).cancel()

    def _forget(self, end: socket.socket, task: asyncio.Task[None]) -> None:
        end.close()
        self._receiving.discard(task)
        self._strangers.pop(end, None)

    async def _serve(self, end: socket.socket, incoming: Incoming) -> None:
        with ExitStack() as stack:
            stack.enter_context(end)
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    _tune(end)
                    stream = await self._stream(end, self._server_tls, stack)
                    hello = await incoming.first_hello(stream)
                await incoming.take(stream, hello, on_admitted=partial(self._strangers.pop, end, None))
            except (OSError, TransferError, Untrusted) as error:  # TimeoutError is an OSError
                _log.info("a connection has ended: %s", error or "its peer said nothing")

    async def _stream(
        self, end: socket.socket, context: ssl.SSLContext | None, stack: ExitStack
    ) -> ByteStream:
        """Return the stream of a connected socket, once it is known who is there; ``stack`` closes it."""
        if context is None:
            stream = ByteStream(end)
        else:
            is_server = context is self._server_tls
            stream, tls = await secured(
                end,
                context,
                server_side=is_server,
                server_hostname=None if is_server else Party.WORKER.dns_name,
            )
            check_peer(names_in(tls.getpeercert()), Party.WORKER)
        stack.callback(stream.close)
        return stream


async def _resolved(host: str, port: int) -> _Place:
    """Return the first address of a host; a thread asks for it, unless it is one already."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return found[0]


def _tune(end: socket.socket) -> None:
    """Let small messages go at once, and a peer that vanished without a word be noticed within 15 s."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listener(address: str) -> socket.socket:
    try:
        host, port = _split(address)
        family, kind, _, _, place = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind))
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a worker may start again at once
            listener.bind(place)
            listener.listen()  # until then a second worker could bind it as well
            stack.pop_all()
    except (OSError, ValueError) as error:
        raise ConfigError("transfer.listen", f"{address} cannot be bound: {error}") from error
    return listener


def _split(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[HOST]:PORT``.

    Raises:
        ValueError: It is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address} is not of the form HOST:PORT")
    return host.strip("[]"), int(port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unavailable() -> str:
    """Return why this machine cannot use it: it can wherever a socket can gather."""
    return "" if hasattr(socket.socket, "sendmsg") else "its sockets cannot gather"


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> TcpTransport:
    """Create a worker's TCP transport and bind ``config.listen``, a ``HOST:PORT``; port 0 is any free one.

    It needs no hub: a peer is found by its address.

    Raises:
        ConfigError: The address is taken or cannot be bound, or a certificate cannot be used.
    """
    return TcpTransport(config, tls)
