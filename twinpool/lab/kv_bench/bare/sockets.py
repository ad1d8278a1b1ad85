"""What bare links over blocking sockets share.  Each runs in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import LIMIT_S


def listening(family: socket.AddressFamily, address: object) -> socket.socket:
    """Return a socket that waits for one peer, for a while."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.settimeout(LIMIT_S)
    listener.bind(address)  # type: ignore[arg-type]
    listener.listen(1)
    return listener


def connected(family: socket.AddressFamily, address: object) -> socket.socket:
    """Return a socket that has met its peer."""
    end = socket.socket(family, socket.SOCK_STREAM)
    end.settimeout(LIMIT_S)
    end.connect(address)  # type: ignore[arg-type]
    return without_delay(end)


def without_delay(end: socket.socket) -> socket.socket:
    """Let short answers leave at once."""
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


async def in_thread(step: Callable[[], float]) -> float:
    """Run a blocking step; what a socket raises is a TransferError."""
    try:
        return await asyncio.to_thread(step)
    except OSError as error:
        raise TransferError(f"the bare link broke: {error}") from None


class SocketReceiving:
    """Accepts one peer and serves it until it leaves.

    Args:
        listener: Closed with this.
        address: Where it is reached.
        serve: Takes in one move from the peer; returns false when the peer has left.
        meet: Called once with the peer's socket.
        leave: Called when this is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        *,
        serve: Callable[[socket.socket], bool],
        meet: Callable[[socket.socket], object] = without_delay,
        leave: Callable[[], object] = lambda: None,
    ) -> None:
        self.address = address
        self._listener = listener
        self._serve = serve
        self._meet = meet
        self._leave = leave

    async def run(self) -> None:
        await in_thread(self._run)

    async def close(self) -> None:
        self._listener.close()
        self._leave()

    def _run(self) -> float:
        peer, _ = self._listener.accept()
        with peer:
            peer.settimeout(LIMIT_S)
            self._meet(peer)
            while self._serve(peer):
                pass
        return 0.0


class SocketSending:
    """Sends over one socket.

    Args:
        end: Closed with this.
        move: One move, as its seconds.
        leave: Called when this is closed.
    """

    def __init__(
        self,
        end: socket.socket,
        move: Callable[[], float],
        *,
        leave: Callable[[], object] = lambda: None,
    ) -> None:
        self._end = end
        self._move = move
        self._leave = leave

    async def move(self) -> float:
        return await in_thread(self._move)

    async def close(self) -> None:
        self._end.close()
        self._leave()
