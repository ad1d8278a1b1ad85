"""The program of a worker that somebody watches over: settings come by stdin, news go out by stdout.

The other end is ``child.py``.  When stdin closes, the watcher is gone; the worker then drains and ends.
If the watcher's own machinery (``supervisor_pid``) went with it, nobody starts another worker, so this one
goes on as long as there is a router.
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
from typing import IO

import psutil

from twinpool.cluster.config import WorkerConfig
from twinpool.core.config import bind

_SETTLE_S = 0.5  # a watcher and its supervisor that die together do not die in the same instant


def main() -> None:
    """Read the settings, run the worker, exit."""
    # Libraries print what they like; stdout is for news alone.
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = sys.stdin.buffer.readline()
    code = _run(bind(WorkerConfig, json.loads(settings)), news)
    sys.stderr.flush()
    # Threads of libraries must not keep a worker alive that has said good-bye.
    os._exit(code)


def _run(config: WorkerConfig, news: IO[str]) -> int:
    def report(event: str, text: str) -> None:
        try:
            news.write(json.dumps({"event": event, "text": text}) + "\n")
            news.flush()
        except OSError:
            return  # the watcher is gone, which is noticed elsewhere

    from twinpool.cluster.worker import describe_failure, run_worker

    try:
        return run_worker(config, report=report, watch=lambda on_gone: _watch(config, on_gone))
    except Exception as error:  # noqa: BLE001 - the top of the process: tell, log, exit
        reason = describe_failure(error)
        if reason is None:
            traceback.print_exc()
        report("failed", reason or f"{type(error).__name__}: {error}")
        return 2


def _watch(config: WorkerConfig, on_gone: Callable[[], None]) -> None:
    def wait() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        time.sleep(_SETTLE_S)
        if config.supervisor_pid is None or _lives(config.supervisor_pid):
            on_gone()

    threading.Thread(target=wait, name="watcher", daemon=True).start()


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has died and was not yet taken note of by its parent does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
