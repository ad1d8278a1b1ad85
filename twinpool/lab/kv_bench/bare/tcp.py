"""The bare link of tcp: sendall of one buffer, recv_into another one."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import DONE, LinkSize, Receiving, Sending, some_bytes
from twinpool.lab.kv_bench.bare.sockets import SocketReceiving, SocketSending, connected, listening


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """One call gets everything: the kernel cuts it as it likes."""
    return (num_bytes,)


async def listen(host: str, size: LinkSize) -> Receiving:
    family = _family(host)
    listener = listening(family, (host, 0))
    buffer = np.ones(size.num_bytes, np.uint8).data
    return SocketReceiving(
        listener, f"{host}:{listener.getsockname()[1]}", serve=partial(_receive, buffer=buffer)
    )


async def connect(address: str, size: LinkSize) -> Sending:
    host, _, port = address.rpartition(":")
    end = connected(_family(host), (host, int(port)))
    return SocketSending(end, partial(_send, end, some_bytes(size.num_bytes).data))


def _send(end: socket.socket, data: memoryview) -> float:
    started_s = time.perf_counter()
    end.sendall(data)
    if end.recv(1) != DONE:
        raise TransferError("the bare link broke")
    return time.perf_counter() - started_s


def _receive(end: socket.socket, *, buffer: memoryview) -> bool:
    num_received = 0
    while num_received < len(buffer):
        count = end.recv_into(buffer[num_received:])
        if not count:
            return False
        num_received += count
    end.sendall(DONE)
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
