"""Between processes and hosts: one gRPC stream per part over one kept connection per peer.

The messages are described in ``proto/kv.proto``.  Uses ``grpc.aio`` on the caller's event loop and no thread
of its own.  With TLS, both ends show a worker's certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress

import grpc
import grpc.aio

from kv_transfer.addresses import joined, where_to_listen
from kv_transfer.config import MAX_MESSAGE_BYTES, TransferConfig
from kv_transfer.credit import Credit
from kv_transfer.frame import Frame
from kv_transfer.heap import keep_freed_memory
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.intake import take_in
from kv_transfer.messages import (
    credit_reply,
    end_reply,
    hello_from_bytes,
    hello_to_bytes,
    pack,
    read_reply,
    unpack,
)
from kv_transfer.transport import FrameSink
from twinpool.core.errors import ConfigError, TransferDamaged, TransferError, TransferTimeout, Untrusted
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party, TLSFiles, check_peer

_Context = grpc.aio.ServicerContext[bytes, bytes]
_SERVICE, _METHOD = "twinpool.v1.KVTransfer", "Push"
_GRACE_S = 0.1  # peers are told to leave before their streams are cut

# Frame, window, read chunk and write buffer sizes, zero-copy sends, more streams and more connections were
# measured and change nothing; gRPC ignores a name that it does not know, so a test looks for each of these.
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A host that vanished without a word is noticed within 15 s; a process that died, at once.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # without it gRPC waits a minute for a ping's answer
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
_SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.so_reuseport", 0),  # two workers on one port would each get half of the transfers
    ("grpc.max_concurrent_streams", 1024),  # parts of one peer at once; a stranger's too
    ("grpc.max_connection_idle_ms", 60_000),  # of one that says what HTTP/2 wants, and then nothing
    ("grpc.max_allowed_incoming_connections", 4096),  # so that strangers leave files for the other ports
)
_HANDSHAKE_OPTIONS = (
    "grpc.server_handshake_timeout_ms",
    "grpc.http2.settings_timeout",
)  # of silent strangers
_CHANNEL_OPTIONS = (
    *_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # KV never goes through a proxy that the environment names
    ("grpc.use_local_subchannel_pool", 1),  # a new channel knows nothing of an old one's back-off
)
_FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class GrpcTransport:
    """A server of its own and the connections to peers that are there."""

    moves_tensors = False

    def __init__(self, config: TransferConfig, tls: TLSFiles | None) -> None:
        self._config = config
        self._tls = tls
        handshake_ms = round(config.connect_timeout_s * 1000)
        handshake = ((name, handshake_ms) for name in _HANDSHAKE_OPTIONS)
        self._server = grpc.aio.server(options=(*_SERVER_OPTIONS, *handshake))
        listen, host = where_to_listen(config)
        try:
            port = self._bind(listen)
        except RuntimeError as error:
            raise ConfigError("transfer.listen", f"{listen} cannot be bound: {error}") from error
        self._endpoint = Endpoint("grpc", joined(host, port))
        self._connections: list[_Connection] = []

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def start(self, sink: FrameSink) -> None:
        service = _PushService(sink, self._config, needs_certificate=self._tls is not None)
        handler = grpc.stream_stream_rpc_method_handler(service.push)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
        )
        await self._server.start()

    def reaches(self, peer: Endpoint) -> bool:
        return True

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> GrpcChannel:
        await self._drop_unneeded()
        connection = self._connection(peer.address)
        channel = connection.new_channel()
        try:
            async with asyncio.timeout(timeout_s):
                await channel.meet(hello)
        except TimeoutError:
            connection.is_suspect = True
            await channel.abort()
            raise TransferTimeout(f"no answer from {peer.address} in {timeout_s:g} s") from None
        except BaseException:
            await channel.abort()
            raise
        return channel

    async def close(self) -> None:
        connections, self._connections = self._connections, []
        for connection in connections:
            await connection.close()
        await self._server.stop(grace=_GRACE_S)

    def _bind(self, listen: str) -> int:
        if self._tls is None:
            return self._server.add_insecure_port(listen)
        pairs = [(self._tls.key, self._tls.cert)]
        credentials = grpc.ssl_server_credentials(
            pairs, root_certificates=self._tls.ca, require_client_auth=True
        )
        return self._server.add_secure_port(listen, credentials)

    def _connection(self, address: str) -> _Connection:
        """Return the kept connection, or a new one after a failure: a restarted peer is reached at once."""
        for kept in self._connections:
            if kept.address == address and not kept.has_failed:
                return kept
        connection = _Connection(address, self._tls)
        self._connections.append(connection)
        return connection

    async def _drop_unneeded(self) -> None:
        """Close connections that nothing goes over and that lead nowhere: their peers are gone."""
        unneeded = [connection for connection in self._connections if not connection.is_needed]
        self._connections = [connection for connection in self._connections if connection.is_needed]
        for connection in unneeded:
            await connection.close()


class _Connection:
    """A connection to a peer, kept from one transfer to the next."""

    def __init__(self, address: str, tls: TLSFiles | None) -> None:
        self.address = address
        self.is_suspect = False  # the peer did not answer on it
        self._num_parts = 0  # that go over it
        target = f"dns:///{address}"  # whatever gRPC would make of the address otherwise: a path, a list
        if tls is None:
            self._channel = grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
            return
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.ca, private_key=tls.key, certificate_chain=tls.cert
        )
        named = (*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", Party.WORKER.dns_name))
        self._channel = grpc.aio.secure_channel(target, credentials, options=named)

    @property
    def has_failed(self) -> bool:
        return self.is_suspect or self._channel.get_state() in _FAILED

    @property
    def is_needed(self) -> bool:
        is_up = self._channel.get_state() is grpc.ChannelConnectivity.READY and not self.is_suspect
        return is_up or self._num_parts > 0

    def new_channel(self) -> GrpcChannel:
        """Begin a stream."""
        # No serializers: messages are raw bytes.
        push = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}", None, None)
        self._num_parts += 1
        return GrpcChannel(push(None), self.address, on_end=self._note_end)

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _note_end(self) -> None:
        self._num_parts -= 1


class GrpcChannel:
    """The sender's half of a stream; ``on_end`` is called once."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
        address: str,
        *,
        on_end: Callable[[], None],
    ) -> None:
        self._call = call
        self._address = address
        self._on_end = on_end
        self._credit = Credit()
        self._met = asyncio.Event()
        self._replies = asyncio.create_task(self._read_replies())
        self._replies.add_done_callback(self._note_end)

    async def meet(self, hello: Hello) -> None:
        """Name the part and wait for the first credit."""
        await self._write(hello_to_bytes(hello))
        await self._met.wait()
        if self._replies.done():
            await self.ended()

    async def send(self, frames: Sequence[Frame]) -> None:
        await self._credit.take(sum(frame.payload.nbytes for frame in frames))
        if self._replies.done():
            await self.ended()
        else:
            await self._write(pack(frames))

    async def finish(self) -> None:
        if not self._replies.done():
            # A connection that breaks in this moment tells what happened through the replies.
            with suppress(grpc.aio.InternalError):
                await self._call.done_writing()
        await self.ended()

    async def ended(self) -> None:
        await asyncio.wait({self._replies})
        if self._replies.cancelled():
            raise TransferError("the transfer was aborted")
        self._replies.result()

    async def abort(self) -> None:
        self._call.cancel()
        self._replies.cancel()
        await asyncio.wait({self._replies})

    async def _write(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.ended()

    async def _read_replies(self) -> None:
        """Pass on credit until the receiver ends the transfer; return when it is whole."""
        try:
            async for data in self._call:
                credit_bytes = read_reply(data, address=self._address)
                if credit_bytes is None:
                    return
                self._credit.grant(credit_bytes)
                self._met.set()
        except grpc.aio.AioRpcError as error:
            raise TransferError(f"{self._address}: {error.code().name}: {error.details()}") from None
        raise TransferError(f"{self._address}: the stream ended without a word")

    def _note_end(self, replies: asyncio.Task[None]) -> None:
        self._credit.close()
        self._met.set()
        self._on_end()
        if not replies.cancelled():
            replies.exception()


class _PushService:
    """The receiver's half of all streams."""

    def __init__(self, sink: FrameSink, config: TransferConfig, *, needs_certificate: bool) -> None:
        self._sink = sink
        self._config = config
        self._needs_certificate = needs_certificate

    async def push(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncGenerator[bytes, None]:
        """Take in one part, and answer with credit and with how it ended."""
        if self._needs_certificate:
            await _check_certificate(context)
        replies: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: the last one was said
        intake = asyncio.create_task(self._take_in(requests, replies))
        intake.add_done_callback(lambda task: replies.put_nowait(None))
        try:
            while (reply := await replies.get()) is not None:
                yield reply
            intake.result()
        finally:
            intake.cancel()
            await asyncio.wait({intake})

    async def _take_in(self, requests: AsyncIterator[bytes], replies: asyncio.Queue[bytes | None]) -> None:
        async def grant(num_bytes: int) -> None:
            replies.put_nowait(credit_reply(num_bytes))

        try:
            hello = await self._meet(requests)
            self._sink.admit(hello, transport="grpc")
            await grant(self._config.credit_bytes)
            await take_in(self._sink, hello, _messages(requests, hello), grant)
        except TransferError as error:
            replies.put_nowait(end_reply(error))
        else:
            replies.put_nowait(end_reply(None))

    async def _meet(self, requests: AsyncIterator[bytes]) -> Hello:
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                return hello_from_bytes(await anext(requests))
        except (TimeoutError, StopAsyncIteration):
            raise TransferDamaged("the stream names no transfer") from None


async def _check_certificate(context: _Context) -> None:
    """Let workers in, and nobody else whose certificate our CA has signed."""
    try:
        check_peer(context.auth_context().get("x509_subject_alternative_name", ()), Party.WORKER)
    except Untrusted as error:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))


async def _messages(requests: AsyncIterator[bytes], hello: Hello) -> AsyncGenerator[Sequence[Frame], None]:
    async for data in requests:
        yield unpack(memoryview(data), hello)


def unavailable() -> str:
    """Return why this machine cannot use it: it always can."""
    return ""


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> GrpcTransport:
    """Create a worker's gRPC transport and bind ``config.listen``, a ``host:port``; port 0 is any free one.

    It needs no hub: a peer is found by its address.  From now on this process keeps memory that it frees
    (``kv_transfer/heap.py``).

    Raises:
        ConfigError: The address is taken or cannot be bound.
    """
    keep_freed_memory()
    return GrpcTransport(config, tls)
