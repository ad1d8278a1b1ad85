"""The Ray actor that stands for one worker: it runs the worker as its child and passes on what it says.

Ray chooses the machine and the GPUs; the worker itself has no Ray in it, so that a lost head node or a
restarting control store disturbs no request.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import ray.util

from twinpool.cluster.child import WorkerProcess
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.pools import LifeState


class WorkerActor:
    """Runs one life of one worker; made into an actor by the controller.

    Args:
        config: What the worker is told.
        is_on_loopback: The whole deployment is on this machine.
    """

    def __init__(self, config: WorkerConfig, is_on_loopback: bool) -> None:
        own = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        host = config.host if is_on_loopback else str(own)
        # The raylet is this process's parent.  While it lives, a worker without its actor is a leftover.
        self._worker = WorkerProcess(replace(config, host=host, supervisor_pid=os.getppid()))
        self._running: asyncio.Task[None] | None = None

    async def next_state(self, seen: LifeState | None) -> LifeState:
        """Return the worker's state as soon as it differs from ``seen``; the first call starts the worker."""
        if self._running is None:
            self._running = asyncio.create_task(self._worker.run())
        return await self._worker.next_state(seen)

    async def stop(self, drain_s: float) -> None:
        """Let the worker drain and end."""
        await self._worker.stop(drain_s=drain_s)
