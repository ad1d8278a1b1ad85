"""Requests that make a worker take the largest steps of its settings, as a router would send them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from twinpool.core.errors import ConfigError
from twinpool.core.ports import DecodePort, PrefillPort
from twinpool.core.request import Request, SamplingParams, TokenOutput
from twinpool.engine.config import EngineConfig

_LIMIT_S = 300.0  # of one request
_ANSWER_TOKENS = 4
_LONGEST = 1024  # tokens of a prompt: longer ones take minutes on a CPU
_LEAST_TOKENS = 128
_LOGPROB_TOKENS = 256

Ask = Callable[[Request], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What prompts may be made of, and what keeps them apart from others.

    Prompts of another salt share no KV with these, so all of them are computed anew.
    """

    num_tokens: int  # that fit into every cache
    max_model_tokens: int
    vocab_size: int
    engine: EngineConfig
    salt: str


async def send_disaggregated(
    sizes: Sizes, prefill: PrefillPort, decode: DecodePort, *, sender_id: str
) -> None:
    """Let one worker compute prompts and the other go on; then the other compute some of them too.

    That is what a decode worker does with prompts whose KV did not arrive.

    Raises:
        ServingError: A request failed.
        ConfigError: There is too little room to measure anything.
    """

    async def ask(request: Request) -> None:
        ticket = await decode.reserve(request, sender_id=sender_id)
        try:
            first = await prefill.prefill(request, ticket)
            await _read(decode.resume(ticket, first))
        finally:
            await decode.release(ticket)

    async def ask_decode(request: Request) -> None:
        await _read(decode.generate(request))

    await _send_all(sizes, ask)
    again = replace(sizes, salt=f"{sizes.salt} again")
    await _send_batch(again, ask_decode)
    await ask_decode(_scored(again))


async def send_colocated(sizes: Sizes, worker: DecodePort) -> None:
    """Let one worker do both; else as above."""

    async def ask(request: Request) -> None:
        await _read(worker.generate(request))

    await _send_all(sizes, ask)


async def _send_all(sizes: Sizes, ask: Ask) -> None:
    """Send what fills a step, a long prompt, and one whose log-probabilities are asked for."""
    if sizes.num_tokens < _LEAST_TOKENS:
        raise ConfigError("--kv-memory", f"{sizes.num_tokens} tokens are too few to measure anything")
    await _send_batch(sizes, ask)
    longest = min(_LONGEST, sizes.num_tokens - _ANSWER_TOKENS, sizes.max_model_tokens - _ANSWER_TOKENS)
    await ask(_request(sizes, -1, longest))
    await ask(_scored(sizes))


async def _send_batch(sizes: Sizes, ask: Ask) -> None:
    """Send as many chunks at once as a step takes, or the cache."""
    engine, room = sizes.engine, sizes.num_tokens - _ANSWER_TOKENS
    batch = min(engine.max_batch_tokens, room)
    chunk = min(engine.max_chunk_tokens or batch, batch)
    count = max(1, min(batch // chunk, room // (chunk + engine.block_tokens + _ANSWER_TOKENS)))
    await asyncio.gather(*(ask(_request(sizes, seed, chunk)) for seed in range(count)))


def _scored(sizes: Sizes) -> Request:
    """Return a prompt of which all log-probabilities are asked for."""
    num_tokens = min(_LOGPROB_TOKENS, sizes.num_tokens - _ANSWER_TOKENS)
    return _request(sizes, -2, num_tokens, num_prompt_logprobs=1)


def _request(sizes: Sizes, seed: int, num_tokens: int, *, num_prompt_logprobs: int | None = None) -> Request:
    dice = random.Random(seed)
    return Request(
        request_id=f"{sizes.salt} {seed}",
        prompt_ids=tuple(dice.randrange(sizes.vocab_size) for _ in range(num_tokens)),
        sampling=SamplingParams(
            seed=0,
            max_tokens=_ANSWER_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            num_prompt_logprobs=num_prompt_logprobs,
        ),
        timeout_s=_LIMIT_S,
        cache_salt=sizes.salt,
    )


async def _read(answer: AsyncGenerator[TokenOutput, None]) -> None:
    async with aclosing(answer) as outputs:
        async for _ in outputs:
            pass
