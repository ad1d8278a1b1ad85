"""The Ray actors that stand for a worker: each runs one of its ranks as its child and passes on what it says.

Ray chooses the machine and the GPUs; the processes themselves have no Ray in them, so that a lost head node
or a restarting control store disturbs no request.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import ray.util

from twinpool.cluster.child import rank_child, worker_child
from twinpool.cluster.config import RankSpec, WorkerConfig
from twinpool.cluster.pools import LifeState


class WorkerActor:
    """Runs one life of one worker, or rank 0 of it; made into an actor by the controller.

    Args:
        config: What the worker is told.
        is_on_loopback: The whole deployment is on this machine.
    """

    def __init__(self, config: WorkerConfig, is_on_loopback: bool) -> None:
        self._worker = worker_child(_placed(config, is_on_loopback))
        self._running: asyncio.Task[LifeState] | None = None

    async def next_state(self, seen: LifeState | None) -> LifeState:
        """Return the worker's state as soon as it differs from ``seen``; the first call starts the worker."""
        if self._running is None:
            self._running = asyncio.create_task(self._worker.run())
        return await self._worker.next_state(seen)

    async def stop(self, drain_s: float) -> None:
        """Let the worker drain and end."""
        await self._worker.stop(drain_s=drain_s)


class RankActor:
    """Runs another rank of a worker; made into an actor by the controller.

    Args:
        config: What the worker is told.
        rank: Which rank.
        is_on_loopback: As for a ``WorkerActor``.
    """

    def __init__(self, config: WorkerConfig, rank: int, is_on_loopback: bool) -> None:
        self._config = _placed(config, is_on_loopback)
        self._rank = rank

    async def run(self, meeting: str) -> LifeState:
        """Start the rank, which is to meet the others there, and return how it ended."""
        return await rank_child(RankSpec(worker=self._config, rank=self._rank, meeting=meeting)).run()


def _placed(config: WorkerConfig, is_on_loopback: bool) -> WorkerConfig:
    """Return the config of a process on this machine."""
    host = config.host if is_on_loopback else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    # The raylet is this process's parent.  While it lives, a worker without its actor is a leftover.
    return replace(config, host=host, supervisor_pid=os.getppid())
