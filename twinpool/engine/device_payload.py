"""Bytes of KV that stay on a GPU while they travel."""

from __future__ import annotations

from torch import Tensor

from twinpool.core.device_checksum import device_checksum


class DevicePayload:
    """Bytes in one tensor; implements ``ports.KVPayload``.

    Args:
        data: One dimension, uint8.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = data
        self.nbytes = data.numel()

    def views(self) -> tuple[memoryview, ...]:
        return (self._data.cpu().numpy().data,)

    def tensor(self) -> Tensor:
        return self._data

    def checksum(self, identity: bytes) -> int:
        return device_checksum(self._data, identity)
