"""Connections between rank 0 of a worker and its other ranks: who is there, and what rank 0 says.

    rank 0   listen -> address -> admit the others -> no port is open any more
    others   reach(address)

Both ends of a connection prove that they know the deployment's secret before they say anything else; a
stranger is dropped and delays nobody.  A process that ends breaks its connections at once, and a host that
vanishes within ``_VANISHED_S``.  Knows bytes, not what they mean; carries no tensor.
"""

from __future__ import annotations

import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from twinpool.core.errors import ConfigError, RankLost, Untrusted
from twinpool.core.secret import Secret

_HELLO = struct.Struct("<32sII32s")  # nonce, rank, size, proof
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_OTHERS, _RANK_0 = "twinpool rank", "twinpool rank 0"  # who signs; each signs the nonce of the other
_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 2**30  # of one message
_HANDSHAKE_S = 5.0  # for a stranger to be done
_MOST_STRANGERS = 64  # at once
_RETRY_S = 0.1
_VANISHED_S = 30
_GOODBYE_S = 1.0  # to say that the group ends


class RankLinks:
    """The connections of one rank: to all others from rank 0, to rank 0 from each other.

    One thread uses them; ``close`` may be called from any.

    Args:
        rank: Of this process.
        sockets: Connected; those of rank 0 in the order of the ranks behind them.

    Attributes:
        host: The address at which the other ranks see this one.
    """

    def __init__(self, rank: int, sockets: Sequence[socket.socket]) -> None:
        self.rank = rank
        self.size = len(sockets) + 1  # on rank 0 only
        self.host = str(sockets[0].getsockname()[0])
        self._sockets = tuple(sockets)
        self._is_closed = False
        self._sending = threading.Lock()
        for connected in sockets:
            _watch(connected)

    def send(self, data: bytes, *, timeout_s: float) -> None:
        """Give ``data`` to every peer.

        Raises:
            RankLost: One is gone, or did not take it in time.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._sending:
            for peer, connected in self._peers():
                try:
                    connected.settimeout(_left(deadline_s))
                    connected.sendall(_LENGTH.pack(len(data)) + data)
                except OSError as error:
                    raise RankLost(f"rank {peer} is gone: {_reason(error)}") from error

    def receive(self, *, timeout_s: float | None) -> bytes | None:
        """Return what rank 0 says next; None after ``close`` on this side.

        Args:
            timeout_s: None waits until it speaks or is gone.

        Raises:
            RankLost: It is gone, or said nothing in time.
        """
        try:
            return self._receive(0, self._sockets[0], timeout_s)
        except RankLost:
            if self._is_closed:
                return None
            raise

    def exchange(self, data: bytes, *, timeout_s: float) -> tuple[bytes, ...]:
        """Return what each rank brings, by rank; all ranks call it.

        Raises:
            RankLost: A rank is gone, or did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        if self.rank == 0:
            brought = [data]
            for peer, connected in self._peers():
                brought.append(self._receive(peer, connected, _left(deadline_s)))
            self.send(_packed(brought), timeout_s=_left(deadline_s))
            return tuple(brought)
        self.send(data, timeout_s=timeout_s)
        return _unpacked(self._receive(0, self._sockets[0], _left(deadline_s)))

    def close(self, last_words: bytes | None = None) -> None:
        """Break the connections, after ``last_words`` if the peers still take them.  Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # Whoever holds the lock is in the middle of a message, and nothing can be put into that.
        if last_words is not None and self._sending.acquire(timeout=_GOODBYE_S):
            try:
                for _, connected in self._peers():
                    with suppress(OSError):  # it is gone already
                        connected.settimeout(_GOODBYE_S)
                        connected.sendall(_LENGTH.pack(len(last_words)) + last_words)
            finally:
                self._sending.release()
        for connected in self._sockets:
            _hang_up(connected)  # a thread may be in ``receive``
            connected.close()

    def _peers(self) -> Iterable[tuple[int, socket.socket]]:
        return enumerate(self._sockets, start=1 if self.rank == 0 else 0)

    def _receive(self, peer: int, connected: socket.socket, timeout_s: float | None) -> bytes:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            (length,) = _LENGTH.unpack(_read(connected, _LENGTH.size, deadline_s))
            if length > _MOST_BYTES:
                raise ConnectionError(f"a message of {length} bytes")
            return _read(connected, length, deadline_s)
        except OSError as error:
            raise RankLost(f"rank {peer} is gone: {_reason(error)}") from error


def listen(host: str) -> socket.socket:
    """Open a port for the ranks of one worker, on this address only; the system chooses its number.

    Raises:
        ConfigError: The address is none of this machine, or stands for all of them.
    """
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=_MOST_STRANGERS)
    except OSError as error:
        raise ConfigError("host", f"ranks cannot meet at {host!r}: {error.strerror}") from error
    if listener.getsockname()[0] in ("0.0.0.0", "::"):
        listener.close()
        raise ConfigError("host", f"ranks meet at one address, {host!r} stands for all")
    return listener


def address_of(listener: socket.socket) -> str:
    """Return what the other ranks are to reach, as ``host:port``."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def admit(listener: socket.socket, *, size: int, secret: Secret, timeout_s: float) -> RankLinks:
    """Wait at rank 0 until all other ranks are there, and close the port.

    Raises:
        RankLost: Some did not come in time; the message names them.
    """
    deadline_s = time.monotonic() + timeout_s
    door = _Door(listener, size, secret)
    members: dict[int, socket.socket] = {}
    try:
        while len(members) < size - 1:
            rank, connected = door.proven.get(timeout=_left(deadline_s))
            if rank in members:
                connected.close()
            else:
                members[rank] = connected
    except queue.Empty:
        for connected in members.values():
            connected.close()
        missing = ", ".join(str(rank) for rank in range(1, size) if rank not in members)
        raise RankLost(f"of {size} ranks {missing} did not come within {timeout_s:g} s") from None
    finally:
        door.close()
    return RankLinks(0, [members[rank] for rank in range(1, size)])


