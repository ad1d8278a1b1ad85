"""A deployment under virtual time: live engines, live routing, and a workload that comes to it.

Nothing is random here, so a workload gives the same records each time.  Memory does not grow with the number
of requests: an item is taken from the workload when it is due, and a record is given away when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import cast

from router.claim import Claim
from router.placing import Placing
from router.policy import load_policy
from router.roles import check_change, roles_of_others
from router.tenure import Reassigned
from router.tries import Tries
from router.waiting_line import WaitingLine
from router.workers import WorkerHandle, WorkerPool, WorkerPorts
from twinpool.core.errors import ConfigError, InvalidRequest, PromptTooLong, ServingError, WorkerLost
from twinpool.core.ports import Role, WorkerInfo
from twinpool.engine.engine import Engine, EngineLimits
from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.summary import Summary
from twinpool.lab.profile.profile import Profile, hop_s_of, load_profile
from twinpool.lab.record import Record
from twinpool.lab.simulate.config import LONGEST_S, Emulate, Loss, Pool, RoleChange, SimulationConfig
from twinpool.lab.simulate.cost_runner import CostRunner
from twinpool.lab.simulate.emulate import emulated_cost, emulated_item
from twinpool.lab.simulate.journey import Journey
from twinpool.lab.simulate.machine import Machine
from twinpool.lab.simulate.prompts import request_of
from twinpool.lab.simulate.result import SimulationResult, WorkerUse
from twinpool.lab.simulate.timetable import Timetable
from twinpool.lab.simulate.transfer import Way, without_time
from twinpool.lab.simulate.worker import SimulatedWorker
from twinpool.lab.workload.item import WorkItem

LOOK_EVERY_S = 0.05  # at a worker that empties for another role
_LATEST_S = 1e9  # of an arrival: the floats of later times lie too far apart for steps


def run_simulation(
    items: Iterable[WorkItem],
    config: SimulationConfig,
    *,
    limits: Limits | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> SimulationResult:
    """Let a workload come to a deployment, and return what became of it.

    Args:
        items: In the order of their arrival; may be a generator.  Either all of them say what they contain
            (``WorkItem.blocks``), or none: prefixes are then not looked for, since none can be equal.
        config: The deployment.
        limits: What makes an answer a good one.
        on_record: Gets each record once its request has ended, in the order of their ends.

    Raises:
        ConfigError: The deployment cannot be, or the workload is out of order.
    """
    return Simulation(items, config, limits=limits, on_record=on_record).run()


class Simulation:
    """One run; implements ``journey.Deployment``."""

    def __init__(
        self,
        items: Iterable[WorkItem],
        config: SimulationConfig,
        *,
        limits: Limits | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        self.timetable = Timetable()
        self.queue_timeout_s = config.router.queue_timeout_s
        self._config = config
        self._items: Iterator[WorkItem] = iter(items)
        self._next = next(self._items, None)
        self._knows_contents = self._next is not None and bool(self._next.blocks)
        self._summary = Summary(limits)
        self._on_record = on_record
        self._journeys: dict[Journey, None] = {}
        self._is_beating = False
        self._limit_tokens = 0  # the largest request that every worker can hold
        self._lives: dict[str, SimulatedWorker] = {}  # by id of the life
        self._current: dict[str, str] = {}  # the latest life of each worker
        self._pool_of: dict[str, Pool] = {}
        self._profiles: dict[str, Profile] = {}
        self._machines: dict[str, Machine] = {}  # by profile, of those whose workers share one
        self.hop_s = hop_s_of(map(self._profile, config.pools), asked_s=config.hop_s)
        if self.hop_s > LONGEST_S:
            raise ConfigError("hop_s", f"{self.hop_s:g} is more than {LONGEST_S:g}")
        is_shared = config.emulate is not Emulate.SPLITWISE_SIM
        link = config.transfer.resolve(self._profile(config.pools[0]).transfers)
        if config.emulate is Emulate.SIMDISTSERVE:
            link = without_time(link)
        self.way = Way(
            link, overlap=config.transfer.overlap, compact=config.transfer.compact, is_shared=is_shared
        )
        roles = {pool.role for pool in config.pools}
        self._pool = WorkerPool(
            config.router,
            clock=self.timetable,
            connect=_nothing,
            needs_prefill=Role.PREFILL in roles,
        )
        self.line: WaitingLine[Claim] = WaitingLine(
            max_queued=config.router.max_queued,
            overtake_s=config.router.overtake_s,
            clock=self.timetable,
        )
        self.placing = Placing(self._pool, load_policy(config.router.policy), on_freed=self.line.wake)
        self._pool.subscribe(self.line.wake)
        names = iter(config.worker_ids())
        for pool in config.pools:
            for _ in range(pool.workers):
                name = next(names)
                self._pool_of[name] = pool
                self._join(name, pool.role, generation=1)
        for change in config.role_changes:
            self.timetable.at(change.at_s, lambda change=change: self._begin_change(change))  # type: ignore[misc]
        for loss in config.losses:
            self.timetable.at(loss.at_s, lambda loss=loss: self._lose(loss))  # type: ignore[misc]

    def run(self) -> SimulationResult:
        """Run to the end of the last request."""
        if self._next is not None:
            self._expect(self._next)
            self.timetable.run()
        assert not self._journeys, "requests are open and nothing is to happen any more"
        return self.result()

    def result(self) -> SimulationResult:
        """Return what became of it so far."""
        uses: dict[str, WorkerUse] = {}
        for life_id, worker in self._lives.items():
            name = life_id.partition("/")[0]
            use = WorkerUse.of(name, worker)
            uses[name] = use if name not in uses else uses[name].plus(use)
        return SimulationResult(
            summary=self._summary, workers=tuple(uses.values()), simulated_s=self.timetable.time_s
        )

    # What a journey goes through.

    def worker(self, claim: Claim, role: Role) -> SimulatedWorker:
        handle = claim.prefill if role is Role.PREFILL else claim.decode
        assert handle is not None, f"a claim without a worker for {role}"
        return self._lives[handle.worker_id]

    def can_answer(self) -> bool:
        return self._pool.can_answer

    def over(self, journey: Journey, record: Record) -> None:
        self._journeys.pop(journey, None)
        if self._next is None and not self._journeys:
            self.timetable.stop()
        self._summary.add(record)
        if self._on_record is not None:
            self._on_record(record)

    # The workload.

    def _expect(self, item: WorkItem) -> None:
        if item.arrival_s < self.timetable.time_s:
            raise ConfigError("workload", f"request {item.index} comes before the one ahead of it")
        if item.arrival_s > _LATEST_S:
            problem = f"comes after {item.arrival_s:g} s, more than {_LATEST_S:g}"
            raise ConfigError("workload", f"request {item.index} {problem}")
        if bool(item.blocks) != self._knows_contents:
            raise ConfigError(
                "workload", f"request {item.index} has blocks and others have not, or the reverse"
            )
        self.timetable.at(item.arrival_s, self._arrive)

    def _arrive(self) -> None:
        item = self._next
        assert item is not None, "nobody is expected"
        self._next = next(self._items, None)
        self._start(emulated_item(item, self._config.emulate))
        if self._next is not None:
            self._expect(self._next)

    def _start(self, item: WorkItem) -> None:
        router = self._config.router
        needed, limit = item.prompt_tokens + item.output_tokens, self._limit_tokens
        # Nobody takes what is too long, so its tokens, of which there may be any number, are not made.
        taken = item if needed <= limit else replace(item, prompt_tokens=1, blocks=())
        request = request_of(taken, timeout_s=router.request_timeout_s, num_tokens=item.output_tokens)
        tries = Tries(max_attempts=router.max_attempts, on_transfer_failure=router.on_transfer_failure)
        journey = Journey(item, request, tries, self)
        self._journeys[journey] = None
        if needed > limit:
            journey.refuse(PromptTooLong(needed_tokens=needed, limit_tokens=limit))
            return
        if not self._is_beating:
            self._is_beating = True
            beat_s = router.heartbeat_s
            self.timetable.at((self.timetable.time_s // beat_s + 1.0) * beat_s, self._beat)
        journey.seek()

    # The workers.

    def _join(self, life_id: str, role: Role, *, generation: int) -> None:
        name = life_id.partition("/")[0]
        pool = self._pool_of[name]
        profile = self._profile(pool)
        engine_config = replace(pool.engine, prefix_cache=pool.engine.prefix_cache and self._knows_contents)
        block_tokens = engine_config.block_tokens
        info = WorkerInfo(
            worker_id=life_id,
            role=role,
            address="",
            pid=0,
            host="",
            generation=generation,
            model=profile.model.name,
            fingerprint={},
            layout=profile.layout(block_tokens=block_tokens),
            num_blocks=profile.num_blocks(block_tokens=block_tokens),
            max_model_tokens=self._config.max_model_tokens or profile.model.max_tokens,
            ranks=((),) * profile.tp,
        )
        cost = emulated_cost(profile.cost_model(), self._config.emulate)
        runner = CostRunner(cost)
        engine = Engine(
            runner,
            config=engine_config,
            limits=EngineLimits(
                num_blocks=info.num_blocks, max_model_tokens=info.max_model_tokens, vocab_size=None
            ),
            clock=self.timetable,
        )
        worker = SimulatedWorker(
            info,
            engine,
            runner=runner,
            cost=cost,
            bytes_s=self.way.link.worker_bytes_s(profile.tp),
            shares_prefixes=engine_config.prefix_cache,
            reserves_at_once=self._config.emulate is Emulate.SPLITWISE_SIM,
            timetable=self.timetable,
            machine=self._machine(pool.profile),
        )
        self._lives[life_id] = worker
        self._current[name] = life_id
        self._pool.joined(info)
        self._limit_tokens = self._pool.max_request_tokens or 0
        self._pool.heard(life_id, generation, worker.load())

    def _profile(self, pool: Pool) -> Profile:
        if pool.profile not in self._profiles:
            self._profiles[pool.profile] = load_profile(pool.profile)
        profile = self._profiles[pool.profile]
        return replace(profile, kv_cache_bytes=pool.kv_cache_bytes) if pool.kv_cache_bytes else profile

    def _machine(self, name: str) -> Machine | None:
        slowdown = self._profiles[name].slowdown
        if slowdown is not None and name not in self._machines:
            self._machines[name] = Machine(slowdown, self.timetable)
        return self._machines.get(name)

    def _beat(self) -> None:
        """Tell the router how the workers are, as their heartbeats do."""
        for handle in self._pool.handles:
            worker = self._lives[handle.worker_id]
            if worker.has_changed and not worker.is_lost:
                self._pool.heard(handle.worker_id, handle.info.generation, worker.load())
        self._is_beating = bool(self._journeys)
        if self._is_beating:
            self.timetable.at(self.timetable.time_s + self._config.router.heartbeat_s, self._beat)

    def _lose(self, loss: Loss) -> None:
        life_id = self._current[loss.worker]
        worker, handle = self._lives[life_id], self._handle(life_id)
        if worker.is_lost:
            return
        role = handle.info.role
        handle.lose("it died")
        worker.lose()
        self._fail_all(worker, WorkerLost(life_id, "it died"))
        if loss.back_after_s is not None:
            generation = worker.info.generation + 1
            self.timetable.at(
                self.timetable.time_s + loss.back_after_s,
                lambda: self._join(f"{loss.worker}/{generation}", role, generation=generation),
            )

    def _fail_all(self, worker: SimulatedWorker, error: ServingError) -> None:
        for journey in [journey for journey in self._journeys if journey.needs(worker)]:
            journey.failed(error)

    def _begin_change(self, change: RoleChange) -> None:
        life_id = self._current[change.worker]
        worker, handle = self._lives[life_id], self._handle(life_id)
        if worker.is_lost or handle.info.role is change.role:
            return
        try:
            check_change(self._pool, handle, change.role)
        except InvalidRequest as error:
            raise ConfigError("role_changes", f"at {change.at_s:g} s {error}") from None
        self._pool.begin_change(handle, change.role)
        move_s = self.timetable.time_s + change.timeout_s

        def look() -> None:
            if worker.is_lost:
                return
            if handle.in_flight or worker.engine.num_sequences:
                if self.timetable.time_s >= move_s:
                    if handle.in_flight and not self._pool.can_answer_with(
                        roles_of_others(self._pool, handle)
                    ):
                        self._pool.end_change(handle)
                        return
                    self._fail_all(worker, Reassigned(life_id, handle.end_tenure()))
                self.timetable.at(self.timetable.time_s + LOOK_EVERY_S, look)
                return
            self._pool.assign(handle, change.role)
            self._pool.end_change(handle)

        look()

    def _handle(self, life_id: str) -> WorkerHandle:
        handle = self._pool.get(life_id)
        assert handle is not None, f"{life_id} never joined"
        return handle


def _nothing(_info: WorkerInfo) -> WorkerPorts:
    """No wire leads to a simulated worker: its engine is called."""
    return cast(WorkerPorts, None)
