"""A process group of two: the sender is rank 0, the receiver rank 1.

gloo moves host memory and NCCL that of GPUs; both are spoken to in the same words.  Groups know nothing of
each other and of the world that `torch.distributed` calls the default one: each has a store of its own,
whose keys go over the pair's connection, so that no port is opened to meet (CVE-2025-47277 was one that
listened everywhere).

NCCL: never run on a GPU so far.  What is done here rests on the sources of torch 2.9 to 2.13:
- With TORCH_NCCL_BLOCKING_WAIT a group has no watchdog thread (which would end the process with a transfer
  that failed), and ``wait`` with a time limit gives the communicator up when it is over. torch reads it
  when a group is made, so it is set for that moment only: the engine's own groups are none of ours.
- The first send makes the communicator and blocks until the peer receives; so both do that when they meet.
- ``abort`` ends the kernels of a communicator from any thread; who waits for them returns as if all were
  well.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # as torch.distributed.Store, but with its types

from kv_transfer.pair.keys import KeyExchange
from twinpool.core.errors import TransferError, TransferTimeout

_MEETING_S = 60.0  # for a library to connect to its other end
_MAX_CTAS = 4  # channels of one NCCL communicator: what it takes of a GPU's memory and processors
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
_ENVIRONMENT = threading.Lock()  # held while a variable is set for one call


class TwoRanks:
    """One end of a group.

    Args:
        backend: "gloo" or "nccl".
        keys: Of the pair.
        rank: 0 sends, 1 receives.
        local_host: The address of this machine that the peer knows; gloo listens there.
        stall_s: A move that takes longer has failed.

    Raises:
        TransferError: The other end was not found.
    """

    def __init__(
        self, backend: str, keys: KeyExchange, *, rank: int, local_host: str, stall_s: float
    ) -> None:
        self._keys = keys
        self._rank = rank
        self._stall_s = stall_s
        self._is_cut = False
        self._store = _PairStore(keys)
        with _told_as_transfer_error():
            if backend == "nccl":
                self._group: Any = _nccl_group(self._store, rank, stall_s)
            else:
                self._group = _gloo_group(self._store, rank, local_host)

    def send(self, data: Tensor) -> dist.Work:
        """Begin to send to the other rank."""
        with _told_as_transfer_error():
            work: dist.Work = self._group.send([data], 1 - self._rank, 0)
            return work

    def receive(self, data: Tensor) -> dist.Work:
        """Begin to fill ``data`` with what the other rank sends."""
        with _told_as_transfer_error():
            work: dist.Work = self._group.recv([data], 1 - self._rank, 0)
            return work

    def wait(self, work: dist.Work) -> None:
        """Block until the bytes have moved; on a GPU the current stream waits for them too.

        Raises:
            TransferError: They will not; the group is of no use any more.
        """
        started_s = time.monotonic()
        try:
            with _told_as_transfer_error():
                work.wait(timedelta(seconds=self._stall_s))
        except TransferError:
            if time.monotonic() < started_s + self._stall_s:
                raise
            raise TransferTimeout(f"it takes nothing for {self._stall_s:g} s") from None
        if self._is_cut:
            raise TransferError("the way to the peer was cut")

    def prove(self, own: bytes, other: bytes, device: torch.device) -> None:
        """Exchange what was agreed on over the pair's connection: the first use, and proof of who is there.

        Raises:
            TransferError: Somebody else is at the other end, or nobody.
        """
        said = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
        heard = torch.zeros(len(other), dtype=torch.uint8, device=device)
        for step in (self.send, self.receive) if self._rank == 0 else (self.receive, self.send):
            self.wait(step(said if step == self.send else heard))
        if bytes(heard.cpu().numpy()) != other:
            raise TransferError("somebody else than the peer is at the other end")

    def cut(self) -> None:
        """Make whoever waits fail soon.  Idempotent; from any thread."""
        self._is_cut = True
        self._keys.fail(TransferError("the way to the peer was cut"))
        with suppress(RuntimeError):  # gloo has no abort; NCCL's may find the communicator gone
            self._group.abort()
        for connected in _sockets_named_in(self._keys.values()):
            with connected, suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


class _PairStore(Store):
    """The store of a group over the keys of its pair."""

    def __init__(self, keys: KeyExchange) -> None:
        super().__init__()
        self._keys = keys

    def set(self, key: str, value: Any) -> None:
        self._keys.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._keys.get(key, timeout_s=_MEETING_S)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = _MEETING_S if timeout is None else min(_MEETING_S, timeout.total_seconds())
        self._keys.wait(list(keys), timeout_s=limit_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._keys.has(list(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """Meeting takes as long as it may take here."""


def _gloo_group(store: Store, rank: int, local_host: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=_MEETING_S)
    options._threads = 1  # of collectives, which we have none of
    options._devices = [gloo.create_device(hostname=local_host, lazy_init=False)]
    return gloo(store, rank, 2, options)


def _nccl_group(store: Store, rank: int, stall_s: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=stall_s)
    options.config.min_ctas = 1
    options.config.max_ctas = _MAX_CTAS
    with _environment(_BLOCKING_WAIT, "1"):
        return ProcessGroupNCCL(store, rank, 2, options)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = value
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


@contextmanager
def _told_as_transfer_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of which torch's DistError and its kinds are
        text = re.sub(r"^\[[^\]]*:\d+\] ", "", str(error).splitlines()[0])
        raise TransferError(text.partition(". ")[0]) from None


def _sockets_named_in(values: Sequence[bytes]) -> Iterator[socket.socket]:
    """Give copies of this process's sockets that a group made, found by the addresses its two ends exchanged.

    gloo cannot be told to give up a connection, but it notices one that was shut down.  Where the addresses
    are not found (another system, another gloo), whoever waits does so until ``stall_s``.
    """
    folder = Path("/proc/self/fd")
    for entry in list(folder.iterdir()) if folder.is_dir() else []:
        with suppress(OSError):  # it is closed by now, no socket, or not connected
            copy = os.dup(int(entry.name))
            try:
                found = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                raise
            names = [_raw(found.getsockname()), _raw(found.getpeername())]
            if any(name and name in value for name in names for value in values):
                yield found


def _raw(name: object) -> bytes:
    """Return an internet address as the system lays it out; empty if it is none."""
    match name:
        case (str(host), int(port)):
            return struct.pack("=H", socket.AF_INET) + port.to_bytes(2, "big") + socket.inet_aton(host)
        case (str(host), int(port), int(), int()):
            address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
            return struct.pack("=H", socket.AF_INET6) + port.to_bytes(2, "big") + bytes(4) + address
        case _:
            return b""
