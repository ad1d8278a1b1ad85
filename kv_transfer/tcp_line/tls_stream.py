"""A byte stream under TLS.

The records go through memory and not straight through the socket, because each would take system calls of its
own there: a quarter of a receiver's time.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from kv_transfer.tcp_line.byte_stream import ByteStream

_PIECE_BYTES = 2**17  # of ciphertext that goes through memory at once


class TLSStream(ByteStream):
    """One end of an encrypted connection; only ``secured`` makes one.

    Args:
        end: As of a ByteStream.
        tls: Whose handshake is over.
        sealed: Where ``tls`` reads what came from ``end``.
        sealing: Where ``tls`` writes what is to go there.
    """

    def __init__(
        self, end: socket.socket, tls: ssl.SSLObject, sealed: ssl.MemoryBIO, sealing: ssl.MemoryBIO
    ) -> None:
        super().__init__(end)
        self._tls = tls
        self._sealed = sealed
        self._sealing = sealing
        self._piece = memoryview(bytearray(_PIECE_BYTES))
        self._going = memoryview(b"")  # what the socket has not taken yet

    @property
    def is_drained(self) -> bool:
        return super().is_drained and not self._going and not self._sealing.pending

    def _receive(self, target: memoryview) -> int | None:
        while True:
            try:
                return self._tls.read(len(target), target)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                num_bytes = super()._receive(self._piece)
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            if num_bytes is None:
                return None
            if num_bytes:
                self._sealed.write(self._piece[:num_bytes])
            else:
                self._sealed.write_eof()

    def _send(self) -> int | None:
        num_sealed = 0
        if not self._going:
            num_sealed = self._seal()
            self._going = memoryview(self._sealing.read())
        try:
            self._going = self._going[self._end.send(self._going) :]
        except BlockingIOError:
            return num_sealed or None
        return num_sealed

    def _seal(self) -> int:
        """Encrypt some of what is to be sent and return how much."""
        num_bytes = 0
        for view in self._unsent:
            piece = view[: _PIECE_BYTES - num_bytes]
            while piece:
                num_sealed = self._tls.write(piece)
                num_bytes += num_sealed
                piece = piece[num_sealed:]
            if num_bytes == _PIECE_BYTES:
                break
        return num_bytes


async def secured(
    end: socket.socket, context: ssl.SSLContext, *, server_side: bool, server_hostname: str | None = None
) -> tuple[TLSStream, ssl.SSLObject]:
    """Shake hands on a connected socket that does not block.

    Returns:
        The stream, which has the socket from now on, and what tells the peer's certificate.

    Raises:
        OSError: The peer is not whom we want, or does not want us, or is gone.
    """
    loop = asyncio.get_running_loop()
    sealed, sealing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(sealed, sealing, server_side=server_side, server_hostname=server_hostname)
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            await loop.sock_sendall(end, sealing.read())
        except ssl.SSLError:
            with suppress(OSError):
                end.send(sealing.read())  # why
            raise
        else:
            await loop.sock_sendall(end, sealing.read())
            return TLSStream(end, tls, sealed, sealing), tls
        data = await loop.sock_recv(end, _PIECE_BYTES)
        if not data:
            raise ConnectionResetError("the peer left in the middle of the handshake")
        sealed.write(data)
