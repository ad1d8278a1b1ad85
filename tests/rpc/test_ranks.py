"""A rank over gRPC: what it is told arrives, what it raises comes back, and silence is its loss."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from tests.patience import PATIENCE_S, eventually
from tests.rpc.words import TICKET
from tests.trust import ROUTER
from twinpool.core.errors import (
    InternalError,
    LayoutMismatch,
    ServingError,
    TransferDamaged,
    TransferRefused,
    TransferTimeout,
    Untrusted,
    WorkerLost,
)
from twinpool.core.rank_port import Expected, RankPort, RankState, rank_name
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.ticket import KVTicket, TransferReport
from twinpool.core.tls import Party
from twinpool.rpc import ranks
from twinpool.rpc.door import Door
from twinpool.rpc.ranks import RankClient, RankServer

NAME = rank_name("decode-0", 1)
TRUST = Trust(party=Party.WORKER, secret=Secret(b"known to all ranks of all workers"))
TRANSFER = TICKET.transfer_id
EXPECTED = Expected(
    transfer_id=TRANSFER,
    sender_id="prefill-0",
    key=bytes(range(32)),
    blocks=(7, 2, 2**31 - 1),
    num_tokens=40,
    cached_tokens=16,
    timeout_s=30.0,
)
REPORT = TransferReport(kv_bytes=5, num_frames=2, first_frame_s=0.5, transport="shm")
STATE = RankState(num_transfers=3, asked_to_stop=True, counters={"kv_sent_bytes": 2**40})


class FakeRank:
    """Remembers what it was told; holds the calls in ``held``, and raises ``error`` from each."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.held: set[str] = set()
        self.error: BaseException | None = None

    async def expect(self, expected: Expected, *, epoch: int) -> None:
        await self._note("expect", expected, epoch)

    async def received(self, transfer_id: str, *, epoch: int) -> None:
        await self._note("received", transfer_id, epoch)

    async def cancel(self, transfer_id: str) -> TransferReport:
        await self._note("cancel", transfer_id)
        return REPORT

    async def begin(self, ticket: KVTicket, *, timeout_s: float) -> None:
        await self._note("begin", ticket, timeout_s)

    async def sent(self, transfer_id: str) -> None:
        await self._note("sent", transfer_id)

    async def abort(self, transfer_id: str) -> None:
        await self._note("abort", transfer_id)

    async def state(self) -> RankState:
        await self._note("state")
        return STATE

    async def _note(self, name: str, *told: object) -> None:
        self.log.append((name, *told))
        try:
            if name in self.held:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append(f"{name} cancelled")
            raise
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Served:
    """A rank behind a server, and rank 0's client of it."""

    rank: FakeRank
    server: RankServer
    client: RankClient
    losses: list[str] = field(default_factory=list)


@asynccontextmanager
async def served(*, caller: Trust = TRUST, name: str = NAME) -> AsyncIterator[Served]:
    """Run a rank; ``caller`` calls it by ``name``."""
    rank, losses = FakeRank(), []
    door = Door(TRUST, callers=Party.WORKER, audience=NAME)
    server = RankServer(rank, door=door, host="127.0.0.1")
    await server.start()
    client = RankClient(server.address, name=name, trust=caller, on_lost=losses.append)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Served(rank, server, client, losses)
    finally:
        await client.close()
        await server.stop()


Call = Callable[[RankPort], Awaitable[object]]
CALLS: dict[str, Call] = {
    "expect": lambda port: port.expect(EXPECTED, epoch=5),
    "received": lambda port: port.received(TRANSFER, epoch=5),
    "cancel": lambda port: port.cancel(TRANSFER),
    "begin": lambda port: port.begin(TICKET, timeout_s=12.5),
    "sent": lambda port: port.sent(TRANSFER),
    "abort": lambda port: port.abort(TRANSFER),
    "state": lambda port: port.state(),
}
ENDS = ("cancel", "abort")


