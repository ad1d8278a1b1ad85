"""What many requests come to: latencies, throughput, goodput and errors.

Fed by one ``Record`` after the other, measured or simulated, and keeps none of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from twinpool.lab.metrics.limits import Limits
from twinpool.lab.metrics.percentiles import Percentiles
from twinpool.lab.record import Record

LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s", "queue_s", "normalised_s", "late_s")


class Summary:
    """Counts and latencies of the requests added so far.

    Latencies are those of answered requests, and begin when a request was *due*; ``errors`` and the share of
    goodput count all of them.  ``late_s``, how long after that a request was sent, is of all too.

    Args:
        limits: What makes an answer a good one; without any, every answer is.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.ttft_s = Percentiles()  # until the first token
        self.tpot_s = Percentiles()  # one mean for each request, over its tokens after the first
        self.itl_s = Percentiles()  # between one token and the next, of all requests alike
        self.e2e_s = Percentiles()  # until the last token
        self.queue_s = Percentiles()  # until the router had room, where that is known
        self.normalised_s = Percentiles()  # end to end, by output token
        self.late_s = Percentiles()
        self.num_requests = 0
        self.num_good = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.kv_bytes = 0
        self.errors: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.first_due_s = math.inf
        self.last_end_s = -math.inf

    def add(self, record: Record) -> None:
        """Count one request that has ended."""
        self.num_requests += 1
        self.first_due_s = min(self.first_due_s, record.due_s)
        end_s = record.end_s if record.end_s is not None else record.last_token_s
        self.last_end_s = max(self.last_end_s, record.sent_s if end_s is None else end_s)
        self.late_s.add(record.sent_s - record.due_s)
        self.kv_bytes += record.kv_bytes
        if record.path:
            self.paths[record.path] += 1
        if record.error:
            self.errors[record.error] += 1
            return
        self.num_good += self.limits.are_met_by(record)
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.output_tokens += record.output_tokens
        self._add_latencies(record)

    def add_all(self, records: Iterable[Record]) -> Summary:
        """Count many, and return this summary."""
        for record in records:
            self.add(record)
        return self

    @property
    def num_answered(self) -> int:
        return self.num_requests - self.errors.total()

    @property
    def duration_s(self) -> float:
        """From the moment the first request was due until the last one ended."""
        return self.last_end_s - self.first_due_s if self.num_requests else 0.0

    @property
    def goodput_share(self) -> float | None:
        """Of all requests, those answered within the limits."""
        return self.num_good / self.num_requests if self.num_requests else None

    @property
    def goodput_rate(self) -> float | None:
        """Requests answered within the limits, per second."""
        return self._rate(self.num_good)

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values; None is what has no value."""
        return {
            "requests": self.num_requests,
            "answered": self.num_answered,
            "errors": dict(sorted(self.errors.items())),
            "paths": dict(sorted(self.paths.items())),
            "duration_s": self.duration_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "kv_bytes": self.kv_bytes,
            "requests_per_s": self._rate(self.num_answered),
            "input_tokens_per_s": self._rate(self.prompt_tokens),
            "output_tokens_per_s": self._rate(self.output_tokens),
            "goodput": {
                "ttft_limit_s": self.limits.ttft_s,
                "tpot_limit_s": self.limits.tpot_s,
                "requests": self.num_good,
                "share": self.goodput_share,
                "per_s": self.goodput_rate,
            },
            **{name: getattr(self, name).to_json() for name in LATENCIES},
        }

    def _add_latencies(self, record: Record) -> None:
        self.itl_s.extend(record.gaps_s)
        if (ttft_s := record.ttft_s) is not None:
            self.ttft_s.add(ttft_s)
        if (tpot_s := record.tpot_s) is not None:
            self.tpot_s.add(tpot_s)
        if record.queue_s is not None:
            self.queue_s.add(record.queue_s)
        if (e2e_s := record.e2e_s) is not None:
            self.e2e_s.add(e2e_s)
            if record.output_tokens:
                self.normalised_s.add(e2e_s / record.output_tokens)

    def _rate(self, amount: int) -> float | None:
        return amount / self.duration_s if self.duration_s > 0.0 else None
