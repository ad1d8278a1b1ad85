"""What every program does that somebody watches over: settings come by stdin, news go out by stdout.

The other end is ``child.py``.  When stdin closes, the watcher is gone, and the program is told to end.  If
the watcher's own machinery (its supervisor) went with it, nobody starts another, so the program goes on.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, TypeAlias, TypeVar

import psutil

from twinpool.core.config import bind
from twinpool.core.open_files import allow_many_files

_SETTLE_S = 0.5  # a watcher and its supervisor that die together do not die in the same instant

Settings = TypeVar("Settings")
Report: TypeAlias = "Callable[[str, str], None]"
"""``(event, text)``; see ``child.py`` for the events."""
Watch: TypeAlias = "Callable[[Callable[[], None]], None]"
"""Called once with what to call, from any thread, when whoever watches over this process is gone."""


def run_child(
    kind: type[Settings],
    run: Callable[[Settings, Report, Watch], int],
    *,
    supervisor_pid: Callable[[Settings], int | None],
) -> None:
    """Read settings, run, exit with what ``run`` returned.

    Args:
        kind: Of the settings.
        run: The program; what it raises is told and logged.
        supervisor_pid: Tells whose life means that a lost watcher will have a successor; None: always.
    """
    # Libraries print what they like; stdout is for news alone.
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    allow_many_files()
    settings = bind(kind, json.loads(sys.stdin.buffer.readline()))
    watcher = _Watcher(supervisor_pid(settings))
    watcher.start()
    code = _run(settings, run, news, watcher)
    sys.stderr.flush()
    # Threads of libraries must not keep a process alive that has said good-bye.
    os._exit(code)


def _run(
    settings: Settings,
    run: Callable[[Settings, Report, Watch], int],
    news: IO[str],
    watcher: _Watcher,
) -> int:
    def report(event: str, text: str) -> None:
        try:
            news.write(json.dumps({"event": event, "text": text}) + "\n")
            news.flush()
        except OSError:
            return  # the watcher is gone, which is noticed elsewhere

    try:
        return run(settings, report, watcher.call)
    except Exception as error:  # noqa: BLE001 - the top of the process: tell, log, exit
        from twinpool.cluster.failure import describe_failure

        reason = describe_failure(error)
        if reason is None:
            traceback.print_exc()
        report("failed", reason or f"{type(error).__name__}: {error}")
        return 2


class _Watcher:
    """Notices the end of whoever watches over this process; until ``call`` that ends the process."""

    def __init__(self, supervisor_pid: int | None) -> None:
        self._supervisor_pid = supervisor_pid
        self._on_gone: Callable[[], None] = lambda: os._exit(1)

    def start(self) -> None:
        threading.Thread(target=self._wait, name="watcher", daemon=True).start()

    def call(self, on_gone: Callable[[], None]) -> None:
        self._on_gone = on_gone

    def _wait(self) -> None:
        while sys.stdin.buffer.read(4096):
            pass
        time.sleep(_SETTLE_S)
        if self._supervisor_pid is None or _lives(self._supervisor_pid):
            self._on_gone()


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has died and was not yet taken note of by its parent does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
