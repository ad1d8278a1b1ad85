"""What the two ends of a pair say to each other beside the payload: small messages on one ordered stream.

A message is its kind, the channel it is about (0: the pair itself), the length of its body, and the body.
What kinds mean stands in ``sending.py`` and ``receiving.py``.  Nothing that is read here is believed.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass
from enum import IntEnum

from twinpool.core.errors import TransferDamaged, TransferError

_HEAD = struct.Struct("<BII")  # kind, channel, length of the body
_MOST_BODY_BYTES = 2**20
_MOST_UNREAD_BYTES = 2**22  # a peer that lets so much wait reads no more


class Kind(IntEnum):
    """What a message says."""

    GREETING = 1  # sender: how it moves bytes, and a hello
    ANSWER = 2  # receiver: what it adds to that
    KEY = 3  # either: a key and its value
    READY = 4  # receiver: bytes can move
    OPEN = 5  # sender: a hello; its channel begins
    BATCH = 6  # sender: what lies in one of its slots
    TAKEN = 7  # receiver: that slot may be filled again
    ALL_SENT = 8  # sender: the channel's last frame is under way
    GIVE_UP = 9  # sender: the channel is over
    REPLY = 10  # receiver: credit, or how the channel ended; of channel 0, why the pair is over


@dataclass(frozen=True, slots=True)
class Message:
    """One thing said."""

    kind: Kind
    channel: int
    body: bytes


class Control:
    """One end of the stream.  Of one loop; one task hears, everybody may say.

    Args:
        reader: Of a connection.
        writer: Of the same.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._head = b""  # of a message whose body has not come yet
        self._said: list[bytes] = []  # since the loop last came round: it goes in one piece

    @property
    def local_host(self) -> str:
        """The address of this machine that the peer is connected with; empty if it has none."""
        name = self._writer.get_extra_info("sockname")
        return str(name[0]) if isinstance(name, tuple) else ""

    def say(self, kind: Kind, body: bytes = b"", *, channel: int = 0) -> None:
        """Send a message; a peer that is gone does not hear it, which ``hear`` tells."""
        if self._writer.transport.is_closing():
            return
        if not self._said:
            asyncio.get_running_loop().call_soon(self._send)
        self._said += (_HEAD.pack(kind, channel, len(body)), body)

    async def hear(self) -> Message:
        """Wait for the next message; a call that is cancelled loses none.

        Raises:
            TransferDamaged: It is none.
            TransferError: There are no more.
        """
        try:
            self._head = self._head or await self._reader.readexactly(_HEAD.size)
            kind, channel, length = _HEAD.unpack(self._head)
            if length > _MOST_BODY_BYTES:
                raise TransferDamaged(f"a message of {length} bytes about a transfer")
            message = Message(Kind(kind), channel, await self._reader.readexactly(length))
        except (OSError, EOFError):
            raise TransferError("the peer is gone") from None
        except ValueError:
            raise TransferDamaged("a message of no known kind") from None
        self._head = b""
        return message

    def _send(self) -> None:
        data = b"".join(self._said)
        self._said.clear()
        if not data or self._writer.transport.is_closing():
            return
        self._writer.write(data)
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            self.cut()

    def cut(self) -> None:
        """End the connection; what was said last may be lost."""
        self._writer.transport.abort()

    async def close(self, *, within_s: float) -> None:
        """End the connection; what was said is sent first, if the peer takes it within ``within_s``."""
        self._send()
        self._writer.close()
        try:
            async with asyncio.timeout(within_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.cut()
