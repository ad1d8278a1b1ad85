"""What became of one request of a workload, measured at a client or simulated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Times are seconds after the start of the run; None: it never happened."""

    index: int  # of its ``WorkItem``
    due_s: float  # when it was to be sent; all latencies count from here, so that a stall hides nothing
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    gaps_s: tuple[float, ...] = ()  # between one token and the next
    end_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float | None = None  # until the router first had room for it
    kv_bytes: int = 0  # moved between workers
    path: str = ""  # disaggregated, local or colocated
    error: str = ""  # kind of error; empty: it was answered

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if there is no second one."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Time to the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.due_s
