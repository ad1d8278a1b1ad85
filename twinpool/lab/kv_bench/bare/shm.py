"""The bare link of shm: the sender copies into memory that both share, then the receiver reads it in place.

A byte over a socket says that everything is there, another one that it was read.  To read is to add up the
eight-byte words, which is as fast as memory is.
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

_Bytes = npt.NDArray[np.uint8]


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """Everything at once: the sum of one copy and one reading."""
    return (num_bytes,)


async def listen(host: str, size: LinkSize) -> Receiving:
    name = f"twinpool-bare-{secrets.token_hex(16)}"
    listener = listening(socket.AF_UNIX, f"\0{name}")
    file = os.memfd_create("twinpool-bare")
    os.ftruncate(file, size.num_bytes)
    memory = _mapped(file, size)

    def meet(end: socket.socket) -> None:
        socket.send_fds(end, [DONE], [file])

    return SocketReceiving(
        listener, name, serve=partial(_receive, memory=memory), meet=meet, leave=partial(os.close, file)
    )


async def connect(address: str, size: LinkSize) -> Sending:
    end = connected(socket.AF_UNIX, f"\0{address}")
    _, files, *_ = socket.recv_fds(end, len(DONE), 1)
    try:
        memory = _mapped(files[0], size)
    finally:
        for file in files:
            os.close(file)
    return SocketSending(end, partial(_send, end, some_bytes(size.num_bytes), memory))


def _send(end: socket.socket, data: _Bytes, memory: _Bytes) -> float:
    started_s = time.perf_counter()
    memory[:] = data
    end.sendall(DONE)
    if end.recv(1) != DONE:
        raise TransferError("the bare link broke")
    return time.perf_counter() - started_s


def _receive(end: socket.socket, *, memory: _Bytes) -> bool:
    if not end.recv(1):
        return False
    memory[: len(memory) // 8 * 8].view(np.int64).sum()
    end.sendall(DONE)
    return True


def _mapped(file: int, size: LinkSize) -> _Bytes:
    return np.frombuffer(mmap.mmap(file, size.num_bytes), np.uint8)
