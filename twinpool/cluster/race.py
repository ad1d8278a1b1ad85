"""Coroutines of which the first to end decides what happens next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Race:
    """Starts coroutines, and ends those that still run when its block ends.

    What a task returned or raised is read by whoever waited for it, or by nobody.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Race:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Let one more take part."""
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def first(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait until one of ``tasks`` has ended."""
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
