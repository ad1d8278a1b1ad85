"""Senders that put any bytes on the wire of a transport, whatever they mean.

What a sender says is a list of messages: a hello, then messages as ``kv_transfer.messages.pack`` makes them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import grpc.aio

from kv_transfer.line.segment import SLOT_BYTES, Segment, shared_segment
from kv_transfer.line.words import What, Word

_LENGTH = struct.Struct("<I")
_WORD = struct.Struct("<BIIII")
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # the preface and empty settings

Spoil = Callable[[bytes], bytes]


class RawSender(Protocol):
    """Of one transport."""

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        """Say it as the transport would, but with ``spoil`` on the bytes of the wire; return when heard."""
        ...


@asynccontextmanager
async def raw_sender(transport_name: str, address: str) -> AsyncIterator[RawSender]:
    """Make one that speaks to ``address``."""
    if transport_name != "grpc":
        yield {"tcp": _Tcp, "shm": _Shm}[transport_name](address)
        return
    async with grpc.aio.insecure_channel(address) as channel:
        yield _Grpc(channel, address)


class _Grpc:
    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._push = channel.stream_stream("/twinpool.v1.KVTransfer/Push", None, None)
        self._address = address

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        wire = spoil(_HTTP2)
        if wire != _HTTP2:
            await _say_over_tcp(self._address, wire)
            return
        call = self._push(None)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for message in said:
                await call.write(message)
            await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass


class _Tcp:
    def __init__(self, address: str) -> None:
        self._address = address

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        wire = b"".join(_LENGTH.pack(len(message)) + message for message in said) + _LENGTH.pack(0)
        await _say_over_tcp(self._address, spoil(wire))


class _Shm:
    def __init__(self, address: str) -> None:
        self._name = "\0" + address.partition("/")[2]

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.setblocking(False)
            end.connect(self._name)
            readable = asyncio.Event()
            loop.add_reader(end, readable.set)
            await readable.wait()
            loop.remove_reader(end)
            segment = shared_segment(end)
            reader, writer = await asyncio.open_unix_connection(sock=end.dup())
        await _exchange(reader, writer, spoil(_words(said, segment)))


def _words(said: Sequence[bytes], segment: Segment) -> bytes:
    """Put the payloads into slots and return the words of a whole conversation."""
    words = [Word(What.HELLO, 1, body=said[0])] if said else []
    for number, message in enumerate(said[1:]):
        header_end = min(len(message), 4 + int.from_bytes(message[:4], "little"))
        payload = message[header_end:][:SLOT_BYTES]
        slot = number % segment.num_slots
        segment.view(slot, len(payload))[:] = payload
        words.append(Word(What.MESSAGE, 1, slot, len(payload), message[4:header_end]))
    words.append(Word(What.DONE, 1))
    return b"".join(_WORD.pack(*word[:4], len(word.body)) + word.body for word in words)


async def _say_over_tcp(address: str, wire: bytes) -> None:
    host, _, port = address.rpartition(":")
    await _exchange(*await asyncio.open_connection(host, int(port)), wire)


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: bytes) -> None:
    """Send ``wire`` and no more, and read until the other end has closed."""
    with suppress(OSError):
        writer.write(wire)
        writer.write_eof()
        while await reader.read(65536):
            pass
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
