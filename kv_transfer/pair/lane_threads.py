"""The two threads that a lane lives in, and their end together with it."""

from __future__ import annotations

import asyncio
import atexit
import threading
from typing import Protocol

from kv_transfer.pair.thread import CallThread

_JOIN_S = 5.0  # far more than a call takes to fail after a cut


class _Lane(Protocol):
    def cut(self) -> None: ...
    def close(self) -> None: ...


class LaneThreads:
    """Of one lane.

    Attributes:
        filler: For what copies or begins something.
        waiter: For what waits until bytes have moved.
    """

    def __init__(self, lane: _Lane, name: str) -> None:
        self.filler = CallThread(f"{name}: fill")
        self.waiter = CallThread(f"{name}: wait")
        self._lane = lane
        self._is_closing = False

    async def close(self) -> None:
        """Cut the lane and close it when both threads have ended; returns when that is done or stuck."""
        if self._is_closing:
            return
        self._is_closing = True
        closer = CallThread("close lane")
        # A library whose objects go while Python ends can take the process down.
        atexit.register(closer.join, _JOIN_S)
        closed = closer.call(self._close)
        closed.add_done_callback(lambda _: atexit.unregister(closer.join))
        closer.end()
        await asyncio.wait({closed}, timeout=_JOIN_S)

    def _close(self) -> None:
        self._lane.cut()
        for thread in (self.filler, self.waiter):
            thread.end()
            thread.join(threading.TIMEOUT_MAX)
        self._lane.close()
