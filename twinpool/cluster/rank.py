"""The life of a rank that is not rank 0: it computes what rank 0 plans, and moves its own heads.

call rank 0 -> join the group, load a share of the model -> start the transports, the server -> ready
  the group closes   leave, exit 0
  rank 0 goes        ends: a rank is nothing by itself
  a step fails       tells rank 0 why, and ends
  SIGTERM            tells rank 0, which drains the worker; without an end of that, exit 1
  a second SIGTERM   exit at once
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from functools import partial

import torch

from kv_transfer.rank import RankTransfers
from twinpool.cluster.blocking import in_thread
from twinpool.cluster.child import threads_of
from twinpool.cluster.child_main import Report, Watch
from twinpool.cluster.config import RankSpec
from twinpool.cluster.failure import describe_failure
from twinpool.cluster.race import Race
from twinpool.cluster.share import group_config, load_share, start_transfers
from twinpool.cluster.trust import worker_trust
from twinpool.core.clock import SystemClock
from twinpool.core.errors import RankLost
from twinpool.core.rank_port import RankHello, RankReady, rank_name
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tasks import OwnedTasks
from twinpool.core.tls import Party
from twinpool.engine.follower import Follower, RankWrittenHook, Written
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.parallel import RankGroup
from twinpool.engine.torch_group import join_group
from twinpool.rpc.door import Door
from twinpool.rpc.rank_meeting import RankStay, join_ranks
from twinpool.rpc.ranks import RankServer

_STOP_MARGIN_S = 15.0  # beyond the drain time, for rank 0 to end the worker


def run_rank(spec: RankSpec, *, report: Report, watch: Watch) -> int:
    """Run a rank until its end and return the process's exit code.

    Raises:
        ServingError: It cannot start or go on.
    """
    trust = worker_trust(spec.worker)
    torch.set_num_threads(threads_of(spec.worker))
    return asyncio.run(_RankLife(spec, trust, report).run(watch))


class _RankLife:
    def __init__(self, spec: RankSpec, trust: Trust, report: Report) -> None:
        self._spec = spec
        self._trust = trust  # towards other workers
        self._among = replace(trust, secret=Secret(bytes.fromhex(spec.secret))) if spec.secret else trust
        self._report = report
        self._asked_to_stop = asyncio.Event()
        self._has_met = False  # rank 0

    async def run(self, watch: Watch) -> int:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._stop)
        watch(partial(self._stop_from_any_thread, loop))
        worker = self._spec.worker
        hello = RankHello(
            rank=self._spec.rank, num_ranks=worker.tensor_parallel, generation=worker.generation
        )
        audience = rank_name(worker.worker_id, 0)
        async with join_ranks(self._spec.meeting, hello, audience=audience, trust=self._among) as stay:
            self._has_met = True
            try:
                return await self._stay(stay)
            except Exception as error:
                await stay.failed(describe_failure(error) or f"{type(error).__name__}: {error}")
                raise

    def _stop(self) -> None:
        # Before it met rank 0 nobody waits for it.
        if self._asked_to_stop.is_set() or not self._has_met:
            os._exit(1)
        self._asked_to_stop.set()

    def _stop_from_any_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._lose_watcher)

    def _lose_watcher(self) -> None:
        if not self._asked_to_stop.is_set():
            self._stop()

    async def _stay(self, stay: RankStay) -> int:
        async with Race() as race:
            gone, stopping = race.start(stay.gone()), race.start(self._asked_to_stop.wait())
            self._report("progress", "loading its share of the model")
            loading = race.start(in_thread(partial(self._load, stay.group_address), name="load"))
            await race.first(loading, gone, stopping)
            if not loading.done():
                raise gone.result() if gone.done() else RankLost("it was asked to end before it could work")
            cache, follower, group = loading.result()
            with closing(group):
                async with self._serving(cache, stay) as transfers:
                    on_written = _from_any_thread(transfers)
                    following = race.start(in_thread(partial(follower.run, on_written), name="follower"))
                    waiting = race.start(self._end_of_patience())
                    await race.first(following, gone, waiting)
                    if following.done():
                        following.result()
                        return 0
                    if gone.done():
                        raise gone.result()
                    return 1

    def _load(self, group_address: str) -> tuple[KVCache, Follower, RankGroup]:
        """Join the others and load; blocks."""
        worker, rank = self._spec.worker, self._spec.rank
        config = group_config(worker, rank=rank, secret=self._among.secret)
        group = join_group(group_address, config, rank=rank)
        try:
            loaded, cache = load_share(worker, group)
            return cache, Follower(loaded, cache), group
        except BaseException:
            group.close()  # nobody waits for this rank
            raise

    @asynccontextmanager
    async def _serving(self, cache: KVCache, stay: RankStay) -> AsyncIterator[RankTransfers]:
        """Move KV, as rank 0 says."""
        worker, rank = self._spec.worker, self._spec.rank
        async with AsyncExitStack() as stack:
            ends = await start_transfers(cache, SystemClock(), worker, self._trust, rank=rank)
            stack.push_async_callback(ends.close)
            sweeping = OwnedTasks()
            stack.push_async_callback(sweeping.close)
            sweeping.start(ends.receiver.run())
            door = Door(self._among, callers=Party.WORKER, audience=rank_name(worker.worker_id, rank))
            transfers = RankTransfers(
                ends.sender,
                ends.receiver,
                counters=lambda: {**ends.counters(), "refused_calls": door.num_refused},
                asked_to_stop=self._asked_to_stop.is_set,
            )
            server = RankServer(transfers, door=door, host=worker.rank_host)
            await server.start()
            stack.push_async_callback(server.stop)
            await stay.ready(RankReady(address=server.address, endpoints=ends.endpoints))
            self._report("joined", "")
            yield transfers

    async def _end_of_patience(self) -> None:
        """Return when this rank was asked to end and the worker has not ended in time."""
        await self._asked_to_stop.wait()
        await asyncio.sleep(self._spec.worker.drain_s + _STOP_MARGIN_S)


def _from_any_thread(transfers: RankTransfers) -> RankWrittenHook:
    """Return what tells ``transfers``, on this event loop, what is in the cache."""
    loop = asyncio.get_running_loop()

    def tell(layer: int, written: tuple[Written, ...]) -> None:
        for each in written:
            transfers.written(each.request_id, layer, each.num_tokens, each.blocks)

    def on_written(layer: int, written: tuple[Written, ...]) -> None:
        loop.call_soon_threadsafe(tell, layer, written)

    return on_written
