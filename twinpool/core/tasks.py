"""Background tasks with an owner: none is forgotten, and none fails unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from twinpool.core.errors import ServingError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class OwnedTasks:
    """The tasks that one object started; it closes them when it is closed itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in the background; what it raises is logged, with a traceback if it is a bug."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end even if the caller is cancelled meanwhile: for cleaning up."""
        return await asyncio.shield(self.start(work))

    async def wait(self) -> None:
        """Wait until every task has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel every task and wait until all have ended."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, ServingError):  # a known end, such as a rank that was lost
            _log.error("a background task failed: %s", error)
        else:
            _log.error("a background task failed", exc_info=error)
