"""What one engine step takes: the words between a hardware profile and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Chunk(NamedTuple):
    """Tokens of one prompt that a step computes."""

    first_token: int  # so many are in the cache before
    num_tokens: int

    @property
    def num_pairs(self) -> float:
        """Pairs of a new token and one it attends to, which attention's work is proportional to."""
        return self.num_tokens * (self.first_token + 0.5 * self.num_tokens)


class DecodeLine(NamedTuple):
    """A step of decodes alone takes ``base_s + per_token_s * context_tokens``, up to ``up_to_tokens``."""

    base_s: float
    per_token_s: float
    up_to_tokens: float


class CostModel(Protocol):
    """Times of one worker's steps."""

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        """Return how long a step takes.

        Args:
            prompts: Chunks of prompts in it.
            num_decodes: Sequences that get their next token in it.
            context_tokens: Tokens that these attend to, all of them together.
        """
        ...

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        """Return the line on which steps of so many decodes lie from ``context_tokens`` on.

        ``step_s`` of the same decodes alone is the value of this line.
        """
        ...


def line_s(line: DecodeLine, context_tokens: int) -> float:
    """Return how long a step of decodes alone takes."""
    return line.base_s + line.per_token_s * context_tokens
