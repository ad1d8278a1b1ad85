"""A link that several transfers share: bytes queue, whoever sends them, and leave in the order they came.

Bytes come at once, as a finished layer does, or evenly over a while, as the layers of a running step do.  The
queue is worked out exactly between two events, with no event of its own per layer: with ``L`` layers of ``b``
bytes every ``c`` seconds from ``start + c`` on, the first ``L - 1`` are taken as an even flow and the last as
one piece, which gives the same departure as ``L`` pieces: the last byte leaves
``b / rate + max(0, (L - 1) * (b / rate - c))`` after the step if nothing else is on the link.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TypeAlias

Flow: TypeAlias = tuple[float, float, float]  # when it begins, when it ends, and bytes a second


class SharedLink:
    """One direction of one worker's network.

    Args:
        bytes_s: What leaves in a second.

    Attributes:
        bytes_s: As above.
        num_bytes: That came so far.
    """

    def __init__(self, bytes_s: float) -> None:
        assert bytes_s > 0.0, "a link carries nothing"
        self.num_bytes = 0.0
        self.bytes_s = bytes_s
        self._queued = 0.0  # at _at_s
        self._at_s = 0.0
        self._inflow = 0.0  # bytes a second
        self._num_flows = 0
        self._changes: list[tuple[float, float]] = []  # (when, change of _inflow), those to come

    def flow(self, num_bytes: float, *, start_s: float, end_s: float) -> Flow:
        """Let bytes come evenly from ``start_s`` to ``end_s``, which is later; neither has passed."""
        self.num_bytes += num_bytes
        inflow = num_bytes / (end_s - start_s)
        heappush(self._changes, (start_s, inflow))
        heappush(self._changes, (end_s, -inflow))
        return (start_s, end_s, inflow)

    def hasten(self, flow: Flow, *, now_s: float) -> None:
        """Let all of a flow have come by now, which is before its end.

        It might have come faster since its start, so only that is queued for which there was no room then.
        """
        start_s, end_s, inflow = flow
        self._advance(now_s)
        self._changes.remove((end_s, -inflow))
        room = 0.0
        if start_s > now_s:
            self._changes.remove((start_s, inflow))
        else:
            room = max(0.0, (self.bytes_s - self._inflow) * (now_s - start_s) - self._queued)
            self._changes.append((now_s, -inflow))
        heapify(self._changes)
        self._queued += max(0.0, (end_s - max(start_s, now_s)) * inflow - room)

    def burst(self, num_bytes: float, *, now_s: float) -> float:
        """Let bytes come at once; return when the last of them will have left."""
        self._advance(now_s)
        self.num_bytes += num_bytes
        self._queued += num_bytes
        return now_s + self._queued / self.bytes_s

    def _advance(self, now_s: float) -> None:
        """Work the queue out up to now, from one change of the inflow to the next."""
        changes = self._changes
        while True:
            is_change = bool(changes) and changes[0][0] <= now_s
            to_s = changes[0][0] if is_change else now_s
            if to_s > self._at_s:
                queued = self._queued + (self._inflow - self.bytes_s) * (to_s - self._at_s)
                self._queued = queued if queued > 0.0 else 0.0
                self._at_s = to_s
            if not is_change:
                return
            change = heappop(changes)[1]
            self._num_flows += 1 if change > 0.0 else -1
            self._inflow = self._inflow + change if self._num_flows else 0.0  # without what rounding left
