"""Access to NIXL, NVIDIA's transfer library, with UCX under it; nobody else speaks to it.

Uses its C++ bindings as they are: the Python class around them makes UCX's progress thread poll without a
pause, a core for each agent, and serialises with pickle.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TransferError

if TYPE_CHECKING:
    from torch import Tensor

_PACKAGES = ("nixl_cu12", "nixl_cu13")  # alike but for the CUDA they were built with
_WAKE_US = 100_000  # how often UCX looks around although nothing woke it


def nixl_package() -> str:
    """Return the package to use; empty if none is installed."""
    return next((name for name in _PACKAGES if find_spec(name) is not None), "")


def nixl_version() -> str:
    """Return the version of that package."""
    return metadata.version(nixl_package())


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Memory that UCX may move bytes from and to.

    Attributes:
        memory: Kept alive as long as this.
        address: Of its first byte.
        introduction: What a peer needs to reach it, and nothing else here; opaque.
    """

    memory: Tensor
    address: int
    introduction: bytes
    descriptors: Any

    def part(self, start: int, num_bytes: int) -> tuple[int, int, int]:
        """Return the address, size and device of a part, as NIXL wants them."""
        assert 0 <= start <= start + num_bytes <= self.memory.nbytes
        return (self.address + start, num_bytes, _device_number(self.memory))


class NixlAgent:
    """One instance of UCX, with its thread and its connections.  For any thread.

    Args:
        net_devices: What UCX may use of the network, in its own words; empty: whatever there is.

    Raises:
        TransferError: UCX cannot start.
    """

    def __init__(self, *, net_devices: str = "") -> None:
        self._nixl = import_module(f"{nixl_package()}._bindings")
        own_errors = (value for name, value in vars(self._nixl).items() if name.endswith("Error"))
        self._errors: tuple[type[Exception], ...] = (*own_errors, RuntimeError, ValueError)
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True  # else a peer cannot even connect while this process does other things
        config.pthrDelay = _WAKE_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        options = {"engine_config": f"NET_DEVICES={net_devices}"} if net_devices else {}
        with self._told_as_transfer_error("UCX cannot start"):
            self._agent = self._nixl.nixlAgent(f"twinpool-{secrets.token_hex(16)}", config)
            self._agent.createBackend("UCX", options)

    def register(self, memory: Tensor) -> Region:
        """Let UCX move bytes from and to a contiguous tensor of uint8, until ``forget``."""
        place = (memory.data_ptr(), memory.nbytes, _device_number(memory), "")
        with self._told_as_transfer_error("UCX cannot use this memory"):
            descriptors = self._nixl.nixlRegDList(self._kind(memory), [place])
            self._agent.registerMem(descriptors, [])
            introduction = self._agent.getLocalPartialMD(descriptors, True, [])
        return Region(memory, memory.data_ptr(), introduction, descriptors)

    def forget(self, region: Region) -> None:
        """Take a region back: no peer reaches it any more."""
        with suppress(*self._errors):
            self._agent.deregisterMem(region.descriptors, [])

    def meet(self, introduction: bytes) -> str:
        """Get to know a peer's region; return the name of the peer.

        UCX keeps its connections to a peer until the agent is closed.

        Raises:
            TransferError: It is no introduction, or contradicts an earlier one.
        """
        with self._told_as_transfer_error("the peer's introduction cannot be used"):
            peer: bytes | str = self._agent.loadRemoteMD(introduction)
            return peer.decode() if isinstance(peer, bytes) else peer

    def read(self, peer: str, address: int, region: Region, start: int, num_bytes: int) -> int:
        """Begin to copy a peer's bytes, in memory of the same kind, into a region; may block for the copy.

        Returns:
            The read, for ``is_done`` and ``end``.

        Raises:
            TransferError: The peer is gone, or has no such bytes.
        """
        kind = self._kind(region.memory)
        own = region.part(start, num_bytes)
        with self._told_as_transfer_error("the peer's bytes cannot be read"):
            read: int = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._nixl.nixlXferDList(kind, [own]),
                self._nixl.nixlXferDList(kind, [(address, num_bytes, own[2])]),
                peer,
                b"",
                [],
            )
            try:
                self._agent.postXferReq(read, b"")
            except self._errors:
                self.end(read)
                raise
        return read

    def is_done(self, read: int) -> bool:
        """Return whether all bytes are there.

        Raises:
            TransferError: They will not come.
        """
        with self._told_as_transfer_error("the peer's bytes cannot be read"):
            status = self._agent.getXferStatus(read)
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise TransferError(f"the peer's bytes cannot be read: {status.name}")
        return bool(status == self._nixl.NIXL_SUCCESS)

    def end(self, read: int) -> None:
        """Be done with a read.  One that is not done may go on until the agent is closed."""
        with suppress(*self._errors):
            self._agent.releaseXferReq(read)

    def close(self) -> None:
        """Stop UCX: nothing is read or written any more.  Nothing else may be called after it."""
        del self._agent

    def _kind(self, memory: Tensor) -> Any:
        return self._nixl.DRAM_SEG if memory.device.type == "cpu" else self._nixl.VRAM_SEG

    @contextmanager
    def _told_as_transfer_error(self, problem: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise TransferError(f"{problem}: {error}") from None


def _device_number(memory: Tensor) -> int:
    return max(0, memory.get_device())
