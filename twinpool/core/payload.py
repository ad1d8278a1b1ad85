"""The bytes of a frame in host memory, and the checksum over them."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash


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
