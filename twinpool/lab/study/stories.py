"""What a server knows of the requests of a cell: who worked on each, and when.

A story is what ``/admin/requests/ID`` answers, with the ``index`` of its request and ``sent_s``, when that
was sent; its own times count from its arrival, which on one machine is the same moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.lab.study.cell import TransferUse, check_numbers

Story = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of one request, in seconds after the start of its cell."""

    name: str  # queue, reserve, prefill, transfer or decode
    start_s: float
    end_s: float


def check(story: Story) -> None:
    """Look at all that is told of a story that was read from a file.

    Raises:
        LookupError, AttributeError, TypeError, ValueError: Something is missing, or is no such value.
    """
    times_s = [time_s for phase in phases(story) for time_s in (phase.start_s, phase.end_s)]
    check_numbers(story["index"], story["kv_bytes"], first_token_s(story) or 0.0, *times_s)


def phases(story: Story) -> Iterator[Phase]:
    """Yield the stretches that have ended, in the order in which they began."""
    for span in story["spans"]:
        if span["end_s"] is not None:
            yield Phase(
                name=span["name"],
                start_s=story["sent_s"] + span["start_s"],
                end_s=story["sent_s"] + span["end_s"],
            )


def first_token_s(story: Story) -> float | None:
    """Return when the first token was there, after the start of the cell."""
    for event in story["events"]:
        if event["name"] == "first_token":
            return float(story["sent_s"] + event["at_s"])
    return None


def transfer_use(stories: Iterable[Story]) -> TransferUse:
    """Sum up the KV that moved, and how much of the time that took was hidden."""
    transfers, kv_bytes, total_s, hidden_s = 0, 0, 0.0, 0.0
    for story in stories:
        kv_bytes += story["kv_bytes"]
        computed_s = first_token_s(story)
        for phase in phases(story):
            if phase.name == "transfer" and computed_s is not None:
                transfers += 1
                total_s += phase.end_s - phase.start_s
                hidden_s += max(0.0, min(phase.end_s, computed_s) - phase.start_s)
    return TransferUse(transfers=transfers, kv_bytes=kv_bytes, total_s=total_s, hidden_s=hidden_s)


def at_once(spans: Sequence[tuple[float, float]], *, end_s: float, bins: int) -> list[float]:
    """Return how many of the stretches went on at once, as a mean over each of ``bins`` equal times.

    Args:
        spans: Their beginnings and ends.
        end_s: Of the last bin; the first one begins at 0.
        bins: How many.
    """
    width_s = end_s / bins
    busy_s = [0.0] * bins
    for start_s, stop_s in spans:
        first = max(0, int(start_s / width_s))
        last = min(bins - 1, int(stop_s / width_s))
        for number in range(first, last + 1):
            busy_s[number] += max(0.0, min(stop_s, (number + 1) * width_s) - max(start_s, number * width_s))
    return [each / width_s for each in busy_s]
