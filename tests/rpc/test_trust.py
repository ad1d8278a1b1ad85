"""Real servers and real certificates: who may call whom, and what both sides say when they may not."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import eventually
from tests.rpc.fakes import FakeMembers, FakeWorker
from tests.rpc.words import INFO, LOAD
from tests.toys import request
from tests.trust import registry_door, tls_files, trust_of, worker_door
from twinpool.cluster.private_ca import PrivateCA, Wanted, make_files, write_files
from twinpool.core.clock import SystemClock
from twinpool.core.errors import ServingError, Untrusted, WorkerLost
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.pb import registry_pb2, worker_pb2, worker_pb2_grpc
from twinpool.rpc.clients import DecodeClient, WorkerChannel, WorkerClient
from twinpool.rpc.door import Door
from twinpool.rpc.join import JoinConfig, join
from twinpool.rpc.registry import RegistryServer
from twinpool.rpc.server import WorkerServer
from twinpool.rpc.token import KEY, make_token

NOW = datetime.datetime.now(datetime.UTC)
STATUS = "/twinpool.v1.Worker/Status"
EAGER = JoinConfig(first_pause_s=0.05, max_pause_s=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("certs")
    make_files(path, Wanted())
    return path


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign")
    make_files(path, Wanted())
    return path


@pytest.fixture(scope="module")
def expired(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the same CA that were good until yesterday."""
    path = tmp_path_factory.mktemp("expired")
    then = NOW - datetime.timedelta(days=2)
    authority = PrivateCA.load(folder)
    for party in Party:
        write_files(path, authority.files() | authority.files_of(party, Wanted(days=1), now=then))
    return path


@asynccontextmanager
async def a_worker(door: Door) -> AsyncIterator[str]:
    worker = FakeWorker()
    server = WorkerServer(prefill=worker, decode=worker, worker=worker, door=door)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(grace_s=0.0)


@asynccontextmanager
async def a_registry(members: FakeMembers, door: Door) -> AsyncIterator[str]:
    server = RegistryServer(members, door=door)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def ask(address: str, trust: Trust, *, worker_id: str = "decode-0") -> None:
    """Ask a worker for its status."""
    channel = WorkerChannel(address, worker_id, trust=trust)
    try:
        await WorkerClient(channel).status()
    finally:
        await channel.close()


@contextmanager
def stderr_of_grpc() -> Iterator[Callable[[], str]]:
    """Catch what gRPC's own code writes, which Python's streams never see."""
    reading, writing = os.pipe()
    kept = os.dup(2)
    os.dup2(writing, 2)
    os.close(writing)
    text: list[bytes] = []

    def read() -> None:
        while data := os.read(reading, 4096):
            text.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: b"".join(text).decode(errors="replace")
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        thread.join()
        os.close(reading)


def test_router_and_worker_with_the_right_files_reach_each_other(folder: Path) -> None:
    async def run() -> None:
        router, worker = trust_of(folder, Party.ROUTER), trust_of(folder, Party.WORKER)
        members = FakeMembers()
        async with a_worker(worker_door(worker)) as address:
            await ask(address, router)
        async with a_registry(members, registry_door(router)) as address:
            joining = asyncio.ensure_future(
                join(address, lambda: INFO, lambda: LOAD, trust=worker, config=EAGER)
            )
            await eventually(lambda: len(members.loads) >= 2)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    asyncio.run(run())


