"""One worker as a child process: starts it, hears what it says of itself, ends it, knows why it ended.

    parent                                       child (twinpool.cluster.worker_process)
      stdin:  its settings, one line of JSON  ->
      stdin:  open as long as the parent lives
              <- stdout: one JSON object a line: {"event": "progress" | "joined" | "failed", "text": ...}
              <- stderr: its log; the last line is kept, since it tells why it died
      SIGTERM: drain and exit 0               ->

Knows nothing of Ray: an actor runs it on whatever machine the worker is placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.pools import LifeState, Phase
from twinpool.core.config import unbind

_LINE_BYTES = 2**16
_KILL_AFTER_S = 5.0  # beyond the drain time
# What a worker does not need to know: Ray's own settings, its token above all, and the key of the API.
_PRIVATE_PREFIXES = ("RAY_", "TWINPOOL_API_KEY")


class WorkerProcess:
    """A worker that runs as a child of this process.

    Args:
        config: What it is told.
        command: The program and its arguments; the worker itself if None.
    """

    def __init__(self, config: WorkerConfig, *, command: Sequence[str] | None = None) -> None:
        self._config = config
        self._command = command or (
            sys.executable,
            "-m",
            "twinpool.cluster.worker_process",
            config.worker_id,
        )
        self._state = LifeState(host=socket.gethostname(), detail="starting")
        self._changed = asyncio.Event()
        self._last_line = ""
        self._failure = ""
        self._process: asyncio.subprocess.Process | None = None
        self._is_asked_to_stop = False

    async def run(self) -> None:
        """Start it, follow it and return when it has ended; called once."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=worker_environment(os.environ, self._config),
                limit=_LINE_BYTES,
            )
        except OSError as error:
            self._tell(phase=Phase.ENDED, detail=f"cannot be started: {error}")
            return
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._tell(pid=process.pid)
        if self._is_asked_to_stop:
            self._signal(signal.SIGTERM)
        try:
            # Nobody waits for the write: a worker that dies before it reads has a better reason to tell.
            process.stdin.write(json.dumps(unbind(self._config)).encode() + b"\n")
            await asyncio.gather(self._follow_events(process.stdout), self._follow_log(process.stderr))
            code = await process.wait()
        finally:
            process.stdin.close()
        is_drained = code == 0 and self._state.phase is Phase.RUNNING
        reason = self._failure or ("drained" if is_drained else _reason(code, self._last_line))
        self._tell(phase=Phase.ENDED, detail=reason, is_drained=is_drained)

    async def next_state(self, seen: LifeState | None) -> LifeState:
        """Return what is known, as soon as it differs from ``seen``."""
        while self._state == seen:
            self._changed.clear()
            await self._changed.wait()
        return self._state

    async def stop(self, *, drain_s: float) -> None:
        """Ask it to drain, wait for its end, and kill it if that takes too long.  Idempotent."""
        self._is_asked_to_stop = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s + _KILL_AFTER_S):
                while self._state.phase is not Phase.ENDED:
                    await self.next_state(self._state)
        except TimeoutError:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _follow_events(self, stdout: asyncio.StreamReader) -> None:
        async for line in _lines(stdout):
            try:
                event = json.loads(line)
                kind, text = str(event["event"]), str(event.get("text", ""))
            except (ValueError, KeyError, TypeError, AttributeError):
                self._last_line = line.strip() or self._last_line
                continue
            if kind == "failed":
                self._failure = text
            elif kind == "joined":
                self._tell(phase=Phase.RUNNING, detail="")
            else:
                self._tell(detail=text)

    async def _follow_log(self, stderr: asyncio.StreamReader) -> None:
        async for line in _lines(stderr):
            self._last_line = line.strip() or self._last_line
            with contextlib.suppress(OSError):  # a full disk ends no worker
                sys.stderr.write(f"{self._config.worker_id}: {line}\n")

    def _tell(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._changed.set()


def worker_environment(environment: Mapping[str, str], config: WorkerConfig) -> dict[str, str]:
    """Return the environment of a worker: without what is Ray's, and with its share of the cores."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_PRIVATE_PREFIXES)}
    threads = str(threads_of(config))
    return kept | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}


def threads_of(config: WorkerConfig) -> int:
    """Return how many threads a worker computes with: as told, or its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.threads or max(1, cores // (config.num_neighbours + 1))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # a line longer than the limit: its pieces are dropped
            continue
        if not raw:
            return
        yield raw.decode(errors="replace").rstrip()


def _reason(code: int, last_line: str) -> str:
    """Say why a process that did not tell itself ended."""
    if code == -signal.SIGKILL:
        return "killed by SIGKILL, by hand or because the machine is out of memory"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    return f"{how}: {last_line}" if last_line else how
