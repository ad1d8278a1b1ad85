"""`twinpool serve`: the process that hosts the router and owns a deployment, from its start to its end.

    resolve the model -> registry and router here -> agent (Ray, controller, workers) -> HTTP -> "ready"
    SIGTERM or Ctrl-C -> 503 for new requests, running ones end -> workers, Ray and agent end -> exit 0
    agent gone        -> its workers end too; exit 1, and whoever watches over this process starts another

This process has no Ray and no torch in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from router.connect import connect_over_grpc
from router.deployment import StartedElsewhere
from router.http.app import create_app
from router.http.model import ServedModel
from router.http.server import HTTPServer
from router.roles import RoleChange
from router.router import Router
from router.workers import WorkerPool
from twinpool.checkpoints.resolve import resolve_model, served_name
from twinpool.cluster.agent_process import AgentProcess
from twinpool.cluster.config import DeploymentConfig, DeploymentSpec, PoolsConfig, WorkerConfig
from twinpool.cluster.pools import WorkerReport
from twinpool.cluster.roster import Roster
from twinpool.cluster.trust import secret_for_workers, server_trust, warn_of_open_api
from twinpool.core.clock import SystemClock
from twinpool.core.config import unbind
from twinpool.core.errors import ConfigError, InvalidRequest, ModelError, NoWorkers, Unavailable, WorkerLost
from twinpool.core.ports import Role
from twinpool.core.security import Trust
from twinpool.core.tls import Party
from twinpool.rpc.door import Door
from twinpool.rpc.registry import RegistryConfig, RegistryServer
from twinpool.rpc.token import REGISTRY
from twinpool.text.chat import ChatTemplate
from twinpool.text.tokenizer import Tokenizer

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_ANY = ("0.0.0.0", "::")  # can be listened on, and not be reached
_CUT_S = 1.0  # for connections that are still open once the time to drain is over
_STILL_WAITING_S = 10.0

Say = Callable[[str], None]

_log = logging.getLogger("twinpool.serve")


def serve(config: DeploymentConfig, *, say: Say, on_ready: Callable[[str], None]) -> int:
    """Serve until asked to stop; return the process's exit code.

    Args:
        config: The deployment.
        say: Called with each line of progress.
        on_ready: Called once with the URL, when requests can be answered.

    Raises:
        ServingError: The deployment cannot start; nothing of it is left.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        trust = server_trust(config)
        warn_of_open_api(config)
        check_reachable(config)
        check_free(config.http.host, config.http.port)
        folder = resolve_model(config.model, progress=say)
        model = load_served_model(folder, config)
    except KeyboardInterrupt:
        return 0
    return asyncio.run(_Server(config, trust, folder, model, say).run(on_ready))


