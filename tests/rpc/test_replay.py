"""Somebody who listens between router and worker and says the same again is not believed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from tests.rpc.fakes import FakeWorker
from tests.toys import request
from tests.trust import trust_of, worker_door
from twinpool.cluster.private_ca import Wanted, make_files
from twinpool.core.secret import Secret
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.rpc.clients import PrefillClient, WorkerChannel, WorkerClient
from twinpool.rpc.server import WorkerServer


class Tap:
    """Passes bytes on between a client and ``target``, and keeps what the client said."""

    def __init__(self, target: str) -> None:
        self.heard = b""
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tap:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection(self._host, int(self._port))

        async def keep() -> None:
            while data := await reader.read(65536):
                self.heard += data
                back.write(data)

        async def give() -> None:
            while data := await there.read(65536):
                writer.write(data)

        with suppress(ConnectionError):
            await asyncio.gather(keep(), give())


async def say(address: str, data: bytes) -> bytes:
    """Send bytes to a server and return what it answers within two seconds."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    with suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(2.0):
            while piece := await reader.read(65536):
                answer += piece
    writer.close()
    return answer


@asynccontextmanager
async def tapped(
    router: Trust, worker: Trust
) -> AsyncIterator[tuple[FakeWorker, WorkerServer, Tap, WorkerChannel]]:
    fake = FakeWorker()
    server = WorkerServer(prefill=fake, decode=fake, worker=fake, door=worker_door(worker))
    await server.start()
    async with Tap(server.address) as tap:
        channel = WorkerChannel(tap.address, "decode-0", trust=router)
        try:
            yield fake, server, tap, channel
        finally:
            await channel.close()
    await server.stop(grace_s=0.0)


def test_recorded_calls_are_refused_when_they_are_played_again() -> None:
    async def run() -> None:
        secret = Secret.random()
        router, worker = Trust(party=Party.ROUTER, secret=secret), Trust(party=Party.WORKER, secret=secret)
        async with tapped(router, worker) as (fake, server, tap, channel):
            await PrefillClient(channel).prefill(request(request_id="once"), None)
            await WorkerClient(channel).drain(timeout_s=0.1)
            served = list(fake.log)

            answer = await say(server.address, tap.heard)

            assert len(served) == 2
            assert fake.log == served
            assert b"the call's token was used before" in answer

    asyncio.run(run())


def test_without_a_secret_they_would_be_served_again() -> None:
    """The test above shows something: the bytes are whole, and nothing but the token stands in the way."""

    async def run() -> None:
        async with tapped(Trust(party=Party.ROUTER), Trust(party=Party.WORKER)) as (
            fake,
            server,
            tap,
            channel,
        ):
            await PrefillClient(channel).prefill(request(request_id="once"), None)
            served = list(fake.log)

            await say(server.address, tap.heard)

            assert fake.log == served * 2

    asyncio.run(run())


def test_with_certificates_nothing_can_be_read_or_played_again(tmp_path: Path) -> None:
    async def run() -> None:
        make_files(tmp_path, Wanted())
        trusts = trust_of(tmp_path, Party.ROUTER), trust_of(tmp_path, Party.WORKER)
        async with tapped(*trusts) as (fake, server, tap, channel):
            await PrefillClient(channel).prefill(request(request_id="a-name-to-look-for"), None)
            served = list(fake.log)

            await say(server.address, tap.heard)

            assert fake.log == served
            assert b"a-name-to-look-for" not in tap.heard
            assert b"authorization" not in tap.heard

    asyncio.run(run())
