"""The detached actor that keeps one deployment's workers running.

It looks twice a second at what is wanted and what runs (``Pools``) and has Ray start or end the
difference.  No request passes here; workers join the router by themselves.  Whoever owns the deployment
calls ``sync`` all the time; when the calls stop, the owner is gone and everything ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import ray

from twinpool.cluster.config import DeploymentSpec
from twinpool.cluster.pools import Pools, WorkerReport
from twinpool.cluster.ray_machines import RayMachines
from twinpool.cluster.roster import Member
from twinpool.core.clock import SystemClock

NAMESPACE = "twinpool"
_TICK_S = 0.25
_OWNER_TIMEOUT_S = 8.0  # without a call of the owner for so long everything ends

_log = logging.getLogger("twinpool.controller")


class Controller:
    """One deployment's pools on Ray; all methods are called through Ray."""

    def __init__(self, spec: DeploymentSpec) -> None:
        self._spec = spec
        self._clock = SystemClock()
        self._heard_s = self._clock.now_s()
        self._wanted: tuple[Member, ...] = ()
        self._to_replace: list[str] = []
        self._reports: tuple[WorkerReport, ...] = ()
        self._is_empty = False
        self._running: asyncio.Task[None] | None = None

    async def sync(self, wanted: Sequence[Member]) -> tuple[WorkerReport, ...]:
        """Say which workers are wanted, and that the owner lives; return how the workers are."""
        self._heard_s = self._clock.now_s()
        self._wanted = tuple(wanted)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        elif self._running.done():
            self._running.result()  # raises what ended it: the owner must not take old news for new
        return self._reports

    async def replace(self, worker_id: str) -> None:
        """Drain one worker and start its next life."""
        self._to_replace.append(worker_id)

    async def finish(self) -> None:
        """Drain every worker; returns when none runs."""
        self._wanted = ()
        while self._running is not None and not (self._is_empty or self._running.done()):
            self._heard_s = self._clock.now_s()
            await asyncio.sleep(_TICK_S / 4)

    async def _run(self) -> None:
        machines = RayMachines(self._spec, asyncio.get_running_loop())
        # A controller that Ray restarts knows nothing of its earlier lives; the time orders them.
        pools = Pools(
            (),
            machines,
            self._clock,
            first_generation=time.time_ns() // 1_000_000,
            start_timeout_s=self._spec.config.timeouts.worker_start_s,
        )
        while True:
            # Ray's calls block, for as long as its control store is away; so they have a thread.
            await asyncio.to_thread(self._tick, pools)
            if not self._wanted and pools.is_empty:
                self._is_empty = True
            if self._clock.now_s() - self._heard_s > _OWNER_TIMEOUT_S:
                _log.error("the owner of %s is gone", self._spec.name)
                await asyncio.to_thread(machines.close)
                ray.kill(ray.get_runtime_context().current_actor)
            await asyncio.sleep(_TICK_S)

    def _tick(self, pools: Pools) -> None:
        pools.want(self._wanted)
        while self._to_replace:
            pools.replace(self._to_replace.pop())
        try:
            pools.tick()
        except ray.exceptions.RayError as error:  # the control store is away; the next tick tries again
            _log.warning("%s: %s", type(error).__name__, error)
        self._reports = pools.report()
