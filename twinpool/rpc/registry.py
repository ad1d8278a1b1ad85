"""The router's door for workers: they call in, say who they are, and keep saying how they are.

A worker's stream is its life here.  Its end, by a goodbye or by a broken connection, is told at once.
A silence is not judged here: ``Members`` gets every sign of life and knows the time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from twinpool.core.doors import check_peer_address
from twinpool.core.errors import ConfigError, InvalidRequest, ServingError, Unavailable
from twinpool.core.ports import WorkerInfo, WorkerLoad
from twinpool.core.security import Trust
from twinpool.pb import registry_pb2, registry_pb2_grpc
from twinpool.rpc import codec
from twinpool.rpc.door import Door
from twinpool.rpc.limits import MAX_JOIN_BYTES, server_options
from twinpool.rpc.serving import EOF, Context, bind, join_address, one_call

STOP_GRACE_S = 1.0  # for the workers to take the goodbye


class Members(Protocol):
    """Who keeps the list of workers.

    For each life of a worker the calls are ``joined``, any number of ``heard``, ``left``.  A later life of
    an id joins before ``left`` of the earlier, which gives way to it; one that is refused changes nothing.
    """

    def joined(self, info: WorkerInfo) -> None:
        """Take a worker in.

        Raises:
            LayoutMismatch: It does not fit the others; it is refused.
            ConfigError: It cannot be used at all; it is refused.
        """
        ...

    def heard(self, worker_id: str, generation: int, load: WorkerLoad) -> None: ...

    def left(self, worker_id: str, generation: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Limits of the door."""

    heartbeat_s: float = 0.5  # how often workers are asked to call
    max_workers: int = 1024
    first_message_timeout_s: float = 5.0  # a stream that says nothing is closed

    def __post_init__(self) -> None:
        if self.heartbeat_s <= 0.0:
            raise ConfigError("registry.heartbeat_s", f"{self.heartbeat_s} is not more than 0")
        if self.max_workers < 1:
            raise ConfigError("registry.max_workers", f"{self.max_workers} is less than 1")


class RegistryServer:
    """Hosts the Registry service.

    Args:
        members: Told what happens.
        door: Lets workers in.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        config: Limits.
    """

    def __init__(
        self,
        members: Members,
        *,
        door: Door,
        host: str = "127.0.0.1",
        port: int = 0,
        config: RegistryConfig | None = None,
    ) -> None:
        self._server = grpc.aio.server(
            interceptors=[door],
            options=server_options(max_receive_bytes=MAX_JOIN_BYTES, max_send_bytes=MAX_JOIN_BYTES),
        )
        self._registry = _Registry(members, door.trust, config or RegistryConfig())
        registry_pb2_grpc.add_RegistryServicer_to_server(self._registry, self._server)  # type: ignore[no-untyped-call]
        self._host = host
        self.port = bind(self._server, host, port, door.trust, option="--join-port")

    @property
    def address(self) -> str:
        """What a worker on this host joins."""
        return join_address(self._host, self.port)

    async def start(self) -> None:
        """Take workers in from now on."""
        await self._server.start()

    async def stop(self) -> None:
        """Let every worker go; they try again until a router answers."""
        self._registry.end_all()
        await self._server.stop(STOP_GRACE_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Life:
    """One worker's stay, until its stream ends or ``ending`` gets what to tell the worker."""

    info: WorkerInfo
    ending: asyncio.Future[ServingError]


class _Registry(registry_pb2_grpc.RegistryServicer):
    def __init__(self, members: Members, trust: Trust, config: RegistryConfig) -> None:
        self._members = members
        self._trust = trust
        self._config = config
        self._lives: dict[str, _Life] = {}

    async def Join(self, _messages: object, context: Context) -> None:
        async with one_call(context):
            await context.send_initial_metadata(())  # tells the worker that it may speak
            info = await self._read_info(context)
            self._check_addresses(info)
            life = self._begin(info)
            try:
                await context.write(registry_pb2.JoinReply(heartbeat_s=self._config.heartbeat_s))
                await self._listen(life, context)
            finally:
                self._end(life, "its stream ended")

    def end_all(self) -> None:
        """End every stay."""
        for life in tuple(self._lives.values()):
            life.ending.set_result(Unavailable("the router stops"))
            self._end(life, "the router stops")

    async def _read_info(self, context: Context) -> WorkerInfo:
        try:
            async with asyncio.timeout(self._config.first_message_timeout_s):
                message = await context.read()
        except TimeoutError:
            raise InvalidRequest("info", "no message came in time") from None
        if message is EOF or not message.HasField("info"):
            raise InvalidRequest("info", "the first message does not carry it")
        return codec.info_from_pb(message.info)

    def _check_addresses(self, info: WorkerInfo) -> None:
        """Check where the worker says that we and other workers shall connect to.

        Raises:
            ConfigError: It is nowhere that one of our workers can be.
        """
        check_peer_address("address", info.address, self._trust)
        for endpoints in info.ranks:
            for endpoint in endpoints:
                if endpoint.address.rpartition(":")[2].isdigit():  # others are names on one machine
                    check_peer_address(endpoint.transport, endpoint.address, self._trust)

    def _begin(self, info: WorkerInfo) -> _Life:
        """Take a worker in; a stay of the same worker that is still open ends then."""
        earlier = self._lives.get(info.worker_id)
        if earlier is not None and info.generation < earlier.info.generation:
            raise _replaced_by(earlier.info)
        if earlier is None and len(self._lives) >= self._config.max_workers:
            raise Unavailable(f"{len(self._lives)} workers have joined, more are not taken")
        if earlier is not None and info.generation == earlier.info.generation:  # it has come back
            self._replace(earlier, info)
        self._members.joined(info)
        if earlier is not None and info.generation > earlier.info.generation:
            self._replace(earlier, info)
        life = _Life(info, asyncio.get_running_loop().create_future())
        self._lives[info.worker_id] = life
        return life

    def _replace(self, earlier: _Life, info: WorkerInfo) -> None:
        earlier.ending.set_result(_replaced_by(info))
        self._end(earlier, f"generation {info.generation} of it joined")

    async def _listen(self, life: _Life, context: Context) -> None:
        """Pass on every sign of life until the stream ends, or the stay does.

        Raises:
            ServingError: What ended the stay.
        """
        reading = asyncio.ensure_future(self._read_loads(life.info, context))
        try:
            ends: set[asyncio.Future[Any]] = {reading, life.ending}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if life.ending.done():
                raise life.ending.result()
            reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_loads(self, info: WorkerInfo, context: Context) -> None:
        while (message := await context.read()) is not EOF:
            if not message.HasField("load"):
                raise InvalidRequest("load", "a message does not carry it")
            self._members.heard(info.worker_id, info.generation, codec.load_from_pb(message.load))

    def _end(self, life: _Life, reason: str) -> None:
        """Tell that a stay is over, once."""
        if self._lives.get(life.info.worker_id) is life:
            del self._lives[life.info.worker_id]
            self._members.left(life.info.worker_id, life.info.generation, reason)


def _replaced_by(info: WorkerInfo) -> ConfigError:
    return ConfigError(
        "--worker-id", f"{info.worker_id} has joined again since, with generation {info.generation}"
    )
