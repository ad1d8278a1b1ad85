"""Step times from a fitted formula: prompts by tokens and their squares, decodes by context and batch.

Source:
    The form, and the two branches of decoding, are those of DistServe's simulator (Zhong et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.profile.cost import Chunk, CostModel, DecodeLine, line_s
from twinpool.lab.profile.curve import LONGEST_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """Coefficients in seconds; each triple is a constant and two factors.

    Attributes:
        prefill: Constant, per token, per square of a prompt's tokens.
        decode: Constant, per token of context, per sequence; of small batches.
        decode_large: The same of batches from ``large_batch`` on.
    """

    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    decode_large: tuple[float, ...] = ()
    large_batch: int = 0  # 0: there is no second formula

    def __post_init__(self) -> None:
        if self.large_batch < 0:
            raise ConfigError("polynomial.large_batch", f"{self.large_batch} is less than 0")
        for name in ("prefill", "decode", *(("decode_large",) if self.large_batch else ())):
            factors = getattr(self, name)
            if len(factors) != 3:
                raise ConfigError(f"polynomial.{name}", f"has {len(factors)} numbers, not three")
            if min(factors) < 0.0:
                raise ConfigError(f"polynomial.{name}", f"{min(factors):g} is less than 0")
            if sum(factors) > LONGEST_S:  # of one token
                raise ConfigError(f"polynomial.{name}", f"a token takes {sum(factors):g} s")

    def cost_model(self) -> CostModel:
        """Return the times of any step."""
        return PolynomialCost(self)


class PolynomialCost:
    """Implements ``CostModel``."""

    def __init__(self, polynomial: Polynomial) -> None:
        self._of = polynomial

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        if not prompts:
            return line_s(self.decode_line(num_decodes, context_tokens), context_tokens)
        constant, per_token, per_square = self._of.prefill
        num_tokens = num_decodes + sum(chunk.num_tokens for chunk in prompts)
        squares = sum(2.0 * chunk.num_pairs for chunk in prompts)
        seconds = constant + per_token * num_tokens + per_square * squares
        if num_decodes:
            line = self.decode_line(num_decodes, context_tokens)
            return max(seconds + line.per_token_s * context_tokens, line_s(line, context_tokens))
        return seconds

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        is_large = 0 < self._of.large_batch <= num_decodes
        constant, per_token, per_sequence = self._of.decode_large if is_large else self._of.decode
        return DecodeLine(constant + per_sequence * num_decodes, per_token, float("inf"))
