"""A thread for calls that block, so that an event loop never does."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from twinpool.core.errors import TransferError

_T = TypeVar("_T")


class CallThread:
    """Makes one call after another, in the order in which they are asked for.

    A daemon: a call that never returns, since a peer froze in the middle of a library's handshake, costs this
    thread and holds up neither the loop nor the end of the process.

    Args:
        name: Of the thread.
        before: Called once, in the thread, before the first call.
    """

    def __init__(self, name: str, before: Callable[[], None] = lambda: None) -> None:
        self._calls: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._before = before
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Return the future result of ``work``; cancelling it leaves the call running."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._calls.put((future, work))
        return future

    def end(self) -> None:
        """Let the thread end when it has made its calls; more are not made."""
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, blocking."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._before()
        while (call := self._calls.get()) is not None:
            future, work = call
            try:
                result, error = work(), None
            except BaseException as raised:  # noqa: BLE001 - handed to whoever asked for the call
                result, error = None, _fresh(raised)
            with suppress(RuntimeError):  # the loop has ended; nobody waits any more
                future.get_loop().call_soon_threadsafe(_settle, future, result, error)
            del call, future, work, result, error  # nothing is kept alive until the next call


def _fresh(error: BaseException) -> BaseException:
    """Copy an error that is no bug without its traceback, whose frames keep what the call worked with."""
    return type(error)(*error.args) if isinstance(error, TransferError) else error


def _settle(future: asyncio.Future[_T], result: _T, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
