"""The timelines of the last requests, as the admin API shows them."""

from __future__ import annotations

from collections import OrderedDict

from twinpool.core.timeline import RequestTimeline

MAX_REQUESTS = 1000


class RequestLog:
    """Remembers the last requests by the id given to the client.

    Args:
        max_requests: How many; the oldest is forgotten first.
    """

    def __init__(self, *, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._timelines: OrderedDict[str, RequestTimeline] = OrderedDict()

    def add(self, timeline: RequestTimeline) -> None:
        """Remember a request from its start; its timeline may still grow."""
        self._timelines[timeline.request_id] = timeline
        self._timelines.move_to_end(timeline.request_id)
        if len(self._timelines) > self._max_requests:
            self._timelines.popitem(last=False)

    def get(self, request_id: str) -> dict[str, object] | None:
        """Return one request as JSON values, or None if it is unknown or forgotten."""
        timeline = self._timelines.get(request_id)
        return None if timeline is None else describe(timeline)


def describe(timeline: RequestTimeline) -> dict[str, object]:
    """Return a timeline as JSON values; all times are seconds since the request arrived."""
    return {
        "id": timeline.request_id,
        "path": timeline.path,
        "prefill_worker": timeline.prefill_worker,
        "decode_worker": timeline.decode_worker,
        "outcome": timeline.outcome,
        "spans": [
            {**span.detail, "name": span.name, "start_s": span.start_s, "end_s": span.end_s}
            for span in timeline.spans
        ],
        "kv_bytes": timeline.kv_bytes,
        "cached_tokens": timeline.cached_tokens,
        "events": [{**event.detail, "name": event.name, "at_s": event.at_s} for event in timeline.events],
    }
