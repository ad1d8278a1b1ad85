"""Work that blocks, awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], *, name: str) -> T:
    """Run ``work`` in a daemon thread of its own, and return or raise what it does.

    Whoever stops waiting leaves the thread behind; nothing waits for it at the end of the process.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, as it is
            tell(lambda error=error: result.set_exception(error))  # type: ignore[misc]
        else:
            tell(lambda: result.set_result(value))

    def tell(settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(lambda: None if result.done() else settle())

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
