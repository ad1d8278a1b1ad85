"""Where a router connects to is said by workers that may join, and by nobody and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import eventually
from tests.rpc.fakes import FakeMembers
from tests.rpc.words import INFO, LOAD
from tests.trust import ROUTER, WORKER, registry_door, trust_of
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.doors import check_peer_address
from twinpool.core.errors import ConfigError, Untrusted, WorkerLost
from twinpool.core.ports import WorkerInfo
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.ticket import Endpoint
from twinpool.core.tls import Party
from twinpool.rpc.clients import WorkerChannel, WorkerClient
from twinpool.rpc.join import JoinConfig, join
from twinpool.rpc.registry import RegistryServer

EAGER = JoinConfig(first_pause_s=0.05, max_pause_s=0.2)
# What else gRPC reads an address as, and what only looks like one.
NO_ADDRESSES = [
    "127.0.0.1:99999",
    "unix:/tmp/socket",
    "unix:///var/run/docker.sock",
    "unix-abstract:name:80",
    "dns:evil.example:80",
    "dns://8.8.8.8/evil.example:80",
    "ipv4:127.0.0.1:80,10.0.0.1:80",
    "xds:///evil",
    "http://127.0.0.1:80",
    "127.0.0.1:80/path",
    "127.0.0.1:80,10.0.0.1:80",
    "user@127.0.0.1:80",
    "127.0.0.1",
    "127.0.0.1:",
    ":80",
    "::1:80",
    "127.0.0.1:80\n",
    "127.0.0.1 :80",
    "",
]
ELSEWHERE = ["10.0.0.1:80", "169.254.169.254:80", "[fd00::1]:80", "evil.example:80", "0.0.0.0:80", "[::]:80"]
HERE = ["127.0.0.1:80", "[::1]:80", "localhost:80", "127.255.0.1:65535"]


@asynccontextmanager
async def a_registry(members: FakeMembers, trust: Trust) -> AsyncIterator[str]:
    server = RegistryServer(members, door=registry_door(trust))
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def refusal(info: WorkerInfo, router: Trust = ROUTER, worker: Trust = WORKER) -> str:
    """Join a new registry; return why the worker was refused, or "" if it was taken in."""
    members = FakeMembers()
    async with a_registry(members, router) as address:
        joining = asyncio.ensure_future(join(address, lambda: info, lambda: LOAD, trust=worker, config=EAGER))
        try:
            await eventually(lambda: joining.done() or bool(members.log))
            if not joining.done():
                return ""
            with pytest.raises(ConfigError) as caught:
                joining.result()
            assert members.log == []
            return str(caught.value)
        finally:
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)


@pytest.mark.parametrize("address", NO_ADDRESSES)
def test_what_is_no_address_is_refused_whoever_says_it(address: str, tmp_path: Path) -> None:
    make_files(tmp_path, Wanted())

    for trust in (ROUTER, trust_of(tmp_path, Party.ROUTER), replace(ROUTER, insecure=True)):
        with pytest.raises(ConfigError, match=r"^address: .*is not HOST:PORT"):
            check_peer_address("address", address, trust)


@pytest.mark.parametrize("address", ELSEWHERE)
def test_an_address_elsewhere_needs_certificates_and_a_secret(address: str, tmp_path: Path) -> None:
    make_files(tmp_path, Wanted())

    for trust in (ROUTER, Trust(party=Party.ROUTER, secret=Secret.random())):
        with pytest.raises(
            ConfigError, match="is not on this machine, which needs certificates and a secret"
        ):
            check_peer_address("address", address, trust)
    for trust in (trust_of(tmp_path, Party.ROUTER), replace(ROUTER, insecure=True)):
        check_peer_address("address", address, trust)


@pytest.mark.parametrize("address", HERE)
def test_an_address_of_this_machine_is_taken(address: str) -> None:
    check_peer_address("address", address, ROUTER)


def test_a_worker_that_names_a_foreign_address_is_not_taken_in() -> None:
    async def run() -> None:
        foreign = ((Endpoint("grpc", "10.0.0.1:80"),),)
        named = ((Endpoint("shm", "some-host/name"), Endpoint("grpc", "127.0.0.1:80")),)

        assert await refusal(INFO) == ""
        assert await refusal(replace(INFO, ranks=named)) == ""
        assert (await refusal(replace(INFO, address="10.0.0.1:80"))).startswith(
            "address: 10.0.0.1:80 is not on"
        )
        assert (await refusal(replace(INFO, ranks=foreign))).startswith("grpc: 10.0.0.1:80 is not on")

    asyncio.run(run())


def test_who_may_not_join_makes_nobody_connect_anywhere() -> None:
    async def run() -> None:
        num_connections = 0

        def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.close()

        listener = await asyncio.start_server(connected, "127.0.0.1", 0)
        host, port = listener.sockets[0].getsockname()
        info = replace(INFO, address=f"{host}:{port}", ranks=((Endpoint("grpc", f"{host}:{port}"),),))
        members = FakeMembers()
        router = Trust(party=Party.ROUTER, secret=Secret.random())
        async with a_registry(members, router) as address:
            with pytest.raises(Untrusted):
                await join(address, lambda: info, lambda: LOAD, trust=WORKER, config=EAGER)
        listener.close()
        assert (members.log, num_connections) == ([], 0)

    asyncio.run(run())


def test_an_address_is_a_host_and_nothing_else_to_a_channel(tmp_path: Path) -> None:
    async def run() -> None:
        num_connections = 0

        def connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_connections
            num_connections += 1
            writer.close()

        path = tmp_path / "s"
        listener = await asyncio.start_unix_server(connected, path)
        channel = WorkerChannel(f"unix:{path}", "decode-0", trust=ROUTER)
        with pytest.raises(WorkerLost):
            await WorkerClient(channel).status()
        await channel.close()
        listener.close()
        assert num_connections == 0

    asyncio.run(run())
