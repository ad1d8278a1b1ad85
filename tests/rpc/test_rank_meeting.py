"""Ranks meet at rank 0: who is meant gets in, and the end of one is known to the others at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from tests.patience import PATIENCE_S, eventually
from twinpool.core.errors import ConfigError, RankLost, Untrusted
from twinpool.core.rank_port import RankHello, RankReady, rank_name
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party
from twinpool.pb import rank_pb2, rank_pb2_grpc
from twinpool.rpc import rank_meeting
from twinpool.rpc.channel import TrustedChannel
from twinpool.rpc.door import Door
from twinpool.rpc.rank_meeting import RankMeeting, RankStay, join_ranks

TRUST = Trust(party=Party.WORKER, secret=Secret(b"known to all ranks of all workers"))
GROUP = "127.0.0.1:4321"
NAME = rank_name("decode-0", 0)


def ready(rank: int) -> RankReady:
    return RankReady(address=f"127.0.0.1:{rank}", endpoints=(Endpoint("tcp", f"127.0.0.1:{100 + rank}"),))


def hello(rank: int, *, num_ranks: int = 3, generation: int = 7) -> RankHello:
    return RankHello(rank=rank, num_ranks=num_ranks, generation=generation)


@asynccontextmanager
async def meeting() -> AsyncIterator[RankMeeting]:
    """Run the meeting of a worker of three ranks."""
    door = Door(TRUST, callers=Party.WORKER, audience=NAME)
    running = RankMeeting(num_ranks=3, generation=7, group_address=GROUP, door=door, host="127.0.0.1")
    await running.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield running
    finally:
        await running.stop()


@asynccontextmanager
async def joined(running: RankMeeting, who: RankHello, *, trust: Trust = TRUST) -> AsyncIterator[RankStay]:
    async with join_ranks(running.address, who, audience=NAME, trust=trust) as stay:
        yield stay


def test_ranks_come_in_any_order_and_are_told_where_to_compute() -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(2)) as second, joined(m, hello(1)) as first:
            waiting = asyncio.ensure_future(m.all_ready())
            assert (first.group_address, second.group_address) == (GROUP, GROUP)
            assert m.missing() == (1, 2)
            await second.ready(ready(2))
            await eventually(lambda: m.missing() == (1,))
            assert not waiting.done()
            await first.ready(ready(1))

            assert await waiting == (ready(1), ready(2))

    asyncio.run(run())


@pytest.mark.parametrize("is_ready", [False, True])
def test_the_end_of_a_rank_is_told(is_ready: bool) -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first:
            async with joined(m, hello(2)) as second:
                if is_ready:
                    await second.ready(ready(2))
                losing = asyncio.ensure_future(m.lost())
                await asyncio.sleep(0.05)
                assert not losing.done()

            assert str(await losing) == "rank 2: its process ended, or cannot be reached"
            assert not await is_over(first)
            await first.close()
            await m.all_gone()

    asyncio.run(run())


async def is_over(stay: RankStay) -> bool:
    done, _ = await asyncio.wait({asyncio.ensure_future(stay.gone())}, timeout=0.05)
    return bool(done)


def test_a_rank_that_fails_says_why() -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first, joined(m, hello(2)):
            await first.failed("--kv-memory: 1024 bytes hold 0 blocks")

            assert str(await m.lost()) == "rank 1: --kv-memory: 1024 bytes hold 0 blocks"

    asyncio.run(run())


def test_a_reason_of_any_length_is_cut() -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first:
            await first.failed("x" * 10**7)

            assert len(str(await m.lost())) < 1000

    asyncio.run(run())


def test_the_end_of_rank_0_is_told() -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first:
            waiting = asyncio.ensure_future(first.gone())
            await asyncio.sleep(0.05)
            assert not waiting.done()

            await m.stop()

            assert "rank 0" in str(await waiting)
            await first.failed("nobody hears it")
            with pytest.raises(RankLost):
                await first.ready(ready(1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("who", "problem"),
    [
        (hello(1, generation=6), "rank 1: generation is 6 there and 7 on rank 0"),
        (hello(1, num_ranks=4), "rank 1: num_ranks is 4 there and 3 on rank 0"),
        (hello(2), "rank 2: it has joined already"),
    ],
)
def test_who_is_not_meant_is_refused_and_disturbs_nobody(who: RankHello, problem: str) -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(2)) as second:
            with pytest.raises(ConfigError, match=problem):
                async with joined(m, who):
                    raise AssertionError("it got in")

            losing = asyncio.ensure_future(m.lost())
            await second.ready(ready(2))
            await eventually(lambda: m.missing() == (1,))
            assert not losing.done()
            losing.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    "trust",
    [
        Trust(party=Party.WORKER),
        Trust(party=Party.WORKER, secret=Secret(b"of another deployment, long enough")),
        Trust(party=Party.ROUTER, secret=TRUST.secret),
    ],
)
def test_who_proves_nothing_is_refused(trust: Trust) -> None:
    async def run() -> None:
        async with meeting() as m:
            with pytest.raises(Untrusted):
                async with joined(m, hello(1), trust=trust):
                    raise AssertionError("it got in")
            assert m.missing() == (1, 2)

    asyncio.run(run())


@pytest.mark.parametrize(
    "message",
    [
        rank_pb2.RankMessage(),
        rank_pb2.RankMessage(hello=rank_pb2.RankHello(rank=0, num_ranks=3, generation=7)),
        rank_pb2.RankMessage(hello=rank_pb2.RankHello(rank=3, num_ranks=3, generation=7)),
        rank_pb2.RankMessage(hello=rank_pb2.RankHello(rank=1, num_ranks=2**32 - 1, generation=7)),
        rank_pb2.RankMessage(ready=rank_pb2.RankReady(address="127.0.0.1:1")),
    ],
)
def test_nonsense_is_refused(message: rank_pb2.RankMessage) -> None:
    async def run() -> None:
        async with meeting() as m, raw(m) as stub:
            call = stub.Join()
            await call.write(message)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())


def test_a_rank_that_is_ready_twice_is_lost() -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first:
            await first.ready(ready(1))
            await first.ready(ready(1))

            assert str(await m.lost()).startswith("rank 1: ")

    asyncio.run(run())


@pytest.mark.parametrize("address", ["10.0.0.9:1", "unix:/tmp/x", "127.0.0.1:1,10.0.0.9:1"])
def test_a_rank_that_wants_to_be_called_elsewhere_is_lost(address: str) -> None:
    async def run() -> None:
        async with meeting() as m, joined(m, hello(1)) as first:
            await first.ready(RankReady(address=address, endpoints=()))

            assert "rank 1" in str(await m.lost())
            assert m.missing() == (1, 2)

    asyncio.run(run())


def test_a_stream_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_meeting, "_HELLO_TIMEOUT_S", 0.1)

    async def run() -> None:
        async with meeting() as m, raw(m) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="no message came in time"):
                await stub.Join().read()

    asyncio.run(run())


@asynccontextmanager
async def raw(running: RankMeeting) -> AsyncIterator[rank_pb2_grpc.RanksStub]:
    async with TrustedChannel(
        running.address, trust=TRUST, to=Party.WORKER, audience=NAME, options=()
    ) as channel:
        yield rank_pb2_grpc.RanksStub(channel)


def test_a_rank_0_that_is_nowhere_is_waited_for_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_meeting, "WELCOME_TIMEOUT_S", 0.3)

    async def run() -> None:
        with pytest.raises(RankLost, match=r"rank 0 did not answer within 0\.3 s"):
            async with join_ranks("127.0.0.1:1", hello(1), audience=NAME, trust=TRUST):
                raise AssertionError("it got in")

    asyncio.run(run())


def test_ranks_that_come_before_rank_0_listens_wait_for_it() -> None:
    async def run() -> None:
        async with AsyncExitStack() as stack:
            door = Door(TRUST, callers=Party.WORKER, audience=NAME)
            late = RankMeeting(num_ranks=3, generation=7, group_address=GROUP, door=door, host="127.0.0.1")
            joining = asyncio.ensure_future(stack.enter_async_context(joined(late, hello(1))))
            await asyncio.sleep(0.2)
            assert not joining.done()

            await late.start()

            assert (await joining).group_address == GROUP
            await stack.aclose()
            await late.stop()

    asyncio.run(run())
