"""What operators and tools ask: workers, books, one request, metrics, readiness, version."""

from __future__ import annotations

import json
from importlib.metadata import version

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response

from router.deployment import Deployment
from router.http.body import read_object
from router.http.config import HTTPConfig
from router.http.errors import NotFound
from router.http.schema import ReplaceBody, RoleBody, ScaleBody, validate
from router.metrics import CONTENT_TYPE
from router.router import Router
from router.workers import WorkerHandle
from twinpool.core.ports import Role


class AdminRoutes:
    """Endpoints that look at a router and its deployment, and some that change its workers.

    Args:
        router: What is looked at.
        deployment: Starts and ends workers.
        config: Limits of a body.
    """

    def __init__(self, router: Router, deployment: Deployment, config: HTTPConfig) -> None:
        self._router = router
        self._deployment = deployment
        self._config = config

    async def health(self, _: HTTPRequest) -> Response:
        """Say that the process lives."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _: HTTPRequest) -> Response:
        """Say whether a request can be answered now; if not, or if only by a fallback, say why."""
        if not self._router.is_ready:
            return JSONResponse({"status": "not ready", "reasons": self._reasons()}, status_code=503)
        if not self._router.pool.is_ready:
            return JSONResponse({"status": "ready", "degraded": self._reasons()})
        return JSONResponse({"status": "ready"})

    async def metrics(self, _: HTTPRequest) -> Response:
        """Return everything in Prometheus' text format."""
        return Response(self._router.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _: HTTPRequest) -> Response:
        """Return the version of this software."""
        return JSONResponse({"version": version("twinpool")})

    async def workers(self, _: HTTPRequest) -> Response:
        """List the members of the pool."""
        return JSONResponse([_describe(handle) for handle in self._router.pool.handles])

    async def deployment(self, _: HTTPRequest) -> Response:
        """Tell of the workers that are wanted, those that cannot be placed included."""
        return JSONResponse(self._deployment.describe())

    async def scale(self, request: HTTPRequest) -> Response:
        """Change how many workers of each role are wanted; answers before they are there."""
        body = validate(ScaleBody, await read_object(request.scope, request.receive, self._config))
        await self._deployment.scale(body.wanted())
        return JSONResponse(self._deployment.describe(), status_code=202)

    async def replace(self, request: HTTPRequest) -> Response:
        """Drain one worker and start its successor; answers before that happened."""
        body = validate(ReplaceBody, await read_object(request.scope, request.receive, self._config))
        await self._deployment.replace(body.worker)
        return JSONResponse(self._deployment.describe(), status_code=202)

    async def role(self, request: HTTPRequest) -> Response:
        """Give one worker another role; answers when it has it, or why it has not."""
        body = validate(RoleBody, await read_object(request.scope, request.receive, self._config))
        order = body.order(request.path_params["id"])
        change = await self._router.roles.change(order, on_changed=self._deployment.assigned)
        return JSONResponse(
            {
                "worker": change.worker_id,
                "was": change.was.value,
                "role": change.role.value,
                "moved": change.num_moved,
                "freed_blocks": change.freed_blocks,
                "took_s": round(change.took_s, 3),
            }
        )

    async def clear_cache(self, _: HTTPRequest) -> Response:
        """Empty the prefix cache of every worker."""
        return JSONResponse(await self._router.clear_caches())

    async def audit(self, _: HTTPRequest) -> Response:
        """Ask every worker for its books."""
        return JSONResponse(await self._router.audit())

    async def request(self, request: HTTPRequest) -> Response:
        """Return what happened to one request, by the id that its client was given."""
        found = self._router.log.get(request.path_params["id"])
        if found is None:
            raise NotFound("no such request, or one that is no longer remembered")
        return Response(json.dumps(found), media_type="application/json")

    def _reasons(self) -> list[str]:
        pool = self._router.pool
        if pool.is_ready:
            return ["the router stops and takes nothing new"]
        if not pool.handles:
            return ["no worker has joined"]
        needed = (Role.PREFILL, Role.DECODE) if self._router.pool.needs_prefill else (Role.DECODE,)
        roles = {handle.info.role for handle in pool.handles}
        missing = [f"there is no {role.value} worker" for role in needed if role not in roles]
        return missing + [
            f"{handle.info.role.value} worker {handle.worker_id} is {handle.state.value}"
            for handle in pool.handles
        ]


def _describe(handle: WorkerHandle) -> dict[str, object]:
    info, load = handle.info, handle.load
    return {
        "id": info.worker_id,
        "role": info.role.value,
        "state": handle.state.value,
        "becomes": None if handle.becomes is None else handle.becomes.value,
        "pid": info.pid,
        "host": info.host,
        "address": info.address,
        "generation": info.generation,
        "model": info.model,
        "transports": [endpoint.transport for endpoint in info.ranks[0]],
        "ranks": [[endpoint.transport for endpoint in endpoints] for endpoints in info.ranks],
        "dtype": info.layout.dtype,
        "block_tokens": info.layout.block_tokens,
        "num_blocks": info.num_blocks,
        "fingerprint": dict(info.fingerprint),
        "received_from": {
            sender_id: {
                "transport": exchange.last_transport,
                "transfers": exchange.transfers,
                "failures": exchange.failures,
            }
            for sender_id, exchange in handle.exchanges.items()
        },
        "running": 0 if load is None else load.running,
        "queued": 0 if load is None else load.queued,
        "counters": {} if load is None else dict(load.counters),
    }
