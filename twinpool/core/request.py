"""A request as the workers see it: token ids in, token ids out.  Text, chat and choices are the router's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an answer ended; the values are OpenAI's."""

    STOP = "stop"  # a stop token, the model's end token, or (in the router) a stop string
    LENGTH = "length"  # max_tokens reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.  The router resolves every default, so a worker never guesses.

    Order of operations on the logits of one position: ``logit_bias``, penalties, ``min_tokens`` and
    vocabulary masks, temperature, ``top_k``, ``top_p``, ``min_p``.  Log-probabilities are of the raw logits.
    """

    seed: int  # 0 <= seed < 2**64; the token at one position is a function of (seed, position, logits)
    max_tokens: int  # >= 1; counts tokens of earlier attempts too
    min_tokens: int = 0  # end and stop tokens cannot be chosen before; counts earlier attempts too
    temperature: float = 1.0  # 0 is greedy: the lowest id among the largest logits
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in Hugging Face transformers
    presence_penalty: float = 0.0  # over the output, as in OpenAI's API
    frequency_penalty: float = 0.0  # over the output, as in OpenAI's API
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = None  # alternatives per output token; 0 gives the chosen token alone
    num_prompt_logprobs: int | None = None  # the same for prompt tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to answer it.

    ``output_ids`` are tokens an earlier attempt already gave to the client: they are prefilled
    like the prompt and counted like output, so that a continued answer equals an undisturbed one.
    """

    request_id: str  # minted by the router, unique per attempt; a client's own id never gets here
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float  # what the request has left at the moment it is handed over
    output_ids: tuple[int, ...] = ()
    cache_salt: str = ""  # KV is shared only between requests of the same one: the router makes it per tenant

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV must exist before the next one can be chosen."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        """Tokens whose KV may exist in the end; the last token chosen never needs any."""
        return len(self.prompt_ids) + self.sampling.max_tokens - 1

    def continued(self, sent: Sequence[TokenOutput], *, request_id: str, timeout_s: float) -> Request:
        """Return the request that goes on after ``sent``, all outputs this request has given so far."""
        ids = self.output_ids + tuple(output.token_id for output in sent)
        return replace(self, request_id=request_id, output_ids=ids, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability with the most likely alternatives, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), as many as were asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """One generated token."""

    index: int  # position in the answer, from 0, across attempts
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None
    # On the first output of an attempt only, when asked for; entry 0 is None, since nothing precedes it.
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0  # on that output too: tokens of the prompt whose KV was there and not computed
