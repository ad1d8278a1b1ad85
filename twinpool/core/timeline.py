"""What happened to one request and when: spans with a length, events without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from twinpool.core.clock import Clock

Value = str | int | float | bool | None


@dataclass(slots=True)
class Span:
    """A stretch of a request's life; times are seconds since the request arrived."""

    name: str  # queue, reserve, prefill, transfer, decode
    start_s: float
    end_s: float | None = None
    detail: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at one moment: a retry, a fallback, the first token."""

    name: str
    at_s: float
    detail: dict[str, Value]


class RequestTimeline:
    """The spans and events of one request, in the order in which they began, and where it ran.

    Args:
        request_id: The id given to the client.
        clock: Read at each mark.

    Attributes:
        path: How the last attempt runs: disaggregated, local or colocated; None before it is placed.
        prefill_worker: Who computes the prompt in the last attempt; None if its decode worker does.
        decode_worker: Who generates; None if the first token is the whole answer.
        kv_bytes: Payload moved between workers, all attempts together.
        cached_tokens: Prompt tokens that were not computed for this answer: whoever gave its first token had
            their KV.
        outcome: How the request ended: a finish reason, ``cancelled`` or the class of an error.  Set to
            ``stop`` by one who closes the stream because the answer is complete (a stop string).
    """

    def __init__(self, request_id: str, clock: Clock) -> None:
        self.request_id = request_id
        self.spans: list[Span] = []
        self.events: list[Event] = []
        self.path: str | None = None
        self.prefill_worker: str | None = None
        self.decode_worker: str | None = None
        self.kv_bytes = 0
        self.cached_tokens = 0
        self.outcome: str | None = None
        self._clock = clock
        self._arrived_s = clock.now_s()

    def now_s(self) -> float:
        """Return seconds since the request arrived."""
        return self._clock.now_s() - self._arrived_s

    @contextmanager
    def span(self, name: str, **detail: Value) -> Iterator[Span]:
        """Record a span around a block; it is closed however the block ends."""
        span = Span(name, self.now_s(), None, dict(detail))
        self.spans.append(span)
        try:
            yield span
        finally:
            span.end_s = self.now_s()

    def add_span(self, name: str, *, start_s: float, end_s: float | None, **detail: Value) -> None:
        """Record a span that was measured elsewhere."""
        self.spans.append(Span(name, start_s, end_s, dict(detail)))

    def event(self, name: str, **detail: Value) -> None:
        """Record that something happened now."""
        self.events.append(Event(name, self.now_s(), dict(detail)))
