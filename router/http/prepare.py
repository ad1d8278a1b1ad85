"""From a checked body to the requests that workers get: token ids, resolved sampling, ids and deadlines.

The last checks are here, those that need the model: token ids, the context, the chat template.  After
this file nothing about a request can be the client's mistake.

Context rule: a prompt must leave room for one token; without ``max_tokens`` a chat may take what is left and
a completion 16 tokens, as with OpenAI; a ``max_tokens`` that does not fit is refused, never shortened.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.http.assemble import TextRules
from router.http.errors import ModelNotFound
from router.http.model import ServedModel
from router.http.schema import ChatBody, CompletionBody, ConversationBody
from twinpool.core.clock import Clock
from twinpool.core.errors import InvalidRequest, PromptTooLong
from twinpool.core.request import Request, SamplingParams
from twinpool.core.timeline import RequestTimeline

DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as with OpenAI
THREADED_CHARS = 16_384  # texts longer than this are tokenized beside the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One prompt answered once."""

    request: Request
    timeline: RequestTimeline
    rules: TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything one HTTP request asks for; a choice's index is its place in ``choices``."""

    request_id: str  # what the client sees in x-request-id
    answer_id: str  # unique, without the prefix of the API
    created_s: int  # Unix time
    model: str
    tenant: str  # the ``user`` field: different ones wait in turn
    choices: tuple[Choice, ...]
    choices_per_prompt: int
    prompt_tokens: int  # each prompt counted once
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    is_stream: bool
    has_usage_chunk: bool
    has_continuous_usage: bool
    has_token_ids: bool  # vLLM's return_token_ids


@dataclass(frozen=True, slots=True)
class _Prompt:
    ids: tuple[int, ...]
    echo: str | None
    param: str  # the field it came from


