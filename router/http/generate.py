"""The two generating routes: a body goes in, answers come out, streamed or whole.

The status line is sent with the first token, so that every error before it has a status of its own.  An
error after it is one ``data: {"error": ...}`` event, and then the stream ends without ``[DONE]``.  A client
that leaves closes every choice at once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from starlette.types import Receive, Scope, Send

from router.http.answers import Answer, Shape, usage
from router.http.assemble import AnswerAssembler, Delta
from router.http.body import read_object
from router.http.clients import in_time, merged, while_connected
from router.http.config import HTTPConfig
from router.http.edge import logged, request_id_of, set_timelines
from router.http.errors import error_body
from router.http.prepare import Choice, Job
from router.router import Router
from twinpool.core.errors import InternalError, ServingError
from twinpool.text.tokenizer import Tokenizer

Prepare = Callable[[dict[str, object], str], Awaitable[Job]]  # of a raw body and the client's request id
MakeShape = Callable[[Job], Shape]


class GenerationEndpoint:
    """One generating route, as an ASGI app.

    Args:
        router: Gives the tokens.
        tokenizer: Turns them into text.
        config: Limits of the body.
        prepare: Makes the job of one body.
        make_shape: Makes what writes its JSON.
    """

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        config: HTTPConfig,
        *,
        prepare: Prepare,
        make_shape: MakeShape,
    ) -> None:
        self._router = router
        self._tokenizer = tokenizer
        self._config = config
        self._prepare = prepare
        self._make_shape = make_shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_object(scope, receive, self._config)
        job = await self._prepare(raw, request_id_of(scope))
        set_timelines(scope, [choice.timeline for choice in job.choices])
        reply = _Reply(job, self._make_shape(job), in_time(send, self._config.write_timeout_s))
        work = self._stream(job, reply) if job.is_stream else self._collect(job, reply)
        try:
            await while_connected(receive, work)
        except Exception as error:
            if not (job.is_stream and reply.is_started):
                raise
            await reply.fail(logged(error, job.request_id))

    async def _collect(self, job: Job, reply: _Reply) -> None:
        answers = [Answer() for _ in job.choices]
        async with aclosing(self._deltas(job)) as deltas:
            async for index, delta in deltas:
                answers[index].add(delta)
        await reply.whole(answers)

    async def _stream(self, job: Job, reply: _Reply) -> None:
        async with aclosing(self._deltas(job)) as deltas:
            async for index, delta in deltas:
                await reply.part(index, delta)
        await reply.end()

    def _deltas(self, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
        return merged([self._answer(choice, job.tenant) for choice in job.choices])

    async def _answer(self, choice: Choice, tenant: str) -> AsyncGenerator[Delta, None]:
        """Generate one choice; what it holds on the workers is given back before its last delta."""
        assembler = AnswerAssembler(self._tokenizer, prompt_ids=choice.request.prompt_ids, rules=choice.rules)
        last: Delta | None = None
        left_s = choice.request.timeout_s - choice.timeline.now_s()  # it may have waited for its turn
        request = replace(choice.request, timeout_s=left_s)
        async with aclosing(self._router.generate(request, choice.timeline, tenant=tenant)) as outputs:
            async for output in outputs:
                delta = assembler.push(output)
                if delta.finish is not None:
                    choice.timeline.outcome = delta.finish.value  # a stop string ends it early, and well
                    last = delta
                    break
                yield delta
        if last is None:
            raise InternalError("the tokens ended without a finish reason")
        yield last


class _Reply:
    """Writes one job's answers to the client."""

    def __init__(self, job: Job, shape: Shape, send: Send) -> None:
        self.is_started = False
        self._job = job
        self._shape = shape
        self._send = send
        self._num_tokens = [0] * len(job.choices)
        self._is_open = [False] * len(job.choices)
        self._untold_ids: list[list[int]] = [[] for _ in job.choices]  # of tokens that no chunk carried yet

    async def whole(self, answers: list[Answer]) -> None:
        """Send everything at once."""
        self._num_tokens = [answer.num_tokens for answer in answers]
        choices = [self._shape.whole(index, answer) for index, answer in enumerate(answers)]
        if self._job.has_token_ids:
            choices = [
                choice | {"token_ids": answer.token_ids}
                for choice, answer in zip(choices, answers, strict=True)
            ]
        body = _json(self._envelope(self._shape.kind, choices) | {"usage": self._usage()})
        await self._start(b"application/json", length=len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def part(self, index: int, delta: Delta) -> None:
        """Send one delta of a stream; one that shows nothing and ends nothing opens the stream at most."""
        if not self.is_started:
            await self._start(b"text/event-stream; charset=utf-8", length=None)
        if not self._is_open[index]:
            self._is_open[index] = True
            opening = self._shape.opening(index)
            if opening is not None:
                await self._chunk(index, opening)
        self._num_tokens[index] = delta.num_tokens
        self._untold_ids[index].extend(delta.token_ids)
        if delta.text or delta.entries or delta.finish is not None:
            choice = self._shape.part(index, delta)
            if self._job.has_token_ids:
                choice["token_ids"] = self._untold_ids[index]
            self._untold_ids[index] = []
            await self._chunk(index, choice)

    async def end(self) -> None:
        """End a stream that went well."""
        if self._job.has_usage_chunk:
            chunk = self._envelope(self._shape.chunk_kind, [])
            await self._event(_json(chunk | {"usage": self._usage()}))
        await self._event(b"[DONE]", is_last=True)

    async def fail(self, error: ServingError) -> None:
        """End a stream that went wrong, so that no client can take it for a complete one."""
        await self._event(_json(error_body(error)), is_last=True)

    async def _chunk(self, index: int, choice: dict[str, object]) -> None:
        chunk = self._envelope(self._shape.chunk_kind, [choice])
        if self._job.has_continuous_usage:
            chunk["usage"] = self._usage()
        await self._event(_json(chunk))

    async def _start(self, content_type: bytes, *, length: int | None) -> None:
        self.is_started = True
        headers = [(b"content-type", content_type)]
        if length is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _event(self, data: bytes, *, is_last: bool = False) -> None:
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    def _envelope(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self._shape.prefix + self._job.answer_id,
            "object": kind,
            "created": self._job.created_s,
            "model": self._job.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, object]:
        return usage(
            prompt_tokens=self._job.prompt_tokens,
            completion_tokens=sum(self._num_tokens),
            cached_tokens=self._cached_tokens(),
        )

    def _cached_tokens(self) -> int:
        """Count each prompt once, as its coldest choice had it: what that one computed others may find."""
        cached = [choice.timeline.cached_tokens for choice in self._job.choices]
        step = self._job.choices_per_prompt
        return sum(min(cached[start : start + step]) for start in range(0, len(cached), step))


def _json(value: dict[str, object]) -> bytes:
    """ASCII only: line separators inside a text would end an SSE event for some clients."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
