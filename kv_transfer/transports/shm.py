"""Between processes of one host: payloads lie in memory that both share, and a socket says where.

    sender                                           receiver
      | -- connect ------------------------------------> |  only the same user
      | <- the memory ---------------------------------- |  all its slots are the sender's
      | -- HELLO channel, hello -----------------------> |  one channel per part
      | <- ADMITTED channel ---------------------------- |
      | -- MESSAGE channel, slot, size, header --------> |  the slot is the receiver's
      | <- FREE slot ----------------------------------- |  and now the sender's again
      | -- DONE channel, or GIVE_UP -------------------> |
      | <- END channel, how it ended ------------------- |

The two keep this line for later parts.  A slot changes hands by these words only: the receiver gives it back
when it is done with it, however its part ended, so a late sender never writes where the receiver reads.
Headers come over the socket and not in the memory, where they could change while they are checked.

The socket has an abstract name and the memory none: whoever is killed, nothing is left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from contextlib import ExitStack
from functools import partial

from kv_transfer.config import TransferConfig
from kv_transfer.hello import Hello
from kv_transfer.hub import Hub
from kv_transfer.shm_line.receiving import ReceivingLine
from kv_transfer.shm_line.segment import MAX_SLOTS, share_segment, shared_segment
from kv_transfer.shm_line.sending import LineLost, SendingLine, ShmChannel
from kv_transfer.this_host import bound, host_id, is_own_user, unix_socket
from kv_transfer.transport import FrameSink
from twinpool.core.errors import TransferError, TransferTimeout
from twinpool.core.seldom import SeldomLog
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import TLSFiles

_MAX_LINES = 256  # from peers
_RETRY_S = 0.01  # while this process or a peer has no room for one more

_log = logging.getLogger(__name__)


class ShmTransport:
    """Listens at a name on this host, and keeps a line to each peer it has met."""

    moves_tensors = False

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._host = host_id("net")
        self._listener, name = bound(config.listen, self._host)
        self._endpoint = Endpoint("shm", f"{self._host}/{name}")
        self._news = SeldomLog(_log, logging.WARNING)
        self._accepting: asyncio.Task[None] | None = None
        self._receiving: set[ReceivingLine] = set()
        self._sending: dict[str, asyncio.Task[SendingLine]] = {}  # connecting or there

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return peer.address.startswith(f"{self._host}/")

    async def start(self, sink: FrameSink) -> None:
        self._listener.listen()
        self._accepting = asyncio.create_task(self._accept(sink), name="shm")

    async def open(self, peer: Endpoint, hello: Hello, *, timeout_s: float) -> ShmChannel:
        is_kept = peer.address in self._sending
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._line(peer.address)
                try:
                    return await line.open(hello)
                except LineLost:
                    if not is_kept:
                        raise
                # It was lost before anybody noticed.
                line = await self._line(peer.address)
                return await line.open(hello)
        except TimeoutError:
            self._cut_if_idle(peer.address)
            raise TransferTimeout(f"no answer from {peer.address} in {timeout_s:g} s") from None

    async def close(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        self._listener.close()
        connecting = list(self._sending.values())
        for task in connecting:
            task.cancel()
        ends = await asyncio.gather(*connecting, return_exceptions=True)
        lines = [*self._receiving, *(line for line in ends if isinstance(line, SendingLine))]
        await asyncio.gather(*(line.close() for line in lines))

    async def _line(self, address: str) -> SendingLine:
        """Return the line to a peer; who wants one while it is being connected waits for the same one."""
        connecting = self._sending.get(address)
        if connecting is None:
            connecting = self._sending[address] = asyncio.create_task(self._connect(address))
            connecting.add_done_callback(partial(self._forget_failed, address))
        return await asyncio.shield(connecting)

    async def _connect(self, address: str) -> SendingLine:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            end = stack.enter_context(unix_socket())
            try:
                async with asyncio.timeout(self._config.connect_timeout_s):
                    await _connect(end, _socket_name(address))
                    if not is_own_user(end):
                        raise TransferError(f"{address} belongs to another user")
                    await _readable(end)
                    segment = shared_segment(end)
            except TimeoutError:
                raise TransferTimeout(f"{address} does not answer") from None
            except (OSError, ValueError) as error:
                raise TransferError(f"{address}: {error}") from None
            line = SendingLine(segment, address, on_lost=partial(self._sending.pop, address, None))
            await loop.create_unix_connection(lambda: line, sock=end)
            stack.pop_all()
        return line

    def _cut_if_idle(self, address: str) -> None:
        """Cut the line to a peer that does not answer: what was said on it would pile up."""
        connecting = self._sending.get(address)
        if connecting is not None and _has_line(connecting) and connecting.result().is_idle:
            connecting.result().cut()

    def _forget_failed(self, address: str, connecting: asyncio.Task[SendingLine]) -> None:
        if not _has_line(connecting):
            del self._sending[address]

    async def _accept(self, sink: FrameSink) -> None:
        """Take lines from peers until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(self._listener)
                with ExitStack() as stack:
                    stack.enter_context(end)
                    if self._is_welcome(end):
                        await self._receive(end, sink)
                        stack.pop_all()
            except OSError as error:  # the caller has left, or this process has too many files open
                self._news.tell("a process of this host cannot connect: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _receive(self, end: socket.socket, sink: FrameSink) -> None:
        num_slots = min(MAX_SLOTS, 2 * (self._config.credit_bytes // self._config.message_bytes))  # half rest
        segment = share_segment(end, num_slots)
        line = ReceivingLine(sink, segment, on_lost=self._receiving.discard)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: line, end)
        self._receiving.add(line)

    def _is_welcome(self, end: socket.socket) -> bool:
        if not is_own_user(end):
            self._news.tell("a process of another user was sent away")
            return False
        if len(self._receiving) >= _MAX_LINES:
            idle = next((line for line in self._receiving if line.is_idle), None)
            if idle is None:
                self._news.tell("more than %d processes of this host send at once", _MAX_LINES)
                return False
            idle.cut()
        return True


def _has_line(connecting: asyncio.Task[SendingLine]) -> bool:
    return connecting.done() and not connecting.cancelled() and connecting.exception() is None


def _socket_name(address: str) -> str:
    return f"\0{address.partition('/')[2]}"


async def _connect(end: socket.socket, name: str) -> None:
    """Connect; asyncio takes a peer that is too busy to answer for one that has answered."""
    while True:
        try:
            end.connect(name)
        except BlockingIOError:
            await asyncio.sleep(_RETRY_S)
        else:
            return


async def _readable(end: socket.socket) -> None:
    """Return when a read would not wait."""
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    loop.add_reader(end, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(end)


def unavailable() -> str:
    """Return why this machine cannot use it: it takes a Linux whose memory can be sealed."""
    if sys.platform != "linux":
        return "it needs Linux"
    try:
        os.close(os.memfd_create("twinpool-probe", os.MFD_ALLOW_SEALING))
        host_id("net")
    except OSError as error:
        return str(error)
    return ""


def create(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> ShmTransport:
    """Create a worker's shared-memory transport; nothing leaves the host, so it needs no TLS.

    Where ``config.listen`` is an address of this transport on this host it listens there again, anywhere
    else at a name that nobody has.

    Raises:
        ConfigError: Somebody listens there.
    """
    return ShmTransport(config)
