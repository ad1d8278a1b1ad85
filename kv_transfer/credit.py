"""How much more a sender may have in flight: granted by the receiver, taken by the sender."""

from __future__ import annotations

import asyncio


class Credit:
    """Bytes of room at the receiver.  One task takes, anybody grants.

    A message larger than all the room there ever was goes alone, when nothing else is in flight, so
    that two workers with unlike settings are slow and not stuck.
    """

    def __init__(self) -> None:
        self._free_bytes = 0
        self._in_flight_bytes = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def grant(self, num_bytes: int) -> None:
        """Add room: at first the window, then what the receiver is done with."""
        self._free_bytes += num_bytes
        self._in_flight_bytes = max(0, self._in_flight_bytes - num_bytes)
        self._changed.set()

    async def take(self, num_bytes: int) -> None:
        """Wait for room and use it; returns at once when closed."""
        while not self._is_closed and self._in_flight_bytes and num_bytes > self._free_bytes:
            self._changed.clear()
            await self._changed.wait()
        self._free_bytes -= num_bytes
        self._in_flight_bytes += num_bytes

    def close(self) -> None:
        """Let everybody through: the channel has ended, and whoever waited will notice that."""
        self._is_closed = True
        self._changed.set()
