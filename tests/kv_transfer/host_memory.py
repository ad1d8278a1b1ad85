"""Host memory in the place of a GPU's: one process shows it, another reads it.

As a program it is ``receiver_process`` with ``cuda_ipc`` over such memory.
"""

from __future__ import annotations

import mmap
import os
import runpy
from pathlib import Path

import torch
from torch import Tensor

from kv_transfer.config import TransferConfig
from kv_transfer.hub import Hub
from kv_transfer.lanes.ipc import HANDLE_BYTES, IpcLanes
from kv_transfer.pair.door import LocalDoor
from kv_transfer.pair.transport import PairTransport
from kv_transfer.transports import cuda_ipc
from twinpool.core.errors import TransferError
from twinpool.core.tls import TLSFiles


def over_host_memory(config: TransferConfig, hub: Hub, tls: TLSFiles | None) -> PairTransport:
    """Create ``cuda_ipc`` as ``cuda_ipc.create`` does, where there is no GPU."""
    memory = HostMemory()
    door = LocalDoor(config, memory.identity, memory.reaches)
    return PairTransport("cuda_ipc", config, IpcLanes(config, memory), door)


class HostMemory:
    """Implements ``ipc.DeviceMemory``."""

    def __init__(self, identity: str = "host") -> None:
        self.device = torch.device("cpu")
        self.identity = identity

    def reaches(self, identity: str) -> bool:
        return identity != "elsewhere"

    def show(self, num_bytes: int) -> ShownHostMemory:
        return ShownHostMemory(num_bytes)

    def see(self, handle: bytes) -> SeenHostMemory:
        path = Path(handle.rstrip(b"\0").decode())
        try:
            with path.open("rb") as file:
                return SeenHostMemory(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise TransferError(f"no memory at {path}: {error}") from None


class ShownHostMemory:
    """A file without a name; whoever may see this process's files can read it."""

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("shown")
        os.truncate(self._file, num_bytes)
        self.data: Tensor = torch.frombuffer(mmap.mmap(self._file, num_bytes), dtype=torch.uint8)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode().ljust(HANDLE_BYTES, b"\0")

    def __del__(self) -> None:
        os.close(self._file)


class SeenHostMemory:
    """A mapping of it, which cannot be written."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    def read_into(self, target: Tensor, start: int) -> None:
        target.numpy()[:] = memoryview(self._mapping)[start : start + target.numel()]

    def close(self) -> None:
        self._mapping.close()


if __name__ == "__main__":
    cuda_ipc.create = over_host_memory
    runpy.run_module("tests.kv_transfer.receiver_process", run_name="__main__")