def reach(address: str, *, rank: int, size: int, secret: Secret, timeout_s: float) -> RankLinks:
    """Connect another rank to rank 0.

    Raises:
        RankLost: Nobody answers there in time.
        Untrusted: Rank 0 knows another secret, or counts other ranks.
    """
    deadline_s = time.monotonic() + timeout_s
    connected, nonce_0 = _greeted(address, deadline_s)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        proof = secret.sign(_OTHERS, nonce_0, nonce, rank, size)
        connected.sendall(_HELLO.pack(nonce, rank, size, proof))
        answer = _read(connected, _PROOF_BYTES, deadline_s)
    except OSError as error:
        connected.close()
        raise Untrusted(
            "security.secret", f"rank 0 at {address} does not take this for rank {rank} of {size}"
        ) from error
    if not secret.is_signed(answer, _RANK_0, nonce, nonce_0, rank, size):
        connected.close()
        raise Untrusted("security.secret", f"who answers at {address} is not rank 0 of this worker")
    return RankLinks(rank, [connected])


def _greeted(address: str, deadline_s: float) -> tuple[socket.socket, bytes]:
    """Return a connection to rank 0 and its nonce; as long as it is too busy to greet, come again."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            connected = socket.create_connection((host.strip("[]"), int(port)), timeout=_left(deadline_s))
            try:
                return connected, _read(connected, _NONCE_BYTES, deadline_s)
            except OSError:
                connected.close()
                raise
        except OSError as error:
            if time.monotonic() + _RETRY_S >= deadline_s:
                raise RankLost(f"rank 0 does not answer at {address}: {_reason(error)}") from error
            time.sleep(_RETRY_S)


class _Door:
    """Takes connections, and asks each stranger in a thread of its own, so that none waits for another.

    Attributes:
        proven: Ranks that have shown that they belong here.
    """

    def __init__(self, listener: socket.socket, size: int, secret: Secret) -> None:
        self.proven: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._listener = listener
        self._size = size
        self._secret = secret
        self._changing = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # in the order of their arrival
        threading.Thread(target=self._take, name="rank door", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        with self._changing:
            for stranger in self._strangers:
                _hang_up(stranger)

    def _take(self) -> None:
        while True:
            try:
                stranger, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_RETRY_S)  # too many files are open, say
                continue
            with self._changing:
                self._strangers[stranger] = None
                if len(self._strangers) > _MOST_STRANGERS:  # a rank is done at once: the oldest is none
                    _hang_up(next(iter(self._strangers)))
            threading.Thread(target=self._meet, args=(stranger,), name="rank door", daemon=True).start()

    def _meet(self, stranger: socket.socket) -> None:
        rank = self._asked(stranger)
        with self._changing:
            del self._strangers[stranger]
        if rank is None:
            stranger.close()
        else:
            self.proven.put((rank, stranger))

    def _asked(self, stranger: socket.socket) -> int | None:
        """Return the rank that a stranger proved to be, or None."""
        deadline_s = time.monotonic() + _HANDSHAKE_S
        nonce_0 = secrets.token_bytes(_NONCE_BYTES)
        try:
            stranger.settimeout(_HANDSHAKE_S)
            stranger.sendall(nonce_0)
            nonce, rank, size, proof = _HELLO.unpack(_read(stranger, _HELLO.size, deadline_s))
            is_proven = self._secret.is_signed(proof, _OTHERS, nonce_0, nonce, rank, size)
            if not is_proven or size != self._size or not 0 < rank < size:
                return None
            stranger.sendall(self._secret.sign(_RANK_0, nonce, nonce_0, rank, size))
        except OSError:
            return None
        return int(rank)


def _hang_up(connected: socket.socket) -> None:
    """End a connection and wake the thread that reads from it."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _read(connected: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    """Return exactly so many bytes.

    Raises:
        OSError: The other side is gone, or did not send them in time.
    """
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        connected.settimeout(None if deadline_s is None else _left(deadline_s))
        count = connected.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return bytes(data)


def _left(deadline_s: float) -> float:
    """Return the time left, at least a moment: a timeout of zero would mean not to wait at all."""
    return max(0.001, deadline_s - time.monotonic())


def _reason(error: OSError) -> str:
    return "it did not answer in time" if isinstance(error, TimeoutError) else str(error)


def _watch(connected: socket.socket) -> None:
    """Send at once, and let the system notice a host that vanished without a word."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _VANISHED_S // 3),
        ("TCP_KEEPINTVL", _VANISHED_S // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", _VANISHED_S * 1000),
    ):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _packed(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unpacked(data: bytes) -> tuple[bytes, ...]:
    parts = []
    start = 0
    while start < len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += _LENGTH.size
        parts.append(data[start : start + length])
        start += length
    return tuple(parts)
