"""Machines as Ray offers them: placement groups, with a bundle and an actor for each rank of a worker.

    start   what fits now (``placement``) gets its place: the workers of a pool in one placement group, and a
            worker of several ranks in one of its own
    state   heard from the actor of rank 0; a rank or an actor that dies has ended its worker's life
    stop    that actor drains its worker; the actors go when the worker has gone

A place is kept for the worker's next life, and a group goes with its last worker: Ray cannot shrink one.
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

from twinpool.cluster.actors import RankActor, WorkerActor
from twinpool.cluster.config import DeploymentSpec, PoolConfig
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
        self._actors: dict[Life, tuple[Any, ...]] = {}  # of each rank
        self._places: dict[str, _Place] = {}
        self._forgotten: set[str] = set()
        self._stopping: set[Life] = set()
        self._tasks: set[Any] = set()
        self._killers = ThreadPoolExecutor(max_workers=32, thread_name_prefix="kill")

    def start(self, lives: Sequence[Life]) -> Mapping[str, str]:
        """Start what fits into the cluster now; see ``Machines.start``."""
        self._forgotten.difference_update(life.worker_id for life in lives)
        homeless = [life for life in lives if not self._has_place(life.worker_id)]
        needs = [self._need(life) for life in homeless]
        fitting, why_not = place(needs, _machines()) if needs else ((), {})
        placed = {need.worker_id for need in fitting}
        for role in Role:
            pool = [life for life in homeless if life.pool is role and life.worker_id in placed]
            for together in _together(pool, self._pool(role)):
                why_not.update(self._make_group(role, together))
        for life in lives:
            if life.worker_id not in why_not:
                self._start_actors(life)
        return why_not

    def stop(self, life: Life) -> None:
        """Drain and end a worker; see ``Machines.stop``."""
        actors = self._actors.get(life)
        if life in self._stopping or actors is None:
            return
        self._stopping.add(life)
        self._spawn(self._stop(actors[0]))

    def state(self, life: Life) -> LifeState:
        """Tell what was last heard of a life."""
        return self._states[life]

    def forget(self, worker_id: str) -> None:
        """Give a worker's room back, if it was the last of its group."""
        self._forgotten.add(worker_id)
        groups = {place.group.id: place.group for place in self._places.values()}
        for group_id, group in groups.items():
            members = {key for key, place in self._places.items() if place.group.id == group_id}
            if members <= self._forgotten:
                self._places = {key: value for key, value in self._places.items() if key not in members}
                remove_placement_group(group)

    def close(self) -> None:
        """End every actor at once, and its worker with it."""
        for actor in [actor for actors in self._actors.values() for actor in actors]:
            _kill(actor)
        for worker_id in list(self._places):
            self.forget(worker_id)

    def _pool(self, role: Role) -> PoolConfig:
        return self._spec.config.pools.by_role()[role]

    def _need(self, life: Life) -> Need:
        pool = self._pool(life.pool)
        return Need(
            worker_id=life.worker_id,
            resources=self._spec.config.resources(life.pool),
            num_ranks=pool.tensor_parallel,
            on_one_machine=pool.ranks_on == "one_machine",
        )

    def _make_group(self, role: Role, pool: Sequence[Life]) -> Mapping[str, str]:
        """Give workers their places in one new group: several workers, or several ranks of one."""
        num_ranks = self._pool(role).tensor_parallel
        bundles = [dict(self._spec.config.resources(role)) for _ in range(len(pool) * num_ranks)]
        group = placement_group(bundles, strategy=self._strategy(role))
        if not group.wait(timeout_seconds=_GROUP_WAIT_S):
            remove_placement_group(group)
            return {
                life.worker_id: f"{life.worker_id} waits: Ray found no room within {_GROUP_WAIT_S:g} s"
                for life in pool
            }
        for index, life in enumerate(pool):
            self._places[life.worker_id] = _Place(group, index * num_ranks)
        return {}

    def _strategy(self, role: Role) -> str:
        pool = self._pool(role)
        if pool.tensor_parallel == 1:
            return self._spec.config.placement
        return "STRICT_PACK" if pool.ranks_on == "one_machine" else "PACK"

    def _has_place(self, worker_id: str) -> bool:
        """Whether a worker's place still exists; Ray moves the bundles of a lost machine if it can."""
        place = self._places.get(worker_id)
        if place is not None and not place.group.wait(timeout_seconds=1):
            del self._places[worker_id]
        return worker_id in self._places

    def _start_actors(self, life: Life) -> None:
        config = self._spec.worker_of(life)
        leader = self._actor(WorkerActor, life, rank=0).remote(config, self._spec.is_on_loopback)
        others = [
            self._actor(RankActor, life, rank=rank).remote(config, rank, self._spec.is_on_loopback)
            for rank in range(1, config.tensor_parallel)
        ]
        self._states[life] = LifeState(detail="waits for its actor")
        self._actors[life] = (leader, *others)
        _log.info("starting %s, generation %d", life.worker_id, life.generation)
        self._spawn(self._follow(life, leader, others))

    def _actor(self, kind: type, life: Life, *, rank: int) -> Any:
        """Return what makes the actor of a rank, in its place."""
        place, resources = self._places[life.worker_id], self._spec.config.resources(life.pool)
        actor_class: Any = ray.remote(kind)
        return actor_class.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=place.group, placement_group_bundle_index=place.first_bundle + rank
            ),
        )

    async def _follow(self, life: Life, leader: Any, others: Sequence[Any]) -> None:
        """Hear a life out; the first rank that goes tells why, unless the worker ends as it should."""
        meeting: asyncio.Future[str] = self._loop.create_future()
        leading = asyncio.create_task(self._hear(life, leader, meeting))
        failing = [
            asyncio.create_task(_run_rank(rank, actor, meeting)) for rank, actor in enumerate(others, start=1)
        ]
        await asyncio.wait({leading, *failing}, return_when=asyncio.FIRST_COMPLETED)
        reasons = [rank.result() for rank in failing if rank.done()]
        # Without one of its ranks rank 0 ends by itself, and at once.
        await asyncio.wait({leading}, timeout=_KILL_AFTER_S)
        end = leading.result() if leading.done() else replace(self._states[life], phase=Phase.ENDED)
        if reasons and not end.is_drained:
            end = replace(end, detail=reasons[0])
        for task in (leading, *failing):
            task.cancel()
        await asyncio.gather(leading, *failing, return_exceptions=True)
        _log.info("%s, generation %d, ended: %s", life.worker_id, life.generation, end.detail)
        # The actors go before the life is called over, so that their resources are free for the next one.
        del self._actors[life]
        self._stopping.discard(life)
        await asyncio.gather(*(self._kill(actor) for actor in (leader, *others)))
        self._states[life] = end

    async def _hear(self, life: Life, leader: Any, meeting: asyncio.Future[str]) -> LifeState:
        """Note what rank 0 is at until it has ended; return how."""
        seen: LifeState | None = None
        try:
            while True:
                seen = await leader.next_state.remote(seen)
                assert seen is not None
                if seen.phase is Phase.ENDED:
                    return seen
                self._states[life] = seen
                if seen.meeting and not meeting.done():
                    meeting.set_result(seen.meeting)
        except ray.exceptions.RayError as error:
            known = seen or LifeState()
            return replace(known, phase=Phase.ENDED, detail=f"Ray lost its actor: {first_line(error)}")

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
class _Place:
    """A worker's place: a bundle of a placement group for each of its ranks."""

    group: PlacementGroup
    first_bundle: int


def _together(pool: Sequence[Life], config: PoolConfig) -> Sequence[Sequence[Life]]:
    """Return who of a pool shares a placement group: all, or nobody where each worker fills one."""
    return [[life] for life in pool] if config.tensor_parallel > 1 else [pool] if pool else []


async def _run_rank(rank: int, actor: Any, meeting: asyncio.Future[str]) -> str:
    """Run another rank once rank 0 waits for it; return why it failed, or never if it did not."""
    try:
        end = await actor.run.remote(await asyncio.shield(meeting))
    except ray.exceptions.RayError as error:
        return f"rank {rank}: Ray lost its actor: {first_line(error)}"
    if end.is_drained:  # as the whole worker does
        await asyncio.Event().wait()
    return f"rank {rank}: {end.detail}"


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