class Preparer:
    """Makes jobs for one model.

    Args:
        model: What is served.
        clock: For the timelines.
        limit_tokens: Asked for the largest request, prompt and answer, that the workers can hold now;
            None when no worker is there to say.
        timeout_s: How long a request may take from here to its last token.
        entropy: Gives the seeds of requests that name none.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        clock: Clock,
        limit_tokens: Callable[[], int | None],
        timeout_s: float,
        entropy: random.Random,
    ) -> None:
        self._model = model
        self._clock = clock
        self._limit_tokens = limit_tokens
        self._timeout_s = timeout_s
        self._entropy = entropy

    async def completion(self, body: CompletionBody, *, request_id: str) -> Job:
        """Prepare a completion: every prompt times ``n`` choices, prompt by prompt.

        Raises:
            InvalidRequest: What the body asks for cannot be answered by this model.
        """
        self.check_model(body.model)
        num_prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            num_prompt_logprobs = max(body.logprobs, body.prompt_logprobs or 0)
        prompts = [await self._prompt(prompt, body) for prompt in body.prompt]
        return self._job(
            body, prompts, request_id, num_logprobs=body.logprobs, num_prompt_logprobs=num_prompt_logprobs
        )

    async def chat(self, body: ChatBody, *, request_id: str) -> Job:
        """Prepare a chat: the rendered conversation times ``n`` choices.

        Raises:
            InvalidRequest: What the body asks for cannot be answered by this model.
        """
        self.check_model(body.model)
        ids = await self.conversation_ids(body)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        prompt = _Prompt(ids, None, "messages")
        return self._job(
            body,
            [prompt],
            request_id,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
        )

    def check_model(self, name: str | None) -> None:
        """Check the model that a body names; naming none means the one that is served.

        Raises:
            ModelNotFound: It is another one.
        """
        if name is not None and name != self._model.name:
            raise ModelNotFound(self._model.name)

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a text."""
        tokenizer = self._model.tokenizer
        if len(text) <= THREADED_CHARS:
            return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def conversation_ids(self, body: ConversationBody) -> tuple[int, ...]:
        """Render a conversation with the model's chat template and return its token ids.

        Raises:
            InvalidRequest: The template refuses it, or there is none.
        """
        # A template may run for seconds, and waits for another one that does: never on the event loop.
        return await asyncio.to_thread(self._render, body)

    def check_ids(self, param: str, ids: Sequence[int]) -> None:
        """Check that every id is a token.

        Raises:
            InvalidRequest: One is not.
        """
        if ids and not 0 <= min(ids) <= max(ids) < self._model.vocab_size:
            raise InvalidRequest(param, f"has a token id outside [0, {self._model.vocab_size})")

    def _check_length(self, param: str, num_chars: int) -> None:
        """Refuse a text that cannot fit before it is tokenized, which takes seconds for megabytes."""
        least_tokens = -(-num_chars // self._model.tokenizer.max_token_chars)
        if least_tokens >= self._model.max_model_tokens:
            raise PromptTooLong(
                needed_tokens=least_tokens + 1, limit_tokens=self._model.max_model_tokens, param=param
            )

    def _render(self, body: ConversationBody) -> tuple[int, ...]:
        chat = self._model.template.render(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            tools=body.tools or None,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        self._check_length("messages", sum(len(segment.text) for segment in chat.segments))
        return tuple(self._model.tokenizer.encode_chat(chat))

    async def _prompt(self, prompt: str | tuple[int, ...], body: CompletionBody) -> _Prompt:
        if isinstance(prompt, str):
            self._check_length("prompt", len(prompt))
            ids = await self.text_ids(prompt, add_special_tokens=body.add_special_tokens)
            if not ids:
                raise InvalidRequest("prompt", "has no tokens")
            return _Prompt(ids, prompt if body.echo else None, "prompt")
        self.check_ids("prompt", prompt)
        if len(prompt) >= self._model.max_model_tokens:  # before its text is made for nothing
            raise PromptTooLong(needed_tokens=len(prompt) + 1, limit_tokens=self._model.max_model_tokens)
        echo = self._model.tokenizer.decode(prompt, skip_special_tokens=True) if body.echo else None
        return _Prompt(prompt, echo, "prompt")

    def _job(
        self,
        body: CompletionBody | ChatBody,
        prompts: Sequence[_Prompt],
        request_id: str,
        *,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
    ) -> Job:
        self.check_ids("logit_bias", [token_id for token_id, _ in body.logit_bias])
        self.check_ids("stop_token_ids", body.stop_token_ids)
        answer_id, tenant = uuid.uuid4().hex, body.user or ""
        choices: list[Choice] = []
        for prompt in prompts:
            max_tokens = self._max_tokens(body, prompt)
            for number in range(body.n):
                index = len(choices)
                sampling = SamplingParams(
                    seed=self._seed(body.seed, number),
                    max_tokens=max(1, max_tokens),
                    min_tokens=body.min_tokens,
                    temperature=body.temperature,
                    top_k=body.top_k,
                    top_p=body.top_p,
                    min_p=body.min_p,
                    repetition_penalty=body.repetition_penalty,
                    presence_penalty=body.presence_penalty,
                    frequency_penalty=body.frequency_penalty,
                    logit_bias=body.logit_bias,
                    stop_token_ids=body.stop_token_ids,
                    ignore_eos=body.ignore_eos,
                    num_logprobs=num_logprobs,
                    num_prompt_logprobs=num_prompt_logprobs,
                )
                choices.append(
                    Choice(
                        request=Request(
                            request_id=f"{answer_id}-{index}",
                            prompt_ids=prompt.ids,
                            sampling=sampling,
                            timeout_s=self._timeout_s,
                            cache_salt=cache_salt(tenant, body.cache_salt or ""),
                        ),
                        timeline=RequestTimeline(
                            request_id if index == 0 else f"{request_id}-{index}", self._clock
                        ),
                        rules=TextRules(
                            stops=body.stop,
                            min_tokens=body.min_tokens,
                            skip_special_tokens=body.skip_special_tokens,
                            keeps_logprobs=num_logprobs is not None,
                            is_prompt_only=max_tokens == 0,
                            echo=prompt.echo,
                        ),
                    )
                )
        return Job(
            request_id=request_id,
            answer_id=answer_id,
            created_s=int(time.time()),
            model=self._model.name,
            tenant=tenant,
            choices=tuple(choices),
            choices_per_prompt=body.n,
            prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            is_stream=body.stream,
            has_usage_chunk=body.stream_options.include_usage,
            has_continuous_usage=body.stream_options.continuous_usage_stats,
            has_token_ids=body.return_token_ids,
        )

    def _max_tokens(self, body: CompletionBody | ChatBody, prompt: _Prompt) -> int:
        limit = min(self._model.max_model_tokens, self._limit_tokens() or self._model.max_model_tokens)
        wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        needed = len(prompt.ids) + (1 if wanted is None else max(1, wanted))
        if needed > limit:
            param = prompt.param if len(prompt.ids) >= limit else "max_tokens"
            raise PromptTooLong(needed_tokens=needed, limit_tokens=limit, param=param)
        left = limit - len(prompt.ids)
        default = min(left, DEFAULT_COMPLETION_TOKENS) if isinstance(body, CompletionBody) else left
        max_tokens = default if wanted is None else wanted
        if body.min_tokens > max_tokens:
            raise InvalidRequest(
                "min_tokens", f"{body.min_tokens} are more than the {max_tokens} of max_tokens"
            )
        return max_tokens

    def _seed(self, seed: int | None, number: int) -> int:
        """Return the seed of choice ``number`` of one prompt; the first one has the client's own."""
        if seed is None:
            return self._entropy.getrandbits(64)
        if number == 0:
            return seed % 2**64
        digest = hashlib.blake2b(f"{seed % 2**64}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big")


def cache_salt(tenant: str, own: str) -> str:
    """Return what a request must have in common with another one to share its KV: short, whatever was sent.

    Args:
        tenant: Who asks; tenants never share.
        own: The request's own salt, within its tenant.
    """
    if not tenant and not own:
        return ""
    return hashlib.blake2b(json.dumps([tenant, own]).encode(), digest_size=16).hexdigest()
