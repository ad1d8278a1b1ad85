"""The application: every route, and what it is made of."""

from __future__ import annotations

import random
from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.routing import Router as StarletteRouter
from starlette.types import ASGIApp, Receive, Scope, Send

from router.deployment import Deployment, StartedElsewhere
from router.http.admin import AdminRoutes
from router.http.chat import ChatShape
from router.http.completions import CompletionShape
from router.http.config import HTTPConfig
from router.http.edge import Edge
from router.http.errors import MethodNotAllowed, NotFound
from router.http.generate import GenerationEndpoint
from router.http.model import ServedModel
from router.http.models import ModelRoutes
from router.http.prepare import Job, Preparer
from router.http.schema import ChatBody, CompletionBody, validate
from router.http.tokenize import TokenizeRoutes
from router.router import Router


def create_app(
    router: Router,
    model: ServedModel,
    config: HTTPConfig,
    *,
    deployment: Deployment | None = None,
) -> ASGIApp:
    """Build the HTTP application.

    Args:
        router: Answers the requests.
        model: What is served.
        config: Limits and the API key.
        deployment: Starts and ends workers; by default that is done elsewhere.
    """
    preparer = Preparer(
        model,
        clock=router.clock,
        limit_tokens=lambda: router.pool.max_request_tokens,
        timeout_s=router.config.request_timeout_s,
        entropy=random.SystemRandom(),
    )
    admin, models = AdminRoutes(router, deployment or StartedElsewhere(), config), ModelRoutes(model)
    tokenize = TokenizeRoutes(model, preparer, config)
    routes = [
        Route("/v1/completions", _completions(router, model, config, preparer), methods=["POST"]),
        Route("/v1/chat/completions", _chat(router, model, config, preparer), methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.get, methods=["GET"]),
        Route("/tokenize", tokenize.tokenize, methods=["POST"]),
        Route("/detokenize", tokenize.detokenize, methods=["POST"]),
        Route("/health", admin.health, methods=["GET"]),
        Route("/ready", admin.ready, methods=["GET"]),
        Route("/metrics", admin.metrics, methods=["GET"]),
        Route("/version", admin.version, methods=["GET"]),
        Route("/admin/workers", admin.workers, methods=["GET"]),
        Route("/admin/deployment", admin.deployment, methods=["GET"]),
        Route("/admin/scale", admin.scale, methods=["POST"]),
        Route("/admin/replace", admin.replace, methods=["POST"]),
        Route("/admin/workers/{id:path}/role", admin.role, methods=["POST"]),
        Route("/admin/cache/clear", admin.clear_cache, methods=["POST"]),
        Route("/admin/audit", admin.audit, methods=["GET"]),
        Route("/admin/requests/{id:path}", admin.request, methods=["GET"]),
    ]
    return Edge(_Routes(routes), config)


def _completions(
    router: Router, model: ServedModel, config: HTTPConfig, preparer: Preparer
) -> GenerationEndpoint:
    async def prepare(raw: dict[str, object], request_id: str) -> Job:
        return await preparer.completion(validate(CompletionBody, raw), request_id=request_id)

    def make_shape(job: Job) -> CompletionShape:
        return CompletionShape(
            model.tokenizer, num_logprobs=job.num_logprobs, num_prompt_logprobs=job.num_prompt_logprobs
        )

    return GenerationEndpoint(router, model.tokenizer, config, prepare=prepare, make_shape=make_shape)


def _chat(router: Router, model: ServedModel, config: HTTPConfig, preparer: Preparer) -> GenerationEndpoint:
    async def prepare(raw: dict[str, object], request_id: str) -> Job:
        return await preparer.chat(validate(ChatBody, raw), request_id=request_id)

    def make_shape(job: Job) -> ChatShape:
        return ChatShape(
            model.tokenizer, num_logprobs=job.num_logprobs, num_prompt_logprobs=job.num_prompt_logprobs
        )

    return GenerationEndpoint(router, model.tokenizer, config, prepare=prepare, make_shape=make_shape)


class _Routes:
    """Starlette's router, its own refusals turned into errors of the one table.

    Args:
        routes: All of them.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._router = StarletteRouter(routes, redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = (
            self  # with an app in the scope, the router raises its refusals and does not answer them
        )
        try:
            await self._router(scope, receive, send)
        except HTTPException as refusal:
            if refusal.status_code == 405:
                raise MethodNotAllowed(allowed=(refusal.headers or {}).get("Allow", "")) from None
            raise NotFound("nothing lives at this path") from None
