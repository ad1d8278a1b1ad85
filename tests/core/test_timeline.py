"""RequestTimeline: spans are closed however their block ends."""

from __future__ import annotations

import pytest

from twinpool.core.clock import ManualClock
from twinpool.core.timeline import RequestTimeline


def test_spans_and_events_count_from_the_arrival() -> None:
    clock = ManualClock(100.0)
    timeline = RequestTimeline("r", clock)

    clock.advance(1.0)
    with timeline.span("queue", policy="fifo"):
        clock.advance(2.0)
    timeline.event("first_token")

    (span,), (event,) = timeline.spans, timeline.events
    assert (span.name, span.start_s, span.end_s, span.detail) == ("queue", 1.0, 3.0, {"policy": "fifo"})
    assert (event.name, event.at_s) == ("first_token", 3.0)


def test_a_span_ends_when_its_block_raises() -> None:
    clock = ManualClock()
    timeline = RequestTimeline("r", clock)

    with pytest.raises(KeyError), timeline.span("prefill"):
        clock.advance(0.5)
        raise KeyError

    assert timeline.spans[0].end_s == 0.5
