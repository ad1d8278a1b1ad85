"""Joining a router: a worker's stream is its life there, and only a refusal keeps it away."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import grpc
import grpc.aio
import pytest

from tests.patience import eventually
from tests.rpc.fakes import FakeMembers
from tests.rpc.words import INFO, LOAD
from tests.trust import WORKER, registry_door
from twinpool.core.errors import ConfigError, LayoutMismatch
from twinpool.core.ports import Role, WorkerInfo, WorkerLoad
from twinpool.pb import registry_pb2, registry_pb2_grpc
from twinpool.rpc import codec
from twinpool.rpc.join import JoinConfig, join
from twinpool.rpc.registry import RegistryConfig, RegistryServer

QUICK = RegistryConfig(heartbeat_s=0.05, max_workers=3, first_message_timeout_s=0.5)
EAGER = JoinConfig(first_pause_s=0.05, max_pause_s=0.2)


@asynccontextmanager
async def registry(members: FakeMembers, *, port: int = 0) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(members, door=registry_door(), port=port, config=QUICK)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextmanager
def joining(address: str, info: WorkerInfo = INFO) -> Iterator[asyncio.Task[None]]:
    task: asyncio.Task[None] = asyncio.ensure_future(
        join(address, lambda: info, lambda: LOAD, trust=WORKER, config=EAGER)
    )
    try:
        yield task
    finally:
        task.cancel()


def test_a_worker_joins_and_is_heard_again_and_again() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address):
                await eventually(lambda: len(members.loads) >= 3)
        assert members.infos == [INFO]
        assert members.loads[:3] == [LOAD] * 3
        assert members.log[0] == ("joined", "decode-0", 7)

    asyncio.run(run())


def test_each_heartbeat_carries_the_load_of_its_moment() -> None:
    async def run() -> None:
        members, loads = FakeMembers(), iter(range(1_000_000))
        async with registry(members) as server:
            task = asyncio.ensure_future(
                join(
                    server.address,
                    lambda: INFO,
                    lambda: WorkerLoad(running=next(loads)),
                    trust=WORKER,
                    config=EAGER,
                )
            )
            await eventually(lambda: len(members.loads) >= 4)
            task.cancel()
        assert [load.running for load in members.loads[:4]] == [0, 1, 2, 3]

    asyncio.run(run())


def test_a_worker_joins_again_as_what_it_is_by_then() -> None:
    async def run() -> None:
        first, second, role = FakeMembers(), FakeMembers(), Role.DECODE
        async with registry(first) as server:
            port = server.port
            task = asyncio.ensure_future(
                join(
                    server.address,
                    lambda: replace(INFO, role=role),
                    lambda: LOAD,
                    trust=WORKER,
                    config=EAGER,
                )
            )
            await eventually(lambda: len(first.loads) >= 1)
            role = Role.PREFILL
        async with registry(second, port=port):
            await eventually(lambda: len(second.loads) >= 1)
            task.cancel()
        assert [info.role for info in first.infos + second.infos] == [Role.DECODE, Role.PREFILL]

    asyncio.run(run())


def test_a_worker_that_stops_joining_has_left() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address):
                await eventually(lambda: len(members.loads) >= 1)
            await eventually(lambda: members.log == [("joined", "decode-0", 7), ("left", "decode-0", 7)])

    asyncio.run(run())


def test_a_worker_that_does_not_fit_is_told_why_and_does_not_come_back() -> None:
    async def run() -> None:
        members = FakeMembers()
        members.refuse = True
        async with registry(members) as server:
            with pytest.raises(LayoutMismatch, match="head_dim: 4 here, 8 there"):
                await join(server.address, lambda: INFO, lambda: LOAD, trust=WORKER, config=EAGER)
        assert members.log == []

    asyncio.run(run())


def test_a_worker_waits_for_its_router_and_outlives_it() -> None:
    async def run() -> None:
        first, second = FakeMembers(), FakeMembers()
        async with registry(FakeMembers()) as server:
            port = server.port
        with joining(f"127.0.0.1:{port}") as task:
            await asyncio.sleep(0.3)  # nobody listens
            async with registry(first, port=port):
                await eventually(lambda: len(first.loads) >= 1)
            assert first.log == [("joined", "decode-0", 7), ("left", "decode-0", 7)]
            async with registry(second, port=port):
                await eventually(lambda: len(second.loads) >= 1)
                assert not task.done()

    asyncio.run(run())


def test_a_newer_life_of_a_worker_replaces_the_older_which_gives_up() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address) as older:
                await eventually(lambda: len(members.loads) >= 1)
                with joining(server.address, replace(INFO, generation=8)) as newer:
                    with pytest.raises(ConfigError, match="decode-0 has joined again since"):
                        await asyncio.wait_for(older, 10.0)
                    assert members.log == [
                        ("joined", "decode-0", 7),
                        ("joined", "decode-0", 8),
                        ("left", "decode-0", 7),
                    ]
                    heard = len(members.loads)
                    await eventually(lambda: len(members.loads) > heard)
                    assert not newer.done()

    asyncio.run(run())


def test_a_newer_life_that_is_refused_leaves_the_older_in_its_place() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address) as older:
                await eventually(lambda: len(members.loads) >= 1)
                members.refuse = True
                with (
                    joining(server.address, replace(INFO, generation=8)) as newer,
                    pytest.raises(LayoutMismatch),
                ):
                    await asyncio.wait_for(newer, 10.0)
                heard = len(members.loads)
                await eventually(lambda: len(members.loads) > heard)
                assert members.log == [("joined", "decode-0", 7)]
                assert not older.done()

    asyncio.run(run())


def test_a_life_that_comes_back_ends_its_stay_before() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address):
                await eventually(lambda: len(members.loads) >= 1)
                with joining(server.address):
                    await eventually(lambda: len(members.log) == 3)
                    assert members.log == [
                        ("joined", "decode-0", 7),
                        ("left", "decode-0", 7),
                        ("joined", "decode-0", 7),
                    ]

    asyncio.run(run())


def test_an_older_life_cannot_replace_a_newer_one() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            with joining(server.address):
                await eventually(lambda: len(members.loads) >= 1)
                with pytest.raises(ConfigError, match="decode-0 has joined again since, with generation 7"):
                    await join(
                        server.address,
                        lambda: replace(INFO, generation=6),
                        lambda: LOAD,
                        trust=WORKER,
                        config=EAGER,
                    )
                assert members.log == [("joined", "decode-0", 7)]

    asyncio.run(run())


def test_there_is_an_end_to_how_many_join() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            tasks = [
                asyncio.ensure_future(
                    join(
                        server.address,
                        partial(replace, INFO, worker_id=f"w{i}"),
                        lambda: LOAD,
                        trust=WORKER,
                        config=EAGER,
                    )
                )
                for i in range(4)
            ]
            await eventually(lambda: len(members.log) >= 3)
            await asyncio.sleep(0.3)
            assert len([line for line in members.log if line[0] == "joined"]) == 3
            waiting = ({"w0", "w1", "w2", "w3"} - {info.worker_id for info in members.infos}).pop()
            tasks[int(members.infos[0].worker_id[1])].cancel()  # its place is free now
            await eventually(lambda: members.infos[-1].worker_id == waiting)
            for task in tasks:
                task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first", "detail"),
    [
        (None, "info: no message came in time"),
        (registry_pb2.JoinMessage(load=codec.load_to_pb(LOAD)), "info: the first message does not carry it"),
        (registry_pb2.JoinMessage(), "info: the first message does not carry it"),
        (registry_pb2.JoinMessage(info={"role": "boss"}), "worker_id: 0 characters are not in"),
    ],
)
def test_a_stream_that_does_not_begin_with_an_info_is_closed(
    first: registry_pb2.JoinMessage | None, detail: str
) -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server, grpc.aio.insecure_channel(server.address) as channel:
            call = registry_pb2_grpc.RegistryStub(channel).Join()  # type: ignore[no-untyped-call]
            if first is not None:
                await call.write(first)
            with pytest.raises(grpc.aio.AioRpcError, match=detail) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert members.log == []

    asyncio.run(run())


def test_a_load_that_is_nonsense_ends_the_stay_of_its_worker_alone() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server, grpc.aio.insecure_channel(server.address) as channel:
            with joining(server.address, replace(INFO, worker_id="good")):
                await eventually(lambda: len(members.loads) >= 1)
                call = registry_pb2_grpc.RegistryStub(channel).Join()  # type: ignore[no-untyped-call]
                await call.write(registry_pb2.JoinMessage(info=codec.info_to_pb(INFO)))
                assert (await call.read()).heartbeat_s == QUICK.heartbeat_s
                await call.write(registry_pb2.JoinMessage(load={"stalled_s": -1.0}))
                with pytest.raises(grpc.aio.AioRpcError, match=r"stalled_s: -1\.0 is not a finite number"):
                    await call.read()
                await eventually(lambda: ("left", "decode-0", 7) in members.log)
                assert ("left", "good", 7) not in members.log

    asyncio.run(run())


JOINING_PROCESS = """
import asyncio, sys
from tests.rpc.words import INFO, LOAD
from tests.trust import WORKER
from twinpool.rpc.join import join

asyncio.run(join(sys.argv[1], lambda: INFO, lambda: LOAD, trust=WORKER))
"""


def test_a_worker_that_is_killed_has_left_at_once() -> None:
    async def run() -> None:
        members = FakeMembers()
        async with registry(members) as server:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", JOINING_PROCESS, server.address
            )
            try:
                await eventually(lambda: len(members.loads) >= 1, within_s=60.0)
                process.send_signal(signal.SIGKILL)
                await eventually(lambda: ("left", "decode-0", 7) in members.log, within_s=1.0)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()

    asyncio.run(run())


@pytest.mark.parametrize(("field", "value"), [("heartbeat_s", 0.0), ("max_workers", 0)])
def test_limits_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"registry.{field}"):
        RegistryConfig(**{field: value})  # type: ignore[arg-type]