def test_each_call_arrives_and_its_answer_comes_back() -> None:
    async def run() -> None:
        async with served() as s:
            answers = [await call(s.client) for call in CALLS.values()]

            assert answers == [None, None, REPORT, None, None, None, STATE]
            assert s.rank.log == [
                ("expect", EXPECTED, 5),
                ("received", TRANSFER, 5),
                ("cancel", TRANSFER),
                ("begin", TICKET, 12.5),
                ("sent", TRANSFER),
                ("abort", TRANSFER),
                ("state",),
            ]
            assert s.losses == []

    asyncio.run(run())


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ENDS])
@pytest.mark.parametrize(
    "error",
    [
        TransferTimeout("no progress for 30 s"),
        TransferDamaged("layer 1, token 3: wrong checksum"),
        TransferRefused("is over"),
        LayoutMismatch("head_dim: prefill stores 4, decode stores 8"),
        InternalError("a bug"),
    ],
)
def test_what_a_rank_raises_comes_back_and_is_no_loss(name: str, error: ServingError) -> None:
    async def run() -> None:
        async with served() as s:
            s.rank.error = error
            with pytest.raises(type(error), match=str(error)):
                await CALLS[name](s.client)
            assert s.losses == []

    asyncio.run(run())


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_is_not_confirmed_is_a_loss(name: str) -> None:
    async def run() -> None:
        async with served() as s:
            s.rank.error = ValueError("a bug")
            with pytest.raises(WorkerLost, match=r"worker decode-0/rank1 is lost: the worker failed with"):
                await CALLS[name](s.client)
            assert s.losses == ["the worker failed with ValueError"]

    asyncio.run(run())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_when_the_rank_does(name: str) -> None:
    async def run() -> None:
        async with served() as s:
            s.rank.held = set(CALLS)
            calling = asyncio.ensure_future(CALLS[name](s.client))
            await eventually(lambda: len(s.rank.log) == 1)

            await s.server.stop()

            with pytest.raises(WorkerLost, match="decode-0/rank1"):
                await calling
            assert len(s.losses) == 1

    asyncio.run(run())


@pytest.mark.parametrize("name", CALLS)
def test_silence_is_a_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_TIMEOUT_S", 0.3)

    async def run() -> None:
        async with served() as s:
            s.rank.held = set(CALLS)
            with pytest.raises(WorkerLost, match="did not answer in time"):
                await CALLS[name](s.client)
            assert s.losses == ["it did not answer in time"]

    asyncio.run(run())


@pytest.mark.parametrize("name", ["received", "sent"])
def test_a_long_call_may_take_the_time_of_its_transfer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ANSWER_TIMEOUT_S", 0.3)

    async def run() -> None:
        async with served() as s:
            await s.client.expect(replace(EXPECTED, timeout_s=1.0), epoch=5)
            await s.client.begin(TICKET, timeout_s=1.0)
            s.rank.held = {name}
            loop = asyncio.get_running_loop()
            started_s = loop.time()

            with pytest.raises(WorkerLost):
                await CALLS[name](s.client)

            assert loop.time() - started_s > 1.2

    asyncio.run(run())


@pytest.mark.parametrize("name", CALLS)
def test_who_cancels_a_call_cancels_it_there(name: str) -> None:
    async def run() -> None:
        async with served() as s:
            s.rank.held = set(CALLS)
            calling = asyncio.ensure_future(CALLS[name](s.client))
            await eventually(lambda: len(s.rank.log) == 1)

            calling.cancel()

            with pytest.raises(asyncio.CancelledError):
                await calling
            await eventually(lambda: s.rank.log[-1] == f"{name} cancelled")
            assert s.losses == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("caller", "name"),
    [
        (Trust(party=Party.ROUTER, secret=TRUST.secret), NAME),
        (Trust(party=Party.WORKER, secret=Secret(b"of another deployment, long enough")), NAME),
        (Trust(party=Party.WORKER), NAME),
        (ROUTER, NAME),
        (TRUST, rank_name("decode-0", 2)),
        (TRUST, "decode-0"),
    ],
)
def test_only_rank_0_gets_in_and_only_where_it_means_to(caller: Trust, name: str) -> None:
    async def run() -> None:
        async with served(caller=caller, name=name) as s:
            for call in CALLS.values():
                with pytest.raises((Untrusted, WorkerLost)):
                    await call(s.client)
            assert s.rank.log == []

    asyncio.run(run())