STRANGERS = {  # what the caller is told, and what the worker's log says
    "of another CA": ("its certificate was not signed by our tls_ca", "CERTIFICATE_VERIFY_FAILED"),
    "unknown to the worker": ("it may not trust our certificate", "CERTIFICATE_VERIFY_FAILED"),
    "expired": ("it may not trust our certificate", "certificate has expired"),
    "without TLS": ("it may want TLS", "WRONG_VERSION_NUMBER"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_does_not_get_through_the_handshake(
    folder: Path, foreign: Path, expired: Path, stranger: str
) -> None:
    at_the_caller, at_the_worker = STRANGERS[stranger]
    good = trust_of(folder, Party.ROUTER)
    callers = {
        "of another CA": replace(good, tls=tls_files(foreign, Party.ROUTER)),
        "unknown to the worker": replace(
            good, tls=replace(tls_files(foreign, Party.ROUTER), ca=(folder / "ca.pem").read_bytes())
        ),
        "expired": replace(good, tls=tls_files(expired, Party.ROUTER)),
        "without TLS": replace(good, tls=None),
    }

    async def run() -> None:
        async with a_worker(worker_door(trust_of(folder, Party.WORKER))) as address:
            with stderr_of_grpc() as said, pytest.raises(WorkerLost, match=at_the_caller):
                await ask(address, callers[stranger])
            assert at_the_worker in said()
            await ask(address, good)

    asyncio.run(run())


def test_a_caller_that_shows_no_certificate_does_not_get_through_the_handshake(folder: Path) -> None:
    async def run() -> None:
        async with a_worker(worker_door(trust_of(folder, Party.WORKER))) as address:
            credentials = grpc.ssl_channel_credentials(root_certificates=(folder / "ca.pem").read_bytes())
            options = (("grpc.ssl_target_name_override", Party.WORKER.dns_name),)
            with stderr_of_grpc() as said:
                async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                    code = await code_of(
                        health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()
                    )
            assert code is grpc.StatusCode.UNAVAILABLE
            assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in said()

    asyncio.run(run())


def test_a_worker_cannot_pose_as_the_router_to_a_worker(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        door = worker_door(trust_of(folder, Party.WORKER))
        thief = replace(trust_of(folder, Party.WORKER), party=Party.ROUTER)  # the secret alone is not enough
        async with a_worker(door) as address:
            with pytest.raises(Untrusted, match=r"is for worker.twinpool, not for router.twinpool"):
                await ask(address, thief)
            assert door.num_refused == 1
            assert "the peer's certificate is for worker.twinpool, not for router.twinpool" in caplog.text

    asyncio.run(run())


def test_a_router_cannot_pose_as_a_worker_to_the_registry(folder: Path) -> None:
    async def run() -> None:
        members = FakeMembers()
        other = replace(trust_of(folder, Party.ROUTER), party=Party.WORKER)
        async with a_registry(members, registry_door(trust_of(folder, Party.ROUTER))) as address:
            with pytest.raises(Untrusted, match=r"is for router.twinpool, not for worker.twinpool"):
                await join(address, lambda: INFO, lambda: LOAD, trust=other, config=EAGER)
            assert members.log == []

    asyncio.run(run())


def test_a_worker_cannot_pose_as_the_router_to_those_who_join(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        members = FakeMembers()
        false_router = replace(trust_of(folder, Party.WORKER), party=Party.ROUTER)
        async with a_registry(members, registry_door(false_router)) as address:
            worker = trust_of(folder, Party.WORKER)
            joining = asyncio.ensure_future(
                join(address, lambda: INFO, lambda: LOAD, trust=worker, config=EAGER)
            )
            await eventually(lambda: "its certificate is for another party" in caplog.text)
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            assert members.log == []

    asyncio.run(run())


def test_a_server_that_shows_the_routers_certificate_is_no_worker(folder: Path) -> None:
    async def run() -> None:
        router = trust_of(folder, Party.ROUTER)
        async with a_worker(worker_door(router)) as address:
            with pytest.raises(WorkerLost, match="its certificate is for another party"):
                await ask(address, router)

    asyncio.run(run())


def test_a_server_without_tls_is_not_talked_to_by_one_with_it(folder: Path) -> None:
    async def run() -> None:
        worker = replace(trust_of(folder, Party.WORKER), tls=None)
        async with a_worker(worker_door(worker)) as address:
            with pytest.raises(WorkerLost, match="it speaks no TLS"):
                await ask(address, trust_of(folder, Party.ROUTER))

    asyncio.run(run())


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize(
    ("secret", "problem"),
    [(Secret.random(), "no router with the same secret made"), (Secret(), "the call carries no token")],
    ids=["wrong", "missing"],
)
def test_a_caller_without_the_secret_gets_nothing(
    folder: Path, has_tls: bool, secret: Secret, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        router, worker = trust_of(folder, Party.ROUTER), trust_of(folder, Party.WORKER)
        if not has_tls:
            router, worker = replace(router, tls=None), replace(worker, tls=None)
        door = worker_door(worker)
        async with a_worker(door) as address:
            with pytest.raises(Untrusted, match=problem):
                await ask(address, replace(router, secret=secret))
            assert door.num_refused == 1
            assert problem in caplog.text
            await ask(address, router)

    asyncio.run(run())


def test_a_worker_without_the_secret_is_not_taken_in_and_ends(folder: Path) -> None:
    async def run() -> None:
        members = FakeMembers()
        door = registry_door(replace(trust_of(folder, Party.ROUTER), tls=None))
        async with a_registry(members, door) as address:
            for secret in (Secret(), Secret.random()):
                with pytest.raises(Untrusted, match=r"^security.secret_file: "):
                    async with asyncio.timeout(10.0):
                        await join(
                            address,
                            lambda: INFO,
                            lambda: LOAD,
                            trust=Trust(party=Party.WORKER, secret=secret),
                        )
            assert members.log == []
            # gRPC loses the reason of a refusal that comes while the worker still writes; it asks again then.
            assert door.num_refused >= 2

    asyncio.run(run())


def test_a_token_for_one_worker_is_none_for_another() -> None:
    async def run() -> None:
        secret = Secret.random()
        router, worker = Trust(party=Party.ROUTER, secret=secret), Trust(party=Party.WORKER, secret=secret)
        async with a_worker(worker_door(worker, worker_id="decode-1")) as address:
            with pytest.raises(Untrusted, match="made the call's token for decode-1"):
                await ask(address, router, worker_id="decode-0")

    asyncio.run(run())


def test_an_overheard_token_is_worth_nothing() -> None:
    async def run() -> None:
        secret = Secret.random()
        token = make_token(
            secret,
            caller=Party.ROUTER,
            audience="decode-0",
            method=STATUS,
            unix_s=datetime.datetime.now(datetime.UTC).timestamp(),
        )
        worker = Trust(party=Party.WORKER, secret=secret)
        async with a_worker(worker_door(worker)) as address, grpc.aio.insecure_channel(address) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            shown = ((KEY, token),)
            await stub.Status(worker_pb2.StatusRequest(), timeout=5.0, metadata=shown)
            calls = [
                (stub.Status, worker_pb2.StatusRequest(), shown),
                (stub.Audit, worker_pb2.AuditRequest(), shown),
                (stub.Status, worker_pb2.StatusRequest(), (*shown, *shown)),
            ]
            for method, message, metadata in calls:
                assert await code_of(method, message, metadata) is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())


async def code_of(method: Any, message: Any, metadata: Any = ()) -> grpc.StatusCode:
    """Call a method that answers once and return how that ended."""
    try:
        await method(message, timeout=5.0, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


METHODS = [
    *(f"/twinpool.v1.Prefill/{name}" for name in ("Prefill",)),
    *(f"/twinpool.v1.Decode/{name}" for name in ("Reserve", "Resume", "Generate", "Release")),
    *(f"/twinpool.v1.Worker/{name}" for name in ("Status", "Drain", "Audit", "ClearCache", "Assign")),
    "/grpc.health.v1.Health/Watch",
    "/grpc.health.v1.Health/List",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetServers",
    "/twinpool.v1.Registry/Join",
    "/twinpool.v1.KVTransfer/Push",
    "/twinpool.v1.Worker/status",
    "/twinpool.v1.Worker/Status/",
    "//twinpool.v1.Worker/Status",
    "/pickle.Loads/Load",
    "/",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_but_the_health_check_is_closed(method: str) -> None:
    """Also methods that are not there: a stranger does not learn what is."""

    async def run() -> None:
        door = worker_door(Trust(party=Party.WORKER, secret=Secret.random()))
        async with a_worker(door) as address, grpc.aio.insecure_channel(address) as channel:
            for start in (channel.unary_unary, channel.stream_stream):
                call: Any = start(method, None, None)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    if start == channel.unary_unary:
                        await call(b"\x80\x04K\x01.", timeout=5.0)
                    else:
                        await call(iter([b"x"]), timeout=5.0).read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert door.num_refused == 2
            health = health_pb2_grpc.HealthStub(channel)
            reply = await health.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(run())


def test_every_method_of_our_services_is_in_the_list_of_closed_ones() -> None:
    """So that a service which is added is tested, too."""
    services = [
        *worker_pb2.DESCRIPTOR.services_by_name.values(),
        *registry_pb2.DESCRIPTOR.services_by_name.values(),
    ]

    there = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}

    assert there <= set(METHODS)


def test_a_wrong_party_learns_nothing_of_unknown_methods_either(folder: Path) -> None:
    async def run() -> None:
        door = worker_door(replace(trust_of(folder, Party.WORKER), secret=Secret()))
        files = tls_files(folder, Party.WORKER)
        credentials = grpc.ssl_channel_credentials(files.ca, files.key, files.cert)
        options = (("grpc.ssl_target_name_override", Party.WORKER.dns_name),)
        async with (
            a_worker(door) as address,
            grpc.aio.secure_channel(address, credentials, options=options) as channel,
        ):
            for method in METHODS:
                assert await code_of(channel.unary_unary(method), b"") is grpc.StatusCode.UNAUTHENTICATED

    asyncio.run(run())


def test_the_router_is_told_when_a_method_is_not_there(folder: Path) -> None:
    async def run() -> None:
        router, worker = (replace(trust_of(folder, party), secret=Secret()) for party in Party)
        async with a_worker(worker_door(worker)) as address:
            channel = WorkerChannel(address, "decode-0", trust=router)
            call = channel.grpc.unary_unary("/twinpool.v1.Worker/Fly", None, None)
            assert await code_of(call, b"") is grpc.StatusCode.UNIMPLEMENTED
            await channel.close()

    asyncio.run(run())


def test_a_stranger_that_calls_all_the_time_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        door = worker_door(Trust(party=Party.WORKER, secret=Secret.random()))
        async with a_worker(door) as address:
            for _ in range(50):
                with pytest.raises(ServingError):
                    await ask(address, Trust(party=Party.ROUTER))
        assert door.num_refused == 50
        assert caplog.text.count("refused") == 1

    asyncio.run(run())


def test_a_connection_that_says_nothing_is_closed() -> None:
    async def run() -> None:
        async with a_worker(worker_door(Trust(party=Party.WORKER, secret=Secret.random()))) as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            async with asyncio.timeout(30.0):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(4096):
                        pass
            writer.close()

    asyncio.run(run())


def test_an_answer_streams_through_the_door(folder: Path) -> None:
    async def run() -> None:
        async with a_worker(worker_door(trust_of(folder, Party.WORKER))) as address:
            channel = WorkerChannel(address, "decode-0", trust=trust_of(folder, Party.ROUTER))
            async with aclosing(DecodeClient(channel, SystemClock()).generate(request())) as outputs:
                got = [output async for output in outputs]
            assert got
            await channel.close()

    asyncio.run(run())
