"""How much slower requests are than each would have been alone on a reference worker.

Source:
    The limits of Splitwise (Patel et al., ISCA 2024), table VI: nine, all of which must hold; it refers to a
    DGX-A100 that runs the request alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from twinpool.lab.metrics.percentiles import Percentiles
from twinpool.lab.profile.cost import Chunk, CostModel, line_s
from twinpool.lab.record import Record

PERCENTS = (50, 90, 99)
SPLITWISE_LIMITS: Mapping[str, tuple[float, float, float]] = MappingProxyType(
    {"ttft": (2.0, 3.0, 6.0), "tbt": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}
)
"""The most that p50, p90 and p99 may be; ``tbt`` is the time after the first token by all tokens."""


class Slowdowns:
    """Of the answered requests added so far.

    Args:
        alone: Times of the reference worker.
    """

    def __init__(self, alone: CostModel) -> None:
        self.ttft = Percentiles()
        self.tbt = Percentiles()
        self.e2e = Percentiles()
        self._alone = alone

    def add(self, record: Record) -> None:
        """Count one request; one that was not answered does not count."""
        ttft_s, e2e_s = record.ttft_s, record.e2e_s
        if record.error or ttft_s is None or e2e_s is None or not record.output_tokens:
            return
        prompt_s = self._alone.step_s([Chunk(0, record.prompt_tokens)], 0, 0)
        token_s = self._token_s(record.prompt_tokens)
        self.ttft.add(ttft_s / prompt_s)
        self.tbt.add((e2e_s - ttft_s) / record.output_tokens / token_s)
        self.e2e.add(e2e_s / (prompt_s + (record.output_tokens - 1) * token_s))

    def percentiles(self) -> dict[str, tuple[float | None, ...]]:
        """Return p50, p90 and p99 of each kind."""
        return {name: tuple(getattr(self, name).percentiles(PERCENTS)) for name in SPLITWISE_LIMITS}

    def meet(self, limits: Mapping[str, tuple[float, float, float]] = SPLITWISE_LIMITS) -> bool:
        """Return whether every percentile is within its limit; nothing answered meets none."""
        found = self.percentiles()
        return all(
            value is not None and value <= limit
            for name, bounds in limits.items()
            for value, limit in zip(found[name], bounds, strict=True)
        )

    def _token_s(self, prompt_tokens: int) -> float:
        """Return the time of a token alone, as Splitwise takes it: that of a batch of as many tokens."""
        return line_s(self._alone.decode_line(prompt_tokens, prompt_tokens), prompt_tokens)
