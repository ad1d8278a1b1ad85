"""Senders that put any bytes on the wire of a transport, whatever they mean.

What a sender says is a list of messages: a hello, then messages as ``kv_transfer.messages.pack`` makes them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

import grpc.aio

from kv_transfer.config import TransferConfig
from kv_transfer.frame import Frame
from kv_transfer.lanes.nixl_agent import NixlAgent
from kv_transfer.pair.batch import aligned
from kv_transfer.pair.control import Control, Kind
from kv_transfer.pair.greeting import answer_to_bytes
from kv_transfer.pair.lane import Placed, SendLane
from kv_transfer.shm_line.segment import Segment, shared_segment
from kv_transfer.shm_line.words import What, Word
from twinpool.core.errors import TransferError
from twinpool.core.payload import HostPayload

_LENGTH = struct.Struct("<I")
_WORD = struct.Struct("<BIIII")
_SILENCE_S = 0.05
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # the preface and empty settings
_FRAME = Frame(  # what a slot is told to hold; what it says beside its payload goes nowhere
    transfer_id="",
    epoch=0,
    first_head=0,
    num_heads=0,
    layer=0,
    first_token=0,
    num_tokens=0,
    checksum=0,
    payload=HostPayload([]),
)

Spoil = Callable[[bytes], bytes]


class RawSender(Protocol):
    """Of one transport."""

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        """Say it as the transport would, but with ``spoil`` on the bytes of the wire; return when heard."""
        ...


@asynccontextmanager
async def raw_sender(transport_name: str, address: str) -> AsyncIterator[RawSender]:
    """Make one that speaks to ``address``."""
    match transport_name:
        case "grpc":
            async with grpc.aio.insecure_channel(address) as channel:
                yield _Grpc(channel, address)
        case "nixl":
            agent = NixlAgent(net_devices="lo")
            yield _Nixl(agent, address)
            agent.close()
        case _:
            yield {"tcp": _Tcp, "shm": _Shm}[transport_name](address)


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


class _Nixl:
    """A pair for each conversation; how it moves bytes is true, what it says of them is spoiled."""

    def __init__(self, agent: NixlAgent, address: str) -> None:
        self._agent = agent
        self._address = address

    async def say(self, said: Sequence[bytes], spoil: Spoil) -> None:
        from kv_transfer.lanes.nixl import NixlLanes

        lane = NixlLanes(TransferConfig(), self._agent, net_devices="lo").to_peer("127.0.0.1")
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        hello = said[0] if said else b""
        greeting = len(hello).to_bytes(2, "little") + hello + answer_to_bytes(lane.offer)
        writer.write(_said(Kind.GREETING, 0, greeting))
        control = Control(reader, writer)
        with suppress(TransferError):
            while (await control.hear()).kind is not Kind.READY:
                pass
            writer.write(spoil(_pair_words(said, lane)))
            with suppress(TimeoutError):
                while True:  # until the other end has no more to say of what it has read
                    async with asyncio.timeout(_SILENCE_S):
                        await control.hear()
            await _exchange(reader, writer, b"")
        writer.close()
        lane.close()


def _pair_words(said: Sequence[bytes], lane: SendLane) -> bytes:
    """Put the payloads into one slot and return what is said after the greeting."""
    placed, headers, end = [], b"", 0
    for message in said[1:]:
        header, payload = _cut(message)
        whole = HostPayload([memoryview(payload)])
        placed.append(Placed(end, replace(_FRAME, payload=whole), None))
        end += aligned(len(payload))
        headers += struct.pack("<II", 1, len(header)) + header
    staged = lane.stage(0, placed)
    counts = struct.pack("<III", 0, len(staged.segments), len(said) - 1)
    segments = b"".join(struct.pack("<II", each.start, each.num_bytes) for each in staged.segments)
    return (
        _said(Kind.OPEN, 1, said[0])
        + _said(Kind.BATCH, 0, counts + segments + headers)
        + _said(Kind.ALL_SENT, 1, b"")
    )


def _said(kind: Kind, channel: int, body: bytes) -> bytes:
    return struct.pack("<BII", kind, channel, len(body)) + body


def _cut(message: bytes) -> tuple[bytes, bytes]:
    """Return the header and the payload of a message, as far as it has them."""
    end = min(len(message), 4 + int.from_bytes(message[:4], "little"))
    return message[4:end], message[end:]


def _words(said: Sequence[bytes], segment: Segment) -> bytes:
    """Put the payloads into slots and return the words of a whole conversation."""
    words = [Word(What.HELLO, 1, body=said[0])] if said else []
    for number, message in enumerate(said[1:]):
        header, payload = _cut(message)
        slot = number % segment.num_slots
        segment.view(slot, len(payload))[:] = payload
        words.append(Word(What.MESSAGE, 1, slot, len(payload), header))
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
