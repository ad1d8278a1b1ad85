"""Step times from measured ones: prompts by their tokens, decodes by batch and context.

A step of prompts takes ``L(tokens) + c * pairs``: what all tokens of the batch cost together (weights are
read once), and attention.  ``L`` goes through the measured single prompts, and ``c`` is what fits batches of
prompts, and prompts with cached tokens, best.  So measured points of single prompts are met exactly.

Decodes lie between four measured points: two batches, two mean contexts.  A step of both costs what its
tokens cost together, and the attention of its decodes on top.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.core.errors import ConfigError
from twinpool.lab.profile.cost import Chunk, CostModel, DecodeLine, line_s
from twinpool.lab.profile.curve import Curve, check_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured times of one worker.

    Attributes:
        prefill: Rows of ``[batch, tokens, cached_tokens, seconds]``: so many prompts in one step, each of so
            many new tokens after so many cached ones.  Two rows or more of batch 1 without cached tokens.
        decode: Rows of ``[batch, context_tokens, seconds]``: so many sequences, each of so many tokens.
    """

    prefill: tuple[tuple[float, ...], ...]
    decode: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        check_times("measured.prefill", self.prefill, lowest=(1.0, 1.0, 0.0))
        check_times("measured.decode", self.decode, lowest=(1.0, 0.0))
        if len(self._single_prompts()) < 2:
            raise ConfigError("measured.prefill", "has less than two single prompts without cached tokens")
        if not self.decode:
            raise ConfigError("measured.decode", "has no row")

    def cost_model(self) -> CostModel:
        """Return the times of any step."""
        return MeasuredCost(self)

    def _single_prompts(self) -> list[tuple[float, float]]:
        return [(row[1], row[3]) for row in self.prefill if row[0] == 1 and row[2] == 0]


class MeasuredCost:
    """Implements ``CostModel``.

    Args:
        measured: The points.
    """

    def __init__(self, measured: Measured) -> None:
        self._singles = measured._single_prompts()
        self._pair_s = self._fit(measured.prefill)
        self._tokens = self._token_curve(self._pair_s)
        rows: dict[float, list[tuple[float, float]]] = defaultdict(list)
        for batch, context, seconds in measured.decode:
            rows[batch].append((context, seconds))
        self._batches = sorted(rows)
        self._by_context = [Curve(rows[batch]) for batch in self._batches]
        self._lines: dict[int, list[DecodeLine]] = {}  # by number of decodes

    def step_s(self, prompts: Sequence[Chunk], num_decodes: int, context_tokens: int) -> float:
        if not prompts:
            return line_s(self.decode_line(num_decodes, context_tokens), context_tokens)
        num_tokens = num_decodes
        pairs = 0.0
        for first_token, num_new in prompts:
            num_tokens += num_new
            pairs += num_new * (first_token + 0.5 * num_new)
        together_s = max(self._tokens.at(num_tokens), 0.0) + self._pair_s * pairs
        if not num_decodes:
            return together_s
        line = self.decode_line(num_decodes, context_tokens)
        return max(together_s + line.per_token_s * context_tokens, line_s(line, context_tokens))

    def decode_line(self, num_decodes: int, context_tokens: int) -> DecodeLine:
        lines = self._lines.get(num_decodes)
        if lines is None:
            lines = self._lines[num_decodes] = self._lines_of(num_decodes)
        for line in lines:
            if context_tokens < line.up_to_tokens:
                return line
        return lines[-1]

    def _lines_of(self, num_decodes: int) -> list[DecodeLine]:
        """Mix the curves of the two batches nearest to ``num_decodes``."""
        last = max(len(self._batches) - 2, 0)
        low = min(max(bisect_right(self._batches, num_decodes) - 1, 0), last)
        high = min(low + 1, len(self._batches) - 1)
        span = self._batches[high] - self._batches[low]
        share = (num_decodes - self._batches[low]) / span if span else 0.0
        below, above = self._by_context[low], self._by_context[high]
        ends = sorted({segment.end for curve in (below, above) for segment in curve.segments})
        lines, start = [], 0.0
        for end in ends:
            first, second = below.segment(start), above.segment(start)
            base = first.base + share * (second.base - first.base)
            slope = first.slope + share * (second.slope - first.slope)
            lines.append(DecodeLine(base, slope / num_decodes, end * num_decodes))
            start = end
        return lines

    def _token_curve(self, pair_s: float) -> Curve:
        return Curve((tokens, seconds - pair_s * tokens * tokens / 2) for tokens, seconds in self._singles)

    def _fit(self, rows: Sequence[Sequence[float]]) -> float:
        """Return the time of a pair with which the measured steps are met best, by relative error.

        A predicted time is a constant and a multiple of it, so this is least squares in one unknown, within
        what the single prompts allow.
        """
        most = min(seconds / (tokens * tokens / 2) for tokens, seconds in self._singles)
        without, squares = self._token_curve(0.0), Curve((x, x * x / 2) for x, _ in self._singles)
        above = below = 0.0
        for batch, tokens, cached, seconds in rows:
            together = batch * tokens
            factor = (together * (cached + tokens / 2) - squares.at(together)) / seconds
            above += factor * (1.0 - without.at(together) / seconds)
            below += factor * factor
        return min(max(above / below, 0.0), most) if below > 0.0 else 0.0
