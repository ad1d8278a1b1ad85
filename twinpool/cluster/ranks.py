"""The other ranks of a worker: how its rank 0 starts them, waits for them and learns of their end.

meeting -> the others come: children of this process, or started elsewhere -> group -> all ready
  one of them goes     the worker is over: no rank can compute or give a block back without it
  one is asked to end  this process is asked to
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol

from twinpool.cluster.child import ChildProcess, rank_child
from twinpool.cluster.child_main import Report
from twinpool.cluster.config import RankSpec, WorkerConfig
from twinpool.cluster.share import group_config
from twinpool.core.errors import RankLost, ServingError
from twinpool.core.rank_port import RankPort, RankState, rank_name
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party
from twinpool.engine.parallel import RankGroup, SingleRank
from twinpool.engine.rank_links import address_of, listen
from twinpool.engine.torch_group import lead_group
from twinpool.rpc.door import Door
from twinpool.rpc.rank_meeting import RankMeeting
from twinpool.rpc.ranks import RankClient

_ASK_EVERY_S = 1.0  # how the others are
_LEAVE_S = 1.0  # for the others to leave once the group is closed, and for their processes to end
_REASON_S = 1.0  # for a dead child's own reason to be known

_log = logging.getLogger(__name__)


class OtherRanks(Protocol):
    """All ranks but rank 0, in order."""

    @property
    def ports(self) -> Sequence[RankPort]: ...

    @property
    def endpoints(self) -> Sequence[tuple[Endpoint, ...]]:
        """Where KV reaches each of them."""
        ...

    def lead(self) -> RankGroup:
        """Wait until all have joined the group that computes together; blocks.

        Raises:
            RankLost: Some did not come in time.
        """
        ...

    async def ready(self) -> None:
        """Wait until all can work; from then on there are ports and endpoints."""
        ...

    async def lost(self) -> RankLost:
        """Wait until one of them goes, for whatever reason; return that."""
        ...

    async def num_transfers(self) -> int:
        """Ask each for its transfers that are not over; return the sum.

        Raises:
            WorkerLost: One does not answer.
        """
        ...

    def counters(self) -> Mapping[str, int]:
        """Return the sums of their totals, a second old at most."""
        ...


@asynccontextmanager
async def other_ranks(
    config: WorkerConfig, trust: Trust, *, report: Report, on_asked_to_stop: Callable[[], None]
) -> AsyncIterator[OtherRanks]:
    """Give the other ranks of a worker; at the end wait for theirs.

    Whoever leads a group closes it before: that ends them.

    Args:
        config: Of the worker.
        trust: Of this process.
        report: Told where ranks are to come that are started elsewhere.
        on_asked_to_stop: Called when somebody wants one of them to end.

    Raises:
        ConfigError: The ranks cannot meet at the address of this machine.
    """
    if config.tensor_parallel == 1:
        yield _NoOthers()
        return
    # Even where nobody else proves anything, nobody else can be a rank of this worker.
    among = trust if trust.secret.is_set else replace(trust, secret=Secret.random())
    async with AsyncExitStack() as stack:
        listener = listen(config.rank_host)
        stack.callback(listener.close)
        door = Door(among, callers=Party.WORKER, audience=rank_name(config.worker_id, 0))
        meeting = RankMeeting(
            num_ranks=config.tensor_parallel,
            generation=config.generation,
            group_address=address_of(listener),
            door=door,
            host=config.rank_host,
        )
        await meeting.start()
        stack.push_async_callback(meeting.stop)
        if not config.starts_ranks:
            report("meeting", meeting.address)
        children = [rank_child(spec) for spec in _specs(config, meeting.address, trust, among)]
        others = _Others(
            config,
            among,
            listener=listener,
            meeting=meeting,
            children=children,
            on_asked_to_stop=on_asked_to_stop,
        )
        stack.push_async_callback(others.close)
        yield others


def summed(counters: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    """Return the sums of totals by name."""
    totals: Counter[str] = Counter()
    for each in counters:
        totals.update(each)
    return totals


def _specs(config: WorkerConfig, meeting: str, trust: Trust, among: Trust) -> Sequence[RankSpec]:
    """Return what the ranks are told that are started here."""
    secret = "" if trust.secret.is_set else among.secret.key.hex()
    ranks = range(1, config.tensor_parallel) if config.starts_ranks else ()
    # A child ends with this process, whatever becomes of the supervisor of this one.
    worker = replace(config, supervisor_pid=None)
    return [RankSpec(worker=worker, rank=rank, meeting=meeting, secret=secret) for rank in ranks]


class _NoOthers:
    """Implements ``OtherRanks`` where there are none."""

    ports: Sequence[RankPort] = ()
    endpoints: Sequence[tuple[Endpoint, ...]] = ()

    def lead(self) -> RankGroup:
        return SingleRank()

    async def ready(self) -> None:
        """Nobody is waited for."""

    async def lost(self) -> RankLost:
        await asyncio.Event().wait()
        raise AssertionError("nobody goes")

    async def num_transfers(self) -> int:
        return 0

    def counters(self) -> Mapping[str, int]:
        return {}


class _Others:
    """Implements ``OtherRanks`` by a meeting and a client of each."""

    def __init__(
        self,
        config: WorkerConfig,
        trust: Trust,
        *,
        listener: socket.socket,
        meeting: RankMeeting,
        children: Sequence[ChildProcess],
        on_asked_to_stop: Callable[[], None],
    ) -> None:
        self._config = config
        self._trust = trust
        self._listener = listener
        self._meeting = meeting
        self._on_asked_to_stop = on_asked_to_stop
        self._clients: tuple[RankClient, ...] = ()
        self._endpoints: tuple[tuple[Endpoint, ...], ...] = ()
        self._states: tuple[RankState, ...] = ()
        self._children = tuple(children)
        self._ends = [asyncio.create_task(child.run()) for child in children]
        self._silent: asyncio.Future[RankLost] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def ports(self) -> Sequence[RankPort]:
        return self._clients

    @property
    def endpoints(self) -> Sequence[tuple[Endpoint, ...]]:
        return self._endpoints

    def lead(self) -> RankGroup:
        return lead_group(self._listener, group_config(self._config, rank=0, secret=self._trust.secret))

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(self._config.start_s):
                ready = await self._meeting.all_ready()
        except TimeoutError:
            missing = ", ".join(map(str, self._meeting.missing()))
            raise RankLost(f"ranks {missing} were not ready within {self._config.start_s:g} s") from None
        self._endpoints = tuple(each.endpoints for each in ready)
        self._clients = tuple(
            RankClient(
                each.address,
                name=rank_name(self._config.worker_id, rank),
                trust=self._trust,
                on_lost=lambda reason, rank=rank: self._note_silence(rank, reason),  # type: ignore[misc]
            )
            for rank, each in enumerate(ready, start=1)
        )
        self._tasks.append(asyncio.create_task(self._ask()))

    async def lost(self) -> RankLost:
        leaving = asyncio.create_task(self._meeting.lost())
        signs: set[asyncio.Future[object]] = {leaving, self._silent, *self._ends}  # type: ignore[arg-type]
        try:
            await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
            if self._ends:  # the end of a process tells more than that of its connection
                await asyncio.wait(self._ends, timeout=_REASON_S, return_when=asyncio.FIRST_COMPLETED)
            for rank, end in enumerate(self._ends, start=1):
                if end.done():
                    return RankLost(f"rank {rank}: {end.result().detail}")
            return leaving.result() if leaving.done() else self._silent.result()
        finally:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)

    async def num_transfers(self) -> int:
        states = await asyncio.gather(*(client.state() for client in self._clients))
        return sum(state.num_transfers for state in states)

    def counters(self) -> Mapping[str, int]:
        return summed([state.counters for state in self._states])

    async def close(self) -> None:
        """Wait for the end of the ranks that were started here, and end what is still called."""
        for task in self._tasks:
            task.cancel()
        for client in self._clients:
            await client.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._meeting.all_gone()
        # What never joined the group does not hear its end, but that of the meeting.
        await self._meeting.stop()
        if self._ends:
            await asyncio.wait(self._ends, timeout=_LEAVE_S)
        # What has not even begun to work hears nothing at all.
        await asyncio.gather(*(child.stop(drain_s=0.0) for child in self._children))
        await asyncio.gather(*self._ends, *self._tasks, return_exceptions=True)

    async def _ask(self) -> None:
        """Ask the others how they are, all the time; one that does not answer is lost."""
        was_asked = False
        while True:
            with suppress(ServingError):
                self._states = tuple(await asyncio.gather(*(client.state() for client in self._clients)))
                if not was_asked and any(state.asked_to_stop for state in self._states):
                    was_asked = True
                    _log.info("a rank was asked to stop, so the worker is")
                    self._on_asked_to_stop()
            await asyncio.sleep(_ASK_EVERY_S)

    def _note_silence(self, rank: int, reason: str) -> None:
        if not self._silent.done():
            self._silent.set_result(RankLost(f"rank {rank}: {reason}"))
