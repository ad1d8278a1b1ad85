"""The bare link of nixl: the receiver reads the buffer of the sender into its own, and polls until it has."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from functools import partial

import torch

from kv_transfer.lanes.nixl_agent import NixlAgent, Region
from twinpool.core.doors import is_loopback
from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import DONE, LIMIT_S, LinkSize, Receiving, Sending, some_bytes
from twinpool.lab.kv_bench.bare.sockets import SocketReceiving, SocketSending, connected, listening

_WHERE = struct.Struct("<QI")  # the address of the sender's buffer, and the length of the introduction


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """One read gets everything: the library cuts it as it likes."""
    return (num_bytes,)


async def listen(host: str, size: LinkSize) -> Receiving:
    listener = listening(socket.AF_INET, (host, 0))
    reader = _Reader(_agent(host), torch.ones(size.num_bytes, dtype=torch.uint8))
    return SocketReceiving(
        listener,
        f"{host}:{listener.getsockname()[1]}",
        serve=reader.read,
        meet=reader.meet,
        leave=reader.close,
    )


async def connect(address: str, size: LinkSize) -> Sending:
    host, _, port = address.rpartition(":")
    agent = _agent(host)
    region = agent.register(torch.from_numpy(some_bytes(size.num_bytes)))
    end = connected(socket.AF_INET, (host, int(port)))
    end.sendall(_WHERE.pack(region.address, len(region.introduction)) + region.introduction)
    if end.recv(1) != DONE:
        raise TransferError("the bare link broke")
    return SocketSending(end, partial(_ask, end), leave=partial(_leave, agent, region))


class _Reader:
    def __init__(self, agent: NixlAgent, buffer: torch.Tensor) -> None:
        self._agent = agent
        self._region = agent.register(buffer)
        self._address = 0
        self._peer = ""

    def meet(self, end: socket.socket) -> None:
        self._address, length = _WHERE.unpack(_exactly(end, _WHERE.size))
        self._peer = self._agent.meet(_exactly(end, length))
        end.sendall(DONE)

    def read(self, end: socket.socket) -> bool:
        if not end.recv(1):
            return False
        stop_s = time.monotonic() + LIMIT_S
        num_bytes = self._region.memory.nbytes
        read = self._agent.read(self._peer, self._address, self._region, 0, num_bytes)
        while not self._agent.is_done(read):
            if time.monotonic() > stop_s:
                raise TransferError(f"the bytes could not be read in {LIMIT_S:g} s")
        self._agent.end(read)
        end.sendall(DONE)
        return True

    def close(self) -> None:
        _leave(self._agent, self._region)


def _ask(end: socket.socket) -> float:
    started_s = time.perf_counter()
    end.sendall(DONE)
    if end.recv(1) != DONE:
        raise TransferError("the bare link broke")
    return time.perf_counter() - started_s


def _agent(host: str) -> NixlAgent:
    return NixlAgent(net_devices="lo" if is_loopback("--listen", host) else "")


def _leave(agent: NixlAgent, region: Region) -> None:
    agent.forget(region)
    agent.close()


def _exactly(end: socket.socket, num_bytes: int) -> bytes:
    data = end.recv(num_bytes, socket.MSG_WAITALL)
    if len(data) < num_bytes:
        raise TransferError("the bare link broke")
    return data
