"""The bytes of a frame, in host memory or on a GPU, and the checksum over them.  Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

from twinpool.core.device_checksum import device_checksum


class HostPayload:
    """Bytes in one or more buffers; implements ``ports.KVPayload``.

    Args:
        views: Buffers of bytes, in order; not copied, and not changed by anybody while this is in use.
    """

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = tuple(views)
        self.nbytes = sum(view.nbytes for view in self._views)

    def views(self) -> tuple[memoryview, ...]:
        return self._views

    def copy_into(self, target: memoryview) -> None:
        start = 0
        for view in self._views:
            target[start : start + view.nbytes] = view
            start += view.nbytes

    def tensor(self) -> None:
        return None

    def checksum(self, identity: bytes) -> int:
        """Compute XXH3-64 over ``identity`` and the bytes."""
        hasher = xxhash.xxh3_64(identity)
        for view in self._views:
            hasher.update(view)
        return int(hasher.intdigest())

    def joined(self) -> memoryview:
        """Return the bytes in one buffer; copies them if they are in several."""
        return self._views[0] if len(self._views) == 1 else memoryview(b"".join(self._views))


class DevicePayload:
    """Bytes in one tensor, which stay on its device; implements ``ports.KVPayload``.

    Args:
        data: One dimension, uint8.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self.nbytes: int = data.numel()

    def views(self) -> tuple[memoryview, ...]:
        return (self._data.cpu().numpy().data,)

    def copy_into(self, target: memoryview) -> None:
        target[:] = self.views()[0]

    def tensor(self) -> Any:
        return self._data

    def checksum(self, identity: bytes) -> int:
        return device_checksum(self._data, identity)
