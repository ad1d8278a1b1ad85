"""The process of a measured worker, as who measures sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

from twinpool.core.clock import SystemClock
from twinpool.core.config import bind, unbind
from twinpool.core.errors import Unavailable
from twinpool.core.security import Trust
from twinpool.lab.memory.measuring.settings import MeasuredWorker, Measurement
from twinpool.rpc.clients import DecodeClient, PrefillClient, WorkerChannel

_START_LIMIT_S = 300.0
_ANSWER_LIMIT_S = 30.0
_END_LIMIT_S = 10.0
_QUIET = MappingProxyType({"KINETO_LOG_LEVEL": "99"})  # torch's profiler tells stderr of every step


class MeasuredChild:
    """A running worker.

    Attributes:
        worker_id: Who sends, in tickets.
        prefill: Its port for prompts.
        decode: Its port for answers.
    """

    def __init__(self, process: asyncio.subprocess.Process, worker_id: str, channel: WorkerChannel) -> None:
        self._process = process
        self.worker_id = worker_id
        self.prefill = PrefillClient(channel)
        self.decode = DecodeClient(channel, SystemClock())

    async def trace(self) -> None:
        """Trace every step from now on."""
        await _call(self._process, {"do": "trace"}, limit_s=_ANSWER_LIMIT_S)

    async def measure(self) -> Measurement:
        """Return what it has taken so far."""
        return bind(Measurement, await _call(self._process, {"do": "tell"}, limit_s=_ANSWER_LIMIT_S))


@asynccontextmanager
async def measured_child(settings: MeasuredWorker, trust: Trust) -> AsyncIterator[MeasuredChild]:
    """Start a worker; it has ended when the block has.

    Raises:
        Unavailable: It cannot start, or does not in time.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "twinpool.lab.memory.measuring.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(settings.threads), **_QUIET},
    )
    try:
        started = await _call(process, unbind(settings), limit_s=_START_LIMIT_S)
        channel = WorkerChannel(started["address"], started["worker_id"], trust=trust)
        try:
            yield MeasuredChild(process, started["worker_id"], channel)
        finally:
            await channel.close()
        await _end(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _call(
    process: asyncio.subprocess.Process, message: Mapping[str, Any], *, limit_s: float
) -> Mapping[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    try:
        async with asyncio.timeout(limit_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise Unavailable(f"the measured worker does not answer in {limit_s:g} s") from None
    if not line:
        raise Unavailable("the measured worker has ended")
    answer: Mapping[str, Any] = json.loads(line)
    if "error" in answer:
        raise Unavailable(f"the measured worker: {answer['error']}")
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_LIMIT_S):
            await process.wait()
    except TimeoutError:
        raise Unavailable(f"the measured worker does not end in {_END_LIMIT_S:g} s") from None
