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
import socket
import ssl
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from kv_transfer.addresses import listening, split, tune
from kv_transfer.arrivals import Arrivals, Known
from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.tcp_line.byte_stream import ByteStream, StreamLost
from kv_transfer.tcp_line.channel import TcpChannel
from kv_transfer.tcp_line.idle import IdleStreams
from kv_transfer.tcp_line.incoming import Incoming
from kv_transfer.tcp_line.tls_stream import secured
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferError, TransferTimeout, Untrusted
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party, TLSFiles, check_peer, names_in

_Place = tuple[int, int, int, str, Any]  # family, type, protocol, name, socket address


class TcpTransport:
    """A port of its own, and connections to peers that are kept for a while."""

    moves_tensors = False

    def __init__(self, config: TransferConfig, tls: TLSFiles | None) -> None:
        self._config = config
        self._server_tls = None if tls is None else tls.server_context()
        self._client_tls = None if tls is None else tls.client_context()
        self._listener, address = listening(config)
        self._endpoint = Endpoint("tcp", address)
        self._arrivals: Arrivals | None = None
        self._sending: set[TcpChannel] = set()
        self._idle = IdleStreams()

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return True

    async def start(self, sink: FrameSink) -> None:
        incoming = Incoming(sink, self._config)
        self._arrivals = Arrivals(self._listener, partial(self._serve, incoming))

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
        if self._arrivals is None:
            self._listener.close()
        else:
            self._arrivals.close()
            await self._arrivals.closed()
        for channel in list(self._sending):
            await channel.abort()
        self._idle.close()

    async def _connect(self, address: str) -> ByteStream:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            try:
                host, port = split(address)
                family, kind, _, _, place = await _resolved(host, port)
                end = stack.enter_context(socket.socket(family, kind))
                end.setblocking(False)
                tune(end)
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

    async def _serve(self, incoming: Incoming, end: socket.socket, known: Known) -> None:
        with ExitStack() as stack:
            stack.enter_context(end)
            async with asyncio.timeout(self._config.connect_timeout_s):
                tune(end)
                stream = await self._stream(end, self._server_tls, stack)
                hello = await incoming.first_hello(stream)
            await incoming.take(stream, hello, on_admitted=known)

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
