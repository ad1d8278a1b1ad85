"""The bare link of torch_dist: gloo's send and receive of tensors in host memory."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # as torch.distributed.TCPStore, but with its types

from twinpool.core.errors import TransferError
from twinpool.lab.kv_bench.bare.link import LIMIT_S, LinkSize, Receiving, Sending, some_bytes

_MIB = 2**20
_LIMIT = timedelta(seconds=LIMIT_S)
_SENDER, _RECEIVER = 0, 1  # ranks

T = TypeVar("T")


def piece_sizes(num_bytes: int) -> Sequence[int]:
    """Everything at once, or in pieces that stay in the processor's cache."""
    return (num_bytes, *(size for size in (_MIB, 4 * _MIB, 16 * _MIB) if size < num_bytes))


async def listen(host: str, size: LinkSize) -> Receiving:
    return _Receiving(host, size)


async def connect(address: str, size: LinkSize) -> Sending:
    host, _, port = address.rpartition(":")
    group = await _in_thread(lambda: _group(host, int(port), _own_address(host), rank=_SENDER))
    return _Sending(group, size)


class _Receiving:
    def __init__(self, host: str, size: LinkSize) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)
        self.address = f"{host}:{self._store.port}"
        self._host = host
        data = torch.ones(size.num_bytes, dtype=torch.uint8)
        self._pieces = [data[start:stop] for start, stop in size.pieces()]

    async def run(self) -> None:
        await _in_thread(self._run)

    async def close(self) -> None:
        """There is nothing but memory."""

    def _run(self) -> None:
        group = _new_group(self._store, self._host, rank=_RECEIVER)
        word = torch.zeros(1, dtype=torch.uint8)
        while True:
            for number, piece in enumerate(self._pieces):
                try:
                    group.recv([piece], _SENDER, 0).wait(_LIMIT)
                except RuntimeError:
                    if number:
                        raise
                    return  # the peer has left
            group.send([word], _SENDER, 0).wait(_LIMIT)


class _Sending:
    def __init__(self, group: Any, size: LinkSize) -> None:
        data = torch.from_numpy(some_bytes(size.num_bytes))
        self._pieces = [data[start:stop] for start, stop in size.pieces()]
        self._word = torch.zeros(1, dtype=torch.uint8)
        self._group = group

    async def move(self) -> float:
        return await _in_thread(self._move)

    async def close(self) -> None:
        del self._group  # it has no other end

    def _move(self) -> float:
        started_s = time.perf_counter()
        for piece in self._pieces:
            self._group.send([piece], _RECEIVER, 0).wait(_LIMIT)
        self._group.recv([self._word], _RECEIVER, 0).wait(_LIMIT)
        return time.perf_counter() - started_s


def _group(host: str, port: int, own_host: str, *, rank: int) -> Any:
    store = TCPStore(host, port, is_master=False, timeout=_LIMIT)
    return _new_group(store, own_host, rank=rank)


def _new_group(store: TCPStore, own_host: str, *, rank: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _LIMIT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=own_host, lazy_init=False)]
    return gloo(store, rank, 2, options)


def _own_address(host: str) -> str:
    """Return the address of this machine from which ``host`` is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # nothing is sent
        return str(probe.getsockname()[0])


async def _in_thread(step: Callable[[], T]) -> T:
    try:
        return await asyncio.to_thread(step)
    except RuntimeError as error:
        raise TransferError(f"the bare link broke: {str(error).splitlines()[0]}") from None
