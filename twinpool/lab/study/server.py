"""The server that is studied, through its admin API: roles are changed, caches cleared, books read.

Knows nothing of cells and rates.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from twinpool.core.errors import ConfigError, Unavailable
from twinpool.core.ports import Role
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.fetch import fetch
from twinpool.lab.bench.target import read_target
from twinpool.lab.study.arm import Arm

_DRAIN_S = 30.0  # for what a worker still runs when it is to have another role
_MARGIN_S = 60.0
_READY_S = 30.0
_LOOK_EVERY_S = 0.1
_AT_ONCE = 8
_OF_A_LIFE = (
    "pid",
    "generation",
    "address",
    "state",
    "becomes",
    "running",
    "queued",
    "received_from",
    "counters",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerBooks:
    """What one worker says of itself."""

    worker_id: str
    role: Role
    generation: int  # larger in each life
    config: Mapping[str, Any]  # what stays the same in another life
    counters: Mapping[str, int]  # totals since the start of this life
    senders: frozenset[str] = frozenset()  # ids of the workers from which it received KV in this life


class StudiedServer:
    """One running Twinpool server; use it as a context.

    Args:
        url: Of its API.
        api_key: If it asks for one.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        self.api_key = api_key
        self._target = read_target(url, api_key=api_key)

    async def __aenter__(self) -> StudiedServer:
        self._pool = ConnectionPool(self._target, most=_AT_ONCE, connect_timeout_s=10.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()

    async def workers(self) -> tuple[WorkerBooks, ...]:
        """Ask for every worker, in the order of their ids.

        Raises:
            Unavailable: The server does not answer, or as no Twinpool server does.
        """
        told = await self._get("/admin/workers")
        try:
            books = [_books(worker) for worker in told]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unavailable(
                f"{self.url}/admin/workers answers as no Twinpool server of this version does: {error!r}"
            ) from error
        return tuple(sorted(books, key=lambda worker: worker.worker_id))

    async def config(self) -> Mapping[str, Any]:
        """Return every setting that the server says it has, with those of each worker."""
        deployment, version = await self._get("/admin/deployment"), await self._get("/version")
        return {
            "version": version.get("version"),
            "settings": deployment.get("settings", {}),
            "security": deployment.get("security", ""),
            "workers": {
                worker.worker_id: {"role": worker.role.value, **worker.config}
                for worker in await self.workers()
            },
        }

    async def heartbeat_s(self) -> float:
        """Return how often workers say what they have done."""
        try:
            told = (await self._get("/admin/deployment"))["settings"]["router"]["heartbeat_s"]
            return float(told)
        except (LookupError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.url}/admin/deployment does not say router.heartbeat_s") from error

    async def arrange(self, arm: Arm) -> None:
        """Give every worker its role in ``arm``; as few as possible get another one.

        Raises:
            ConfigError: There are not as many workers as the arm has.
            Unavailable: A worker did not take its role, or requests cannot be answered then.
        """
        workers = await self.workers()
        if len(workers) != arm.workers:
            problem = f"{arm.name} needs {arm.workers}, and the server has {len(workers)}"
            raise ConfigError("study.workers", problem)
        wanted = assign([worker.role for worker in workers], arm)
        await self._give({worker.worker_id: role for worker, role in zip(workers, wanted, strict=True)})
        await self._until_ready(arm)

    @asynccontextmanager
    async def roles_restored(self) -> AsyncIterator[None]:
        """Give every worker the role back that it had before the block."""
        roles = {worker.worker_id: worker.role for worker in await self.workers()}
        try:
            yield
        finally:
            await self._give(roles)

    async def clear_caches(self) -> None:
        """Let every worker forget the KV of earlier requests.

        Raises:
            Unavailable: One did not.
        """
        told = await self._post("/admin/cache/clear", {}, timeout_s=_MARGIN_S)
        if not told.get("ok"):
            raise Unavailable(f"a worker kept its prefix cache: {told.get('workers')}")

    async def stories(self, request_ids: Sequence[str]) -> list[Mapping[str, Any] | None]:
        """Return what the server knows of each request; None of one that it has forgotten."""
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(request_id: str) -> Mapping[str, Any] | None:
            async with gate:
                try:
                    story = await self._get(f"/admin/requests/{request_id}")
                except Unavailable:
                    return None
            return story if isinstance(story, Mapping) else None

        return await asyncio.gather(*(one(request_id) for request_id in request_ids))

    async def _give(self, roles: Mapping[str, Role]) -> None:
        for worker in await self.workers():
            role = roles.get(worker.worker_id, worker.role)
            if worker.role is not role:
                await self._post(
                    f"/admin/workers/{urllib.parse.quote(worker.worker_id, safe='')}/role",
                    # Forced: on the way from one arm to the next nobody need be able to answer.
                    {"role": role.value, "timeout_s": _DRAIN_S, "clear_cache": True, "force": True},
                    timeout_s=_DRAIN_S + _MARGIN_S,
                )

    async def _until_ready(self, arm: Arm) -> None:
        end_s = asyncio.get_running_loop().time() + _READY_S
        while True:
            roles = sorted(worker.role for worker in await self.workers())
            try:
                told = await self._get("/ready")
            except Unavailable as error:
                told = {"reasons": [str(error)]}
            if roles == sorted(arm.roles()) and told.get("status") == "ready" and "degraded" not in told:
                return
            if asyncio.get_running_loop().time() > end_s:
                reasons = told.get("reasons") or told.get("degraded")
                raise Unavailable(f"{arm.name} is not ready after {_READY_S:g} s: {roles}, {reasons}")
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _get(self, path: str) -> Any:
        return await fetch(self._pool, self._target, path)

    async def _post(self, path: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        return await fetch(self._pool, self._target, path, body=body, timeout_s=timeout_s)


def assign(roles: Sequence[Role], arm: Arm) -> tuple[Role, ...]:
    """Say which role each worker gets, so that as few as possible change; the first ones keep theirs.

    Args:
        roles: The present ones.
        arm: What is wanted; it has as many workers.
    """
    left = dict(arm.pools)
    keeps = []
    for role in roles:
        keeps.append(left.get(role, 0) > 0)
        if keeps[-1]:
            left[role] -= 1
    others = iter([role for role, number in left.items() for _ in range(number)])
    return tuple(role if keep else next(others) for role, keep in zip(roles, keeps, strict=True))


def cold_pairs(workers: Iterable[WorkerBooks]) -> tuple[tuple[str, str], ...]:
    """Return the ids of each prefill and decode worker between which no KV has moved yet."""
    told = list(workers)
    return tuple(
        (sender.worker_id, receiver.worker_id)
        for receiver in told
        for sender in told
        if receiver.role is Role.DECODE and sender.role is Role.PREFILL
        if sender.worker_id not in receiver.senders
    )


def spent(before: Iterable[WorkerBooks], after: Iterable[WorkerBooks]) -> Mapping[Role, Mapping[str, int]]:
    """Return what each pool counted between two looks, by role and name of the counter.

    Raises:
        Unavailable: A worker began another life or got another role meanwhile, or left.
    """
    earlier = {worker.worker_id: worker for worker in before}
    totals: dict[Role, dict[str, int]] = {}
    for worker in after:
        old = earlier.pop(worker.worker_id, None)
        if old is None or old.generation != worker.generation:
            raise Unavailable(f"worker {worker.worker_id} began another life meanwhile")
        if old.role is not worker.role:
            raise Unavailable(
                f"worker {worker.worker_id} was {old.role.value} and is {worker.role.value} now"
            )
        pool = totals.setdefault(worker.role, {})
        for name, value in worker.counters.items():
            pool[name] = pool.get(name, 0) + value - old.counters.get(name, 0)
    if earlier:
        raise Unavailable(f"worker {next(iter(earlier))} left meanwhile")
    return totals


def _books(told: Mapping[str, Any]) -> WorkerBooks:
    return WorkerBooks(
        worker_id=str(told["id"]),
        role=Role(told["role"]),
        generation=int(told["generation"]),
        config={name: told[name] for name in told if name not in ("id", "role", *_OF_A_LIFE)},
        counters={str(name): int(value) for name, value in told["counters"].items()},
        senders=frozenset(
            sender_id for sender_id, exchange in told["received_from"].items() if exchange["transfers"]
        ),
    )
