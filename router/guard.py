"""A wait on a worker that ends when the worker is lost or the time is over, whatever its socket says.

A stopped process (SIGSTOP) keeps its connections open and its callers waiting.  So every wait on a
worker runs inside a Guard, which the worker's handle trips.  The mechanism is that of
``asyncio.timeout``: the waiting task is cancelled and the cancellation is turned into the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, TypeVar

from twinpool.core.clock import Clock
from twinpool.core.errors import DeadlineExceeded, ServingError

T = TypeVar("T")


class Watched(Protocol):
    """Something that may fail while one waits for it."""

    def watch(self, guard: Guard) -> None:
        """Trip ``guard`` on failure, at once if it has failed already (by raising)."""
        ...

    def unwatch(self, guard: Guard) -> None: ...


class Deadline:
    """A moment that comes nearer.

    Args:
        clock: Read whenever somebody asks.
        timeout_s: Seconds from now until then.
    """

    def __init__(self, clock: Clock, *, timeout_s: float) -> None:
        self._clock = clock
        self._at_s = clock.now_s() + timeout_s

    def left_s(self) -> float:
        """Return seconds until then; negative when it has passed."""
        return self._at_s - self._clock.now_s()


class Guard:
    """Ends the wait inside its block with an error.

    Args:
        watched: What is waited for; the first to fail decides the error.
        timeout_s: After so long the block ends with DeadlineExceeded.
    """

    def __init__(self, *watched: Watched, timeout_s: float) -> None:
        self._watched = watched
        self._timeout_s = timeout_s
        self._error: ServingError | None = None
        self._has_cancelled = False
        self._is_inside = False

    def __enter__(self) -> Guard:
        if self._timeout_s <= 0.0:
            raise DeadlineExceeded("the request's time is over")
        task = asyncio.current_task()
        assert task is not None, "a guard needs a task to cancel"
        self._task = task
        self._cancelling = task.cancelling()
        self._loop = asyncio.get_running_loop()
        for i, each in enumerate(self._watched):
            try:
                each.watch(self)
            except ServingError:
                for earlier in self._watched[:i]:
                    earlier.unwatch(self)
                raise
        self._is_inside = True
        self._timer = self._loop.call_later(self._timeout_s, self._expire)
        return self

    def trip(self, error: ServingError) -> None:
        """End the wait with ``error``; a second trip changes nothing."""
        if self._error is None:
            self._error = error
            # Later, since the tripper may be the waiting task itself, deep inside a call.
            self._loop.call_soon(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_inside = False
        self._timer.cancel()
        for each in self._watched:
            each.unwatch(self)
        if self._error is None:
            return
        remaining = self._task.uncancel() if self._has_cancelled else self._task.cancelling()
        if kind is asyncio.CancelledError and remaining <= self._cancelling:
            raise self._error from raised

    def _expire(self) -> None:
        self.trip(DeadlineExceeded("the request's time is over"))

    def _cancel(self) -> None:
        if self._is_inside:
            self._has_cancelled = True
            self._task.cancel()


async def guarded_stream(
    outputs: AsyncGenerator[T, None],
    *watched: Watched,
    also_first: Sequence[Watched] = (),
    deadline: Deadline,
) -> AsyncGenerator[T, None]:
    """Pass ``outputs`` on; each wait for the next one is guarded, the consumer's own time is not.

    Args:
        outputs: Closed however this ends.
        watched: What the outputs come from.
        also_first: What the first output depends on besides.
        deadline: Of the whole stream.
    """
    sources = (*watched, *also_first)
    async with aclosing(outputs):
        while True:
            with Guard(*sources, timeout_s=deadline.left_s()):
                output = await anext(outputs, None)
            if output is None:
                return
            sources = watched
            yield output
