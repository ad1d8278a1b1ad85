"""The short words that the two ends of a shared-memory line say to each other over its socket.

Knows their form and not what they mean.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from abc import abstractmethod
from enum import IntEnum
from typing import NamedTuple, cast

from twinpool.core.errors import TransferDamaged

MAX_BODY_BYTES = 2**20  # the header of the largest message
_LINGER_S = 0.5
_WORD = struct.Struct("<BIIII")

_log = logging.getLogger(__name__)


class What(IntEnum):
    """What a word is about; the first three of a sender, the others of a receiver."""

    HELLO = 1  # body: a Hello
    MESSAGE = 2  # slot, size, body: a PushHeader; the slot is the receiver's
    DONE = 3  # everything was sent
    GIVE_UP = 4  # nothing more will be sent
    ADMITTED = 5
    FREE = 6  # slot: it is the sender's again
    END = 7  # body: a PushReply, the last word on a channel


class Word(NamedTuple):
    """One of them; what it has no use for is 0."""

    what: int
    channel: int
    slot: int = 0
    size: int = 0  # bytes in the slot
    body: bytes = b""


class WordProtocol(asyncio.Protocol):
    """One end of a line.  A peer that says what nobody says is cut off."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard = bytearray()
        self._gone = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be said or heard any more."""
        return self._gone.is_set()

    @abstractmethod
    def on_word(self, word: Word) -> None:
        """Act on a word of the peer.

        Raises:
            TransferDamaged: No peer of ours says this.
        """

    def say(self, word: Word) -> None:
        """Send a word; it is lost if the line is."""
        if not self._transport.is_closing():
            what, channel, slot, size, body = word
            self._transport.write(_WORD.pack(what, channel, slot, size, len(body)) + body)

    def cut(self) -> None:
        """Close the line at once."""
        self._transport.abort()

    async def close(self) -> None:
        """Close the line; its socket is closed on return.

        What was said is sent first, if the peer takes it soon: it may be how a part ended that is whole.
        """
        self._transport.close()
        try:
            async with asyncio.timeout(_LINGER_S):
                await self._gone.wait()
        except TimeoutError:
            self.cut()
            await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._heard += data
        try:
            self._act()
        except TransferDamaged as error:
            _log.warning("a peer on this host is cut off: %s", str(error))  # whoever keeps it keeps no frames
            self.cut()

    def connection_lost(self, error: Exception | None) -> None:
        self._gone.set()

    def _act(self) -> None:
        heard, start = self._heard, 0
        while len(heard) - start >= _WORD.size and not self._transport.is_closing():
            what, channel, slot, size, body_bytes = _WORD.unpack_from(heard, start)
            if body_bytes > MAX_BODY_BYTES:
                raise TransferDamaged(f"a word of {body_bytes} bytes")
            end = start + _WORD.size + body_bytes
            if len(heard) < end:
                break
            self.on_word(Word(what, channel, slot, size, bytes(heard[start + _WORD.size : end])))
            start = end
        del heard[:start]
