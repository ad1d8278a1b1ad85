"""An event loop that wakes when it was asked to, not up to a millisecond later.

epoll counts whole milliseconds, and asyncio rounds up.  The descriptor of an epoll can itself be waited for
with ``select``, which counts microseconds.
"""

from __future__ import annotations

import asyncio
import select
import selectors

_MOST_SELECTED = 1024  # descriptors of this number and more do not fit into a select


class _PreciseSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0.0 and self.fileno() < _MOST_SELECTED:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0.0
        return super().select(timeout)


def precise_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, for ``asyncio.Runner(loop_factory=precise_loop)``."""
    return asyncio.SelectorEventLoop(_PreciseSelector())
