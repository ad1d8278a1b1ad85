"""A program of ours as a child process: starts it, hears what it says, ends it, knows why it ended.

    parent                                       child (a worker, or another rank of one)
      stdin:  its settings, one line of JSON  ->
      stdin:  open as long as the parent lives
              <- stdout: one JSON object a line: {"event": ..., "text": ...}
                           progress  what it does
                           meeting   where the other ranks of this worker are to come
                           joined    the router took it, or rank 0 did
                           failed    why it ends
              <- stderr: its log; the last line is kept, since it tells why it died
      SIGTERM: drain and exit 0               ->

Knows nothing of Ray: an actor runs it on whatever machine it is placed.
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

from twinpool.cluster.config import RankSpec, WorkerConfig
from twinpool.cluster.pools import LifeState, Phase
from twinpool.core.config import unbind
from twinpool.core.rank_port import rank_name

_LINE_BYTES = 2**16
_KILL_AFTER_S = 5.0  # beyond the drain time
# What a child does not need to know: Ray's own settings, its token above all, and the key of the API.
_PRIVATE_PREFIXES = ("RAY_", "TWINPOOL_API_KEY")


class ChildProcess:
    """A program that runs as a child of this process.

    Args:
        name: Stands before each line of its log.
        settings: What it is told, a dataclass.
        command: The program and its arguments.
        threads: That it computes with.
    """

    def __init__(self, name: str, settings: object, *, command: Sequence[str], threads: int) -> None:
        self._name = name
        self._settings = settings
        self._command = command
        self._threads = threads
        self._state = LifeState(host=socket.gethostname(), detail="starting")
        self._changed = asyncio.Event()
        self._last_line = ""
        self._failure = ""
        self._process: asyncio.subprocess.Process | None = None
        self._is_asked_to_stop = False

    async def run(self) -> LifeState:
        """Start it, follow it and return when it has ended; called once."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=child_environment(os.environ, threads=self._threads),
                limit=_LINE_BYTES,
            )
        except OSError as error:
            return self._tell(phase=Phase.ENDED, detail=f"cannot be started: {error}")
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._tell(pid=process.pid)
        if self._is_asked_to_stop:
            self._signal(signal.SIGTERM)
        try:
            # Nobody waits for the write: a child that dies before it reads has a better reason to tell.
            process.stdin.write(json.dumps(unbind(self._settings)).encode() + b"\n")
            await asyncio.gather(self._follow_events(process.stdout), self._follow_log(process.stderr))
            code = await process.wait()
        finally:
            process.stdin.close()
        is_drained = code == 0 and self._state.phase is Phase.RUNNING
        reason = self._failure or ("drained" if is_drained else _reason(code, self._last_line))
        return self._tell(phase=Phase.ENDED, detail=reason, is_drained=is_drained)

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
            self._failure = self._failure or f"ended by force: not drained in {drain_s + _KILL_AFTER_S:g} s"
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
            elif kind == "meeting":
                self._tell(meeting=text)
            else:
                self._tell(detail=text)

    async def _follow_log(self, stderr: asyncio.StreamReader) -> None:
        async for line in _lines(stderr):
            self._last_line = line.strip() or self._last_line
            with contextlib.suppress(OSError):  # a full disk ends no worker
                sys.stderr.write(f"{self._name}: {line}\n")

    def _tell(self, **changes: object) -> LifeState:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        self._changed.set()
        return self._state


def worker_child(config: WorkerConfig) -> ChildProcess:
    """Return a worker, or rank 0 of one."""
    return ChildProcess(
        config.worker_id,
        config,
        command=(sys.executable, "-m", "twinpool.cluster.worker_process", config.worker_id),
        threads=threads_of(config),
    )


def rank_child(spec: RankSpec) -> ChildProcess:
    """Return another rank of a worker."""
    name = rank_name(spec.worker.worker_id, spec.rank)
    return ChildProcess(
        name,
        spec,
        command=(sys.executable, "-m", "twinpool.cluster.rank_process", name),
        threads=threads_of(spec.worker),
    )


def child_environment(environment: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """Return the environment of a child: without what is Ray's, and with its share of the cores."""
    kept = {key: value for key, value in environment.items() if not key.startswith(_PRIVATE_PREFIXES)}
    share = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return kept | share | {"PYTHONUNBUFFERED": "1"}


def threads_of(config: WorkerConfig) -> int:
    """Return how many threads a rank computes with: as told, or its share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return config.threads or max(1, cores // (config.num_neighbours + config.tensor_parallel))


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
