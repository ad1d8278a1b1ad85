"""Memory of one GPU that processes of the same machine can read, by CUDA's own means.

Never run on a GPU so far.  Memory comes straight from CUDA and not from torch's allocator, so that a handle
stands for these bytes and no others, whatever the allocator does.  Calls go to the CUDA runtime that torch
has loaded; CUDA gives what a process has opened back when it ends, however that is.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kv_transfer.lanes.ipc import HANDLE_BYTES
from kv_transfer.nccl import libraries_in, own_memory_map
from twinpool.core.errors import TransferError

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess: the only flag there is, and a must
_COPY_DEFAULT = 4  # cudaMemcpyDefault: CUDA knows from the addresses where they are


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


_ARGUMENTS: dict[str, list[Any]] = {
    "cudaMalloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t],
    "cudaIpcGetMemHandle": [ctypes.POINTER(_Handle), ctypes.c_void_p],
    "cudaIpcOpenMemHandle": [ctypes.POINTER(ctypes.c_void_p), _Handle, ctypes.c_uint],
    "cudaIpcCloseMemHandle": [ctypes.c_void_p],
    "cudaMemcpyAsync": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
}


class CudaRuntime:
    """The calls that torch does not offer, on the current device.

    Args:
        path: Of ``libcudart.so``.

    Raises:
        OSError: It cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        for name, arguments in _ARGUMENTS.items():
            getattr(self._library, name).argtypes = arguments

    def show(self, num_bytes: int) -> tuple[int, bytes]:
        """Set memory aside; return where it is, and by what others find it."""
        pointer, handle = ctypes.c_void_p(), _Handle()
        self._call("cudaMalloc", ctypes.byref(pointer), num_bytes)
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        return pointer.value or 0, bytes(handle)

    def see(self, handle: bytes) -> int:
        """Open the memory of another process; return where it is here."""
        pointer = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), opened, _LAZY_PEER_ACCESS)
        return pointer.value or 0

    def copy(self, target: int, source: int, num_bytes: int, *, stream: int) -> None:
        """Begin to copy."""
        self._call("cudaMemcpyAsync", target, source, num_bytes, _COPY_DEFAULT, stream)

    def close(self, pointer: int) -> None:
        """Let go of memory that was opened."""
        self._call("cudaIpcCloseMemHandle", pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise TransferError(f"{name}: {self._library.cudaGetErrorString(code).decode()}")


def loaded_runtime() -> CudaRuntime:
    """Return the runtime of this process, which torch has loaded.

    Raises:
        TransferError: There is none.
    """
    for path in libraries_in(own_memory_map(), "libcudart.so"):
        return CudaRuntime(path)
    raise TransferError("this torch has loaded no CUDA runtime")


class CudaMemory:
    """Implements ``ipc.DeviceMemory`` for one GPU.

    Args:
        runtime: Of this process.
        index: Of the GPU, as torch counts.
    """

    def __init__(self, runtime: CudaRuntime, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.identity = f"{os.getpid()}.{_uuid(index)}"
        self._runtime = runtime

    def reaches(self, identity: str) -> bool:
        """See ``ipc.DeviceMemory``; CUDA opens no memory of its own process."""
        pid, _, uuid = identity.partition(".")
        if pid == str(os.getpid()):
            return False
        for index in range(torch.cuda.device_count()):
            if _uuid(index) == uuid:
                own = self.device.index
                return index == own or torch.cuda.can_device_access_peer(own, index)
        return True  # it is not visible here; CUDA may reach it nevertheless

    def show(self, num_bytes: int) -> ShownCudaMemory:
        with torch.cuda.device(self.device):
            pointer, handle = self._runtime.show(num_bytes)
        return ShownCudaMemory(pointer, num_bytes, handle, self.device)

    def see(self, handle: bytes) -> SeenCudaMemory:
        with torch.cuda.device(self.device):
            return SeenCudaMemory(self._runtime, self._runtime.see(handle), self.device)


class ShownCudaMemory:
    """Implements ``ipc.Shown``."""

    def __init__(self, pointer: int, num_bytes: int, handle: bytes, device: torch.device) -> None:
        self.handle = handle
        self.data: Tensor = torch.as_tensor(_Array(pointer, num_bytes), device=device)


class SeenCudaMemory:
    """Implements ``ipc.Seen``."""

    def __init__(self, runtime: CudaRuntime, pointer: int, device: torch.device) -> None:
        self._runtime = runtime
        self._pointer = pointer
        self._device = device

    def read_into(self, target: Tensor, start: int) -> None:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        with torch.cuda.device(self._device):
            self._runtime.copy(target.data_ptr(), self._pointer + start, target.numel(), stream=stream)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            self._runtime.close(self._pointer)


class _Array:
    """Tells torch of memory that it did not set aside; see numba's documentation of the interface."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
