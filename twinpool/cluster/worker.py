"""The life of one worker process, from its start to its end, whatever the reason of that.

A worker is the same whatever its role; the role is a label that the router acts on.  Of one with several
ranks this is the process of rank 0, which all others follow.  Knows no Ray.

    load the model, with the other ranks -> start the services -> join the router
      SIGTERM            take nothing new, finish what runs for at most ``drain_s``, leave, exit 0
      a second SIGTERM   exit at once
      refused            ends with the router's reason: the same settings would be refused again
      engine dead        ends with what killed it
      engine hung        after ``hung_s`` with work and without a step: exit 1, at once
      rank lost          exit 2, at once: nothing can be computed or given back without it
      router away        keep trying; after ``orphan_s``, if set, exit 1
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing
from functools import partial
from typing import Literal, NoReturn

import torch

from twinpool.cluster.blocking import in_thread
from twinpool.cluster.child import threads_of
from twinpool.cluster.child_main import Report, Watch
from twinpool.cluster.config import WorkerConfig
from twinpool.cluster.race import Race
from twinpool.cluster.ranks import OtherRanks, other_ranks
from twinpool.cluster.services import Services, serving
from twinpool.cluster.share import LeadingRank, load_leading
from twinpool.cluster.trust import worker_trust
from twinpool.core.clock import Clock, SystemClock
from twinpool.core.errors import RankLost
from twinpool.core.ports import WorkerLoad
from twinpool.core.security import Trust
from twinpool.engine.worker import WorkerService
from twinpool.rpc.join import join

_LOOK_EVERY_S = 1.0  # at the engine, for whether it hangs
_REASON_S = 2.0  # for the reason of a rank's end to be known


def run_worker(config: WorkerConfig, *, report: Report, watch: Watch | None = None) -> int:
    """Run a worker until its end and return the process's exit code.

    Args:
        config: All it needs to know.
        report: Told what it does and when the router took it.
        watch: Called once with what to call, from any thread, when whoever watches over this process is
            gone; the worker drains then.

    Raises:
        ServingError: It cannot start, the router does not take it, or its engine died of a bug.
    """
    trust = worker_trust(config)
    torch.set_num_threads(threads_of(config))
    return asyncio.run(_Life(config, trust, report).run(watch))


class _Life:
    def __init__(self, config: WorkerConfig, trust: Trust, report: Report) -> None:
        self._config = config
        self._trust = trust
        self._report = report
        self._clock: Clock = SystemClock()
        self._asked_to_stop = asyncio.Event()
        self._has_joined = False
        self._heard_s = 0.0  # when the router last heard us, or when we began to call it

    async def run(self, watch: Watch | None) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if watch is not None:
            watch(partial(self._stop_from_any_thread, loop))
        async with (
            Race() as race,
            other_ranks(
                self._config,
                self._trust,
                report=self._report,
                on_asked_to_stop=self._asked_to_stop.set,
            ) as others,
        ):
            lost, stopping = race.start(others.lost()), race.start(self._asked_to_stop.wait())
            self._report("progress", f"loading {self._config.model_name}")
            starting = race.start(self._start(others))
            await race.first(starting, lost, stopping)
            if stopping.done() and not starting.done():
                return 0
            rank_0 = await _unless_lost(starting, lost)
            with closing(rank_0.group):
                async with serving(
                    self._config, self._trust, self._clock, rank_0=rank_0, others=others
                ) as services:
                    return await self._serve(services, race, lost=lost, stopping=stopping)

    def _stop(self) -> None:
        if self._asked_to_stop.is_set():
            os._exit(1)
        self._asked_to_stop.set()

    def _stop_from_any_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._asked_to_stop.set)

    async def _start(self, others: OtherRanks) -> LeadingRank:
        """Load the model together with the other ranks, and wait until they can move KV."""
        rank_0 = await in_thread(partial(load_leading, self._config, others.lead), name="load")
        try:
            await others.ready()
        except BaseException:
            rank_0.group.close()
            raise
        return rank_0

    async def _serve(
        self,
        services: Services,
        race: Race,
        *,
        lost: asyncio.Task[RankLost],
        stopping: asyncio.Task[Literal[True]],
    ) -> int:
        """Stay joined to the router until something ends that; return the exit code."""
        config, worker = self._config, services.worker
        self._report("progress", f"joining {config.join}")
        self._heard_s = self._clock.now_s()
        joining = race.start(
            join(config.join, services.info, lambda: self._heartbeat(worker), trust=self._trust)
        )
        failing = race.start(services.engine.failed())
        orphaned, hanging = race.start(self._orphaned()), race.start(self._end_if_hung(worker))
        await race.first(joining, failing, stopping, orphaned, hanging, lost)
        if stopping.done():
            draining = race.start(worker.drain(timeout_s=config.drain_s))
            await race.first(draining, failing, lost)
        if failing.done():
            error = failing.result()
            if isinstance(error, RankLost):
                await self._end_at_once(lost, error)
            raise error
        if lost.done():
            await self._end_at_once(lost, lost.result())
        if stopping.done():
            return 0
        if joining.done():
            joining.result()
        return 1

    async def _end_at_once(self, lost: asyncio.Task[RankLost], error: RankLost) -> NoReturn:
        """End the process after the loss of a rank: what runs here now, the router lets run elsewhere."""
        await asyncio.wait({lost}, timeout=_REASON_S)
        self._report("failed", str(lost.result() if lost.done() else error))
        os._exit(2)

    def _heartbeat(self, service: WorkerService) -> WorkerLoad:
        if not self._has_joined:
            self._report("joined", "")
        self._has_joined = True
        self._heard_s = self._clock.now_s()
        return service.load()

    async def _orphaned(self) -> None:
        """Return when the router was away for longer than a worker of its kind waits."""
        if self._config.orphan_s is None:
            await asyncio.Event().wait()
            return
        while True:
            left_s = self._heard_s + self._config.orphan_s - self._clock.now_s()
            if left_s <= 0:
                self._report("progress", f"no router for {self._config.orphan_s:g} s")
                return
            await asyncio.sleep(left_s)

    async def _end_if_hung(self, service: WorkerService) -> None:
        """End the process when its engine hangs: no thread can be ended, and no block be given back.

        Two looks decide, since a process that was frozen as a whole may look at the engine before it moves.
        """
        was_hung = False
        while True:
            await asyncio.sleep(min(_LOOK_EVERY_S, self._config.hung_s / 4))
            stalled_s = service.load().stalled_s
            is_hung = stalled_s >= self._config.hung_s
            if is_hung and was_hung:
                self._report("failed", f"the engine has work and has taken no step for {stalled_s:.0f} s")
                os._exit(1)
            was_hung = is_hung


async def _unless_lost(starting: asyncio.Task[LeadingRank], lost: asyncio.Task[RankLost]) -> LeadingRank:
    """Return what was started, or raise why it is not; the reason of a rank's end is known to that rank."""
    if starting.done() and not isinstance(starting.exception(), RankLost):
        return starting.result()
    await asyncio.wait({lost}, timeout=_REASON_S)
    raise lost.result() if lost.done() else RankLost(str(starting.exception()))
