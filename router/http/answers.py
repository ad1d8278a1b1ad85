"""Whole answers, usage counts, and the pieces that both JSON shapes are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.http.assemble import Delta, TokenEntry
from twinpool.core.request import FinishReason, TokenLogprob

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


class Shape(Protocol):
    """One API's way to write choices."""

    prefix: str  # of the answer's id
    kind: str  # the "object" field of a whole answer
    chunk_kind: str  # the same of a chunk

    def opening(self, index: int) -> dict[str, object] | None:
        """Return the choice that opens a stream before its first text, or None."""
        ...

    def part(self, index: int, delta: Delta) -> dict[str, object]:
        """Return the choice that carries one delta of a stream."""
        ...

    def whole(self, index: int, answer: Answer) -> dict[str, object]:
        """Return the choice of an answer that is not streamed."""
        ...


@dataclass(slots=True)
class Answer:
    """One choice while it grows."""

    texts: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self.texts.append(delta.text)
        self.entries.extend(delta.entries)
        self.num_tokens = delta.num_tokens
        self.token_ids.extend(delta.token_ids)
        self.finish = delta.finish
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


def usage(*, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    """Return the usage object of an answer or chunk."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return max(logprob, LOWEST_LOGPROB)
