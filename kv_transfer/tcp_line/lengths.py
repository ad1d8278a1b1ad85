"""Where a message of a stream ends: each begins with its length, 4 bytes, little endian."""

from __future__ import annotations

import struct

from kv_transfer.tcp_line.byte_stream import ByteStream
from twinpool.core.errors import TransferDamaged

_LENGTH = struct.Struct("<I")
NOTHING = b""  # as a message of a sender: that was all


async def read_length(stream: ByteStream) -> int:
    """Read the length of the next message.

    Raises:
        StreamLost: There is none.
    """
    length = bytearray(_LENGTH.size)
    await stream.read_into(memoryview(length))
    return int(_LENGTH.unpack(length)[0])


async def read_small(stream: ByteStream, length: int, *, limit: int) -> bytes:
    """Read a message of ``length`` bytes.

    Raises:
        TransferDamaged: It is longer than ``limit``; nothing of it is read.
        StreamLost: The peer said less.
    """
    if length > limit:
        raise TransferDamaged(f"a message of {length} bytes where no more than {limit} are said")
    message = bytearray(length)
    await stream.read_into(memoryview(message))
    return bytes(message)


def write_with_length(stream: ByteStream, *views: bytes | memoryview) -> None:
    """Write a message, which may come in several pieces; see ``ByteStream.write``."""
    stream.write(_LENGTH.pack(sum(map(len, views))), *views)
