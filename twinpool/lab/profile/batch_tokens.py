"""Step times from two tables by the tokens of a batch: one of prompts, one of decodes.

Source:
    What Splitwise measured (Patel et al., ISCA 2024): a decode step hardly depends on the context there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.profile.cost import Chunk, CostModel, DecodeLine, line_s
from twinpool.lab.profile.curve import Curve, check_times


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTokens:
    """Rows of ``[tokens of the batch, seconds]``; a sequence that decodes is one token."""

    prefill: tuple[tuple[float, ...], ...]
    decode: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            rows = getattr(self, name)
            if not rows:
                raise ConfigError(f"batch_tokens.{name}", "has no row")
            check_times(f"batch_tokens.{name}", rows, lowest=(1.0,))

    def cost_model(self) -> CostModel:
        """Return the times of any step."""
        return BatchTokensCost(self)


class BatchTokensCost:
    """Implements ``CostModel``; a step of prompts and decodes costs what all its tokens cost as prompts."""

    def __init__(self, table: BatchTokens) -> None:
        self._prefill = Curve((tokens, seconds) for tokens, seconds in table.prefill)
        self._decode = Curve((tokens, seconds) for tokens, seconds in table.decode)

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        if not prompts:
            return line_s(self.decode_line(num_decodes, context_tokens), context_tokens)
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        return max(self._prefill.at(num_tokens + num_decodes), self._decode.at(num_decodes))

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(self._decode.at(num_decodes), 0.0, float("inf"))
