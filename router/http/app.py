"""The application: every route, and what it is made of."""

from __future__ import annotations

import random

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from router.http.admin import AdminRoutes
from router.http.chat import ChatShape
from router.http.completions import CompletionShape
from router.http.config import HTTPConfig
from router.http.edge import Edge
from router.http.errors import MethodNotAllowed, NotFound, error_body, verdict_of
from router.http.generate import GenerationEndpoint
from router.http.model import ServedModel
from router.http.models import ModelRoutes
from router.http.prepare import Job, Preparer
from router.http.schema import ChatBody, CompletionBody, validate
from router.http.tokenize import TokenizeRoutes
from router.router import Router
from twinpool.core.errors import ServingError


def create_app(
    router: Router, model: ServedModel, config: HTTPConfig, *, entropy: random.Random | None = None
) -> ASGIApp:
    """Build the HTTP application.

    Args:
        router: Answers the requests.
        model: What is served.
        config: Limits and the API key.
        entropy: Gives the seeds of requests that name none; the machine's own by default.
    """
    preparer = Preparer(
        model,
        clock=router.clock,
        limit_tokens=lambda: router.pool.max_request_tokens,
        timeout_s=router.config.request_timeout_s,
        entropy=entropy or random.SystemRandom(),
    )
    admin, models = AdminRoutes(router), ModelRoutes(model)
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
        Route("/admin/audit", admin.audit, methods=["GET"]),
        Route("/admin/requests/{id:path}", admin.request, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _answer_refusal})
    app.router.redirect_slashes = False
    return Edge(app, config)


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


async def _answer_refusal(_: HTTPRequest, refusal: Exception) -> Response:
    """Turn the framework's own refusals into the API's shape."""
    assert isinstance(refusal, HTTPException), "registered for nothing else"
    error: ServingError
    if refusal.status_code == 405:
        error = MethodNotAllowed("this path takes other methods; see the allow header")
    else:
        error = NotFound("nothing lives at this path")
    return JSONResponse(
        error_body(error), status_code=verdict_of(error).status, headers=dict(refusal.headers or {})
    )