class _Server:
    def __init__(
        self, config: DeploymentConfig, trust: Trust, folder: Path, model: ServedModel, say: Say
    ) -> None:
        self._config = config
        self._trust = trust
        self._door = Door(trust, callers=Party.WORKER, audience=REGISTRY)
        self._folder = folder
        self._model = model
        self._say = say
        self._asked_to_stop = asyncio.Event()

    async def run(self, on_ready: Callable[[str], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        async with self._registry() as (pool, join_address), self._workers(join_address) as agent:
            if agent is not None:
                await self._unless_stopped(self._all_there(agent, pool))
            if self._asked_to_stop.is_set():
                return 0
            async with self._http(pool, agent) as (router, url):
                if agent is None:
                    self._say(f"waiting for workers at {join_address}")
                    await self._unless_stopped(self._pool_ready(pool))
                if not self._asked_to_stop.is_set():
                    on_ready(url)
                    await self._unless_stopped(self._asked_to_stop.wait() if agent is None else agent.ended())
                self._say("stopping: running requests may end")
                await router.drain(timeout_s=self._config.http.stop_timeout_s)
        return 0

    def _stop(self) -> None:
        if self._asked_to_stop.is_set():
            # The agent notices, and cleans up on its own.
            os._exit(1)
        self._asked_to_stop.set()

    @asynccontextmanager
    async def _registry(self) -> AsyncIterator[tuple[WorkerPool, str]]:
        clock, config = SystemClock(), self._config.router
        pool = WorkerPool(
            config,
            clock=clock,
            connect=connect_over_grpc(clock, self._trust),
            needs_prefill=not self._config.pools.colocated.workers,
        )
        registry = RegistryServer(
            pool,
            door=self._door,
            host=self._config.join_host,
            port=self._config.join_port,
            config=RegistryConfig(heartbeat_s=config.heartbeat_s),
        )
        await registry.start()
        await pool.start()
        try:
            yield pool, registry.address
        finally:
            await registry.stop()
            await pool.close()

    @asynccontextmanager
    async def _workers(self, join_address: str) -> AsyncIterator[AgentProcess | None]:
        if self._config.without_ray:
            yield None
            return
        spec = deployment_spec(
            self._config,
            folder=self._folder,
            name=self._model.name,
            join=join_address,
            secret=secret_for_workers(self._config, self._trust),
        )
        agent = AgentProcess(spec, say=self._say)
        await agent.start()
        try:
            yield agent
        finally:
            await agent.stop(drain_s=self._config.timeouts.drain_s)

    @asynccontextmanager
    async def _http(self, pool: WorkerPool, agent: AgentProcess | None) -> AsyncIterator[tuple[Router, str]]:
        clock, config = SystemClock(), self._config.router
        router = Router(config, pool=pool, clock=clock)
        router.metrics.add_total(
            "twinpool_refused_calls", "Calls of strangers to the router", lambda: self._door.num_refused
        )
        security = self._trust.describe()
        deployment = (
            StartedElsewhere(security=security, settings=shown_settings(self._config))
            if agent is None
            else RayDeployment(agent, self._config, security=security)
        )
        app = create_app(router, self._model, self._config.http, deployment=deployment)
        server = HTTPServer(app, replace(self._config.http, stop_timeout_s=_CUT_S))
        await server.start()
        try:
            yield router, server.url
        finally:
            await server.stop()
            await router.close()

    async def _all_there(self, agent: AgentProcess, pool: WorkerPool) -> None:
        """Wait until every worker that has a place has joined and requests can be answered.

        Raises:
            Unavailable: A worker failed, or this machine can never hold what is needed.
        """
        told: dict[str, str] = {}
        said_s = time.monotonic()
        while True:
            reports = agent.reports or ()
            if agent.failure is not None:
                raise Unavailable(agent.failure)
            for report in reports:
                if report.num_failures:
                    raise WorkerLost(report.worker_id, report.last_failure)
                text = f"{report.state} {report.detail}".strip()
                if told.get(report.worker_id) != text and report.detail:
                    self._say(f"{report.worker_id}: {report.detail}")
                    said_s = time.monotonic()
                told[report.worker_id] = text
            placed = [report for report in reports if report.state != "waiting"]
            homeless = [report for report in reports if report.state == "waiting"]
            if reports and all(report.state == "running" for report in placed) and placed:
                if await pool.wait_ready(timeout_s=1.0):
                    return
                if homeless and self._config.ray_address is None:
                    raise NoWorkers(homeless[0].detail)
            if reports and not placed and self._config.ray_address is None:
                raise NoWorkers(homeless[0].detail)
            if time.monotonic() - said_s > _STILL_WAITING_S:
                self._say(_waiting_for(reports))
                said_s = time.monotonic()
            agent.changed.clear()
            try:
                await asyncio.wait_for(agent.changed.wait(), 1.0)
            except TimeoutError:
                continue

    async def _pool_ready(self, pool: WorkerPool) -> None:
        while not await pool.wait_ready(timeout_s=60.0):
            self._say("waiting for workers")

    async def _unless_stopped(self, work: Coroutine[None, None, object]) -> None:
        """Run ``work`` to its end, or until somebody asks to stop."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self._asked_to_stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)


def deployment_spec(
    config: DeploymentConfig, *, folder: Path, name: str, join: str, secret: str = ""
) -> DeploymentSpec:
    """Return what the processes of a deployment are told; the API key stays here.

    Args:
        config: The deployment.
        folder: Of the model.
        name: What clients call the model.
        join: HOST:PORT of the router.
        secret: For the workers, in hex; empty if they read it from a file or need none.
    """
    worker = _worker_config(config, folder=folder, name=name, join=join)
    return DeploymentSpec(
        name=f"twinpool-{secrets.token_hex(4)}",
        config=replace(config, http=replace(config.http, api_key=None)),
        worker=replace(worker, secret=secret),
    )


def _worker_config(config: DeploymentConfig, *, folder: Path, name: str, join: str) -> WorkerConfig:
    gpus = max((config.resources(role).get("GPU", 0.0) for role in Role), default=0.0)
    return WorkerConfig(
        worker_id="",
        role=Role.COLOCATED,
        generation=0,
        model=str(folder),
        model_name=name,
        device=config.device,
        dtype=config.dtype,
        kv_memory=config.kv_memory,
        threads=config.threads,
        join=join,
        starts_ranks=False,
        gpu_share=min(1.0, gpus) or 1.0,
        drain_s=config.timeouts.drain_s,
        orphan_s=config.timeouts.orphan_s,
        hung_s=config.timeouts.hung_s,
        start_s=config.timeouts.worker_start_s,
        engine=config.engine,
        transfer=config.transfer,
        security=config.security.of_workers(),
    )


def load_served_model(folder: Path, config: DeploymentConfig) -> ServedModel:
    """Read what the edge needs of a checkpoint: its text side and its limits."""
    tokenizer = Tokenizer.load(folder)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        vocab_size, max_tokens = int(fields["vocab_size"]), int(fields["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError("model", f"{folder}/config.json: {type(error).__name__} {error}") from error
    check_ranks(config.pools, fields)
    template = ChatTemplate.load(folder, tokenizer)
    return ServedModel(
        name=config.model_name or served_name(config.model),
        tokenizer=tokenizer,
        template=template,
        vocab_size=min(vocab_size, tokenizer.vocab_size),
        max_model_tokens=max_tokens,
        created_s=int(time.time()),
    )


def check_ranks(pools: PoolsConfig, fields: Mapping[str, object]) -> None:
    """Check that the ranks of each pool can share the heads of a model, as far as its config.json tells.

    Raises:
        ConfigError: They cannot.
    """
    for role, pool in pools.by_role().items():
        ranks, field = pool.tensor_parallel, f"pools.{role}.tensor_parallel"
        heads, kv_heads = fields.get("num_attention_heads"), fields.get("num_key_value_heads")
        if isinstance(heads, int) and heads % ranks:
            raise ConfigError(field, f"{ranks} ranks do not divide {heads} query heads")
        if isinstance(kv_heads, int) and kv_heads % ranks and ranks % kv_heads:
            raise ConfigError(field, f"{ranks} ranks and {kv_heads} KV heads do not divide each other")


class RayDeployment:
    """The Deployment whose workers an agent runs on Ray.

    Args:
        agent: Of this deployment.
        config: What was wanted at the start.
        security: What keeps strangers from joining them.
    """

    def __init__(self, agent: AgentProcess, config: DeploymentConfig, *, security: str) -> None:
        self._agent = agent
        self._security = security
        self._settings = shown_settings(config)
        self._roster = Roster(config.pools.workers())

    def describe(self) -> Mapping[str, object]:
        return {
            "workers": [unbind(report) for report in self._agent.reports or ()],
            "ray": self._agent.away or self._agent.failure or "ok",
            "security": self._security,
            "settings": self._settings,
        }

    async def scale(self, wanted: Mapping[Role, int]) -> None:
        """As the protocol says; a pool that the deployment has cannot be emptied, nor a new one made."""
        for role, workers in wanted.items():
            there = self._roster.count(role)
            if (workers > 0) != (there > 0):
                can_not = "a pool cannot be emptied" if there else "this deployment has no such pool"
                raise InvalidRequest(role.value, f"{workers} workers cannot follow {there}: {can_not}")
        for role, workers in wanted.items():
            self._roster.scale(role, workers)
        await self._agent.want(self._roster.members)

    async def replace(self, worker_id: str) -> None:
        if worker_id not in {report.worker_id for report in self._agent.reports or ()}:
            raise InvalidRequest("worker", f"{worker_id} is none of this deployment")
        await self._agent.replace(worker_id)

    async def assigned(self, change: RoleChange) -> None:
        self._roster.assign(change.worker_id, change.role, generation=change.generation)
        await self._agent.want(self._roster.members)


def shown_settings(config: DeploymentConfig) -> Mapping[str, object]:
    """Return what may be told of a deployment: all that decides how it answers, nothing of keys and files.

    The sizes of pools change, and stand in the list of workers.
    """
    names = ["model", "model_name", "placement", "router"]
    if not config.without_ray:  # else the workers have their own
        names += ["device", "dtype", "kv_memory", "threads", "engine", "transfer", "timeouts"]
    return {name: unbind(getattr(config, name)) for name in names}


def check_free(host: str, port: int) -> None:
    """Check that an address can be listened on.

    Raises:
        ConfigError: It cannot.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError("--port", f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def check_reachable(config: DeploymentConfig) -> None:
    """Check that workers elsewhere can reach this router, and that nobody else can give Ray orders.

    Raises:
        ConfigError: A setting is missing.
    """
    if config.ray_address is None or config.ray_address.rpartition(":")[0].strip("[]") in _LOOPBACK:
        return
    if config.join_host in (*_LOOPBACK, *_ANY):
        raise ConfigError(
            "join_host", f"{config.join_host} is out of reach for workers of Ray at {config.ray_address}"
        )
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            "ray_address",
            f"RAY_AUTH_MODE is not token: whoever reaches {config.ray_address} can run programs there",
        )


def _waiting_for(reports: Sequence[WorkerReport]) -> str:
    names = [report.worker_id for report in reports if report.state != "running"]
    return f"still waiting for {', '.join(names) or 'Ray'}"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
