"""How tests wait: for a state, never for a time, and not for ever; on an event loop or without one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 20.0  # far more than anything in one process takes; only a hang gets there


async def eventually(is_true: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: It does not come to hold within ``within_s``.
    """
    async with asyncio.timeout(within_s):
        while not is_true():  # noqa: ASYNC110 - what holds is not ours to announce
            await asyncio.sleep(0.002)


def until(is_true: Callable[[], bool], *, within_s: float = PATIENCE_S, every_s: float = 0.02) -> bool:
    """Wait until something holds, blocking the thread; return whether it came to hold in time."""
    end_s = time.monotonic() + within_s
    while not is_true():
        if time.monotonic() > end_s:
            return False
        time.sleep(every_s)
    return True
