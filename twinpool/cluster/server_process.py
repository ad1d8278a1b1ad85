"""A `twinpool serve` that another command starts, uses and ends; it ends too if that command is killed."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from twinpool.core.errors import Unavailable

_START_LIMIT_S = 900.0  # the model may have to be fetched first
_STOP_LIMIT_S = 90.0
_LAST_WORDS_S = 1.0
_PR_SET_PDEATHSIG = 1
_PREFIX = "twinpool: "


@contextmanager
def server_process(options: Sequence[str], *, say: Callable[[str], None]) -> Iterator[str]:
    """Run `twinpool serve` on a free port until the block ends, and give its URL.

    Args:
        options: Of `twinpool serve`.
        say: Called with each line of its progress, from another thread.

    Raises:
        Unavailable: It does not start, or does not end well.
    """
    command = [sys.executable, "-m", "twinpool", "serve", "--port", "0", *options]
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process, which then ends the server in its own way
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - it only makes one system call
    )
    try:
        yield _wait_ready(server, say)
    finally:
        say("shutting down ...")
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    if server.returncode:
        raise Unavailable(f"the server ended with exit code {server.returncode}")


def _end_with_parent() -> None:
    """Ask for SIGTERM when the parent dies, however that dies; does nothing where there is no such thing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_ready(server: subprocess.Popen[str], say: Callable[[str], None]) -> str:
    """Pass the server's progress on until it is ready; return its URL."""
    last = [""]
    assert server.stdout is not None and server.stderr is not None
    telling = threading.Thread(target=_tell, args=(server.stderr, say, last), daemon=True)
    telling.start()
    watchdog = threading.Timer(_START_LIMIT_S, server.terminate)
    watchdog.daemon = True
    watchdog.start()
    try:
        for line in server.stdout:
            if line.startswith("ready "):
                return line.split()[1]
    finally:
        watchdog.cancel()
    server.wait()
    telling.join(_LAST_WORDS_S)
    raise Unavailable(last[0] or f"the server ended with exit code {server.returncode}")


def _tell(stream: IO[str], say: Callable[[str], None], last: list[str]) -> None:
    for line in stream:
        text = line.strip()
        if text.startswith(_PREFIX):
            last[0] = text.removeprefix(_PREFIX).removeprefix("error: ")
            say(last[0])
