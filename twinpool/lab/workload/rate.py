"""The one meaning of a rate in the lab: gaps between requests by the time from the first to the last."""

from __future__ import annotations


def mean_rate(num_requests: int, *, first_s: float, last_s: float) -> float | None:
    """Return requests per second; None if there are no two requests at different times."""
    return (num_requests - 1) / (last_s - first_s) if num_requests > 1 and last_s > first_s else None
