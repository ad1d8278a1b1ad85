"""Machines as Ray offers them: placement groups of a pool's workers, and an actor in each bundle.

    start   what fits now (``placement``) gets one placement group per pool, and each worker a bundle of it
    state   heard from the actor; an actor that dies has ended its worker's life
    stop    the actor drains its worker; the actor goes when the worker has gone

A bundle is kept for the worker's next life, and a group goes with its last worker: Ray cannot shrink one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import ray
import ray.exceptions
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinpool.cluster.actors import WorkerActor
from twinpool.cluster.config import DeploymentSpec
from twinpool.cluster.local_ray import first_line
from twinpool.cluster.placement import Machine, Need, place
from twinpool.cluster.pools import Life, LifeState, Phase
from twinpool.core.ports import Role

_GROUP_WAIT_S = 10.0
_KILL_WAIT_S = 2.0
_KILL_AFTER_S = 15.0  # beyond the drain time

_log = logging.getLogger("twinpool.controller")


class RayMachines:
    """Implements ``Machines``; ``start`` and ``stop`` are called from a thread, the rest runs on ``loop``.

    Args:
        spec: What every worker is told and needs.
        loop: The event loop that hears the actors.
    """

    def __init__(self, spec: DeploymentSpec, loop: asyncio.AbstractEventLoop) -> None:
        self._spec = spec
        self._loop = loop
        self._states: dict[Life, LifeState] = {}
        self._actors: dict[Life, Any] = {}
        self._bundles: dict[str, _Bundle] = {}
        self._forgotten: set[str] = set()
        self._stopping: set[Life] = set()
        self._tasks: set[Any] = set()
        self._killers = ThreadPoolExecutor(max_workers=32, thread_name_prefix="kill")

    def start(self, lives: Sequence[Life]) -> Mapping[str, str]:
        """Start what fits into the cluster now; see ``Machines.start``."""
        self._forgotten.difference_update(life.worker_id for life in lives)
        homeless = [life for life in lives if not self._has_bundle(life.worker_id)]
        needs = [
            Need(worker_id=life.worker_id, resources=self._spec.config.resources(life.role))
            for life in homeless
        ]
        fitting, why_not = place(needs, _machines()) if needs else ((), {})
        placed = {need.worker_id for need in fitting}
        for role in Role:
            pool = [life for life in homeless if life.role is role and life.worker_id in placed]
            why_not.update(self._make_group(role, pool) if pool else {})
        for life in lives:
            if life.worker_id not in why_not:
                self._start_actor(life)
        return why_not

    def stop(self, life: Life) -> None:
        """Drain and end a worker; see ``Machines.stop``."""
        actor = self._actors.get(life)
        if life in self._stopping or actor is None:
            return
        self._stopping.add(life)
        self._spawn(self._stop(actor))

    def state(self, life: Life) -> LifeState:
        """Tell what was last heard of a life."""
        return self._states[life]

    def forget(self, worker_id: str) -> None:
        """Give a worker's room back, if it was the last of its group."""
        self._forgotten.add(worker_id)
        groups = {bundle.group.id: bundle.group for bundle in self._bundles.values()}
        for group_id, group in groups.items():
            members = {key for key, bundle in self._bundles.items() if bundle.group.id == group_id}
            if members <= self._forgotten:
                self._bundles = {key: value for key, value in self._bundles.items() if key not in members}
                remove_placement_group(group)

    def close(self) -> None:
        """End every actor at once, and its worker with it."""
        for actor in list(self._actors.values()):
            _kill(actor)
        for worker_id in list(self._bundles):
            self.forget(worker_id)

    def _make_group(self, role: Role, pool: Sequence[Life]) -> Mapping[str, str]:
        resources = dict(self._spec.config.resources(role))
        group = placement_group([resources for _ in pool], strategy=self._spec.config.placement)
        if not group.wait(timeout_seconds=_GROUP_WAIT_S):
            remove_placement_group(group)
            return {
                life.worker_id: f"{life.worker_id} waits: Ray found no room within {_GROUP_WAIT_S:g} s"
                for life in pool
            }
        for index, life in enumerate(pool):
            self._bundles[life.worker_id] = _Bundle(group, index)
        return {}

    def _has_bundle(self, worker_id: str) -> bool:
        """Whether a worker's place still exists; Ray moves the bundles of a lost machine if it can."""
        bundle = self._bundles.get(worker_id)
        if bundle is not None and not bundle.group.wait(timeout_seconds=1):
            del self._bundles[worker_id]
        return worker_id in self._bundles

    def _start_actor(self, life: Life) -> None:
        bundle = self._bundles[life.worker_id]
        resources = self._spec.config.resources(life.role)
        actor_class: Any = ray.remote(WorkerActor)
        actor = actor_class.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=bundle.group, placement_group_bundle_index=bundle.index
            ),
        ).remote(
            replace(self._spec.worker, worker_id=life.worker_id, role=life.role, generation=life.generation),
            self._spec.is_on_loopback,
        )
        self._states[life] = LifeState(detail="waits for its actor")
        self._actors[life] = actor
        _log.info("starting %s, generation %d", life.worker_id, life.generation)
        self._spawn(self._follow(life, actor))

    async def _follow(self, life: Life, actor: Any) -> None:
        seen: LifeState | None = None
        try:
            while seen is None or seen.phase is not Phase.ENDED:
                seen = await actor.next_state.remote(seen)
                assert seen is not None
                if seen.phase is not Phase.ENDED:
                    self._states[life] = seen
        except ray.exceptions.RayError as error:
            known = seen or LifeState()
            seen = replace(known, phase=Phase.ENDED, detail=f"Ray lost its actor: {first_line(error)}")
        _log.info("%s, generation %d, ended: %s", life.worker_id, life.generation, seen.detail)
        # The actor goes before the life is called over, so that its resources are free for the next one.
        del self._actors[life]
        self._stopping.discard(life)
        await self._kill(actor)
        self._states[life] = seen

    async def _stop(self, actor: Any) -> None:
        drain_s = self._spec.config.timeouts.drain_s
        try:
            await asyncio.wait_for(actor.stop.remote(drain_s), drain_s + _KILL_AFTER_S)
        except TimeoutError:
            await self._kill(actor)
        except ray.exceptions.RayError:
            return  # its end is told by ``_follow``

    async def _kill(self, actor: Any) -> None:
        """End an actor; while Ray's control store is away, the attempt goes on in a thread of its own."""
        killing = self._loop.run_in_executor(self._killers, _kill, actor)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(killing), _KILL_WAIT_S)

    def _spawn(self, work: Any) -> None:
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: Any) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("following a worker failed", exc_info=task.exception())


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A worker's place: one bundle of a placement group."""

    group: PlacementGroup
    index: int


def _machines() -> list[Machine]:
    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Machine(total=node["Resources"], available=available.get(node["NodeID"], {}))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor, no_restart=True)
