"""Tasks that outlive the call that started them: each is owned, and what it raises is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TypeVar

from twinpool.core.errors import ServingError

T = TypeVar("T")


class TaskSet:
    """Owner of background tasks.

    Args:
        name: Said in the log when a task fails.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[object]] = set()
        self._log = logging.getLogger("twinpool.router")

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Run ``work``; a failure that is not a ServingError is logged even if nobody awaits the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def wait(self, *, timeout_s: float) -> bool:
        """Wait until no task runs; return whether that came true in time."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ServingError):
            self._log.debug("%s: %s", self._name, error)
        else:
            self._log.error("%s: a background task failed", self._name, exc_info=error)
