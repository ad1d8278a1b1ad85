"""The bare link of shm: the sender copies pieces into memory that both share, the receiver reads them there.

A byte over a socket says that a piece is there, another one that it was read.  To read is to add up the
eight-byte words of a piece, which is as fast as memory is.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import DONE, LinkSize, Receiving, Sending, some_bytes
from twinpool.lab.kv_bench.bare.sockets import SocketReceiving, SocketSending, connected, listening

_NUM_SLOTS = 4
_MIB = 2**20
_Bytes = npt.NDArray[np.uint8]


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """Everything at once, or pieces, of which one is copied while another one is read."""
    return (num_bytes, *(size for size in (_MIB // 4, _MIB, 2 * _MIB) if size < num_bytes))


async def listen(host: str, size: LinkSize) -> Receiving:
    name = f"twinpool-bare-{secrets.token_hex(16)}"
    listener = listening(socket.AF_UNIX, f"\0{name}")
    file = os.memfd_create("twinpool-bare")
    try:
        os.ftruncate(file, _memory_bytes(size))
        memory = _mapped(file, size)
        copy = os.dup(file)
    finally:
        os.close(file)

    def meet(end: socket.socket) -> None:
        socket.send_fds(end, [DONE], [copy])
        os.close(copy)

    return SocketReceiving(listener, name, serve=partial(_receive, size=size, memory=memory), meet=meet)


async def connect(address: str, size: LinkSize) -> Sending:
    end = connected(socket.AF_UNIX, f"\0{address}")
    _, files, *_ = socket.recv_fds(end, len(DONE), 1)
    try:
        memory = _mapped(files[0], size)
    finally:
        for file in files:
            os.close(file)
    return SocketSending(end, partial(_send, end, some_bytes(size.num_bytes), size, memory))


def _send(end: socket.socket, data: _Bytes, size: LinkSize, memory: _Bytes) -> float:
    pieces = size.pieces()
    started_s = time.perf_counter()
    num_free, num_read = _NUM_SLOTS, 0
    for number, (start, stop) in enumerate(pieces):
        if not num_free:
            num_told = _heard(end)
            num_free, num_read = num_told, num_read + num_told
        place = number % _NUM_SLOTS * size.piece_bytes
        memory[place : place + stop - start] = data[start:stop]
        end.sendall(DONE)
        num_free -= 1
    while num_read < len(pieces):
        num_read += _heard(end)
    return time.perf_counter() - started_s


def _receive(end: socket.socket, *, size: LinkSize, memory: _Bytes) -> bool:
    pieces = size.pieces()
    number = 0
    while number < len(pieces):
        try:
            num_told = _heard(end)
        except TransferError:
            return False
        for start, stop in pieces[number : number + num_told]:
            place = number % _NUM_SLOTS * size.piece_bytes
            piece = memory[place : place + stop - start]
            piece[: len(piece) // 8 * 8].view(np.int64).sum()
            end.sendall(DONE)
            number += 1
    return True


def _heard(end: socket.socket) -> int:
    heard = end.recv(_NUM_SLOTS)
    if not heard:
        raise TransferError("the bare link broke")
    return len(heard)


def _memory_bytes(size: LinkSize) -> int:
    return min(_NUM_SLOTS, len(size.pieces())) * size.piece_bytes


def _mapped(file: int, size: LinkSize) -> _Bytes:
    return np.frombuffer(mmap.mmap(file, _memory_bytes(size)), np.uint8)
