"""What a Twinpool server knows of one request that a client cannot see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from twinpool.core.errors import Unavailable
from twinpool.lab.bench.connection import ConnectionPool
from twinpool.lab.bench.fetch import fetch
from twinpool.lab.bench.target import Target

_TIMEOUT_S = 10.0
_MOST_S, _MOST_BYTES = 1e9, 1e18
_WAIT = "queue"  # the span that ends when the router has found room


async def inside(pool: ConnectionPool, target: Target, request_id: str) -> tuple[float | None, int]:
    """Return how long a request waited in the router, and how many bytes of KV it moved.

    Returns:
        None and 0 if the server does not know, or is no Twinpool server.
    """
    try:
        told = await fetch(pool, target, f"/admin/requests/{request_id}", timeout_s=_TIMEOUT_S)
    except Unavailable:
        return None, 0
    if not isinstance(told, Mapping):
        return None, 0
    spans = told.get("spans")
    ends = [
        float(span["end_s"])
        for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, Mapping) and span.get("name") == _WAIT and _is_below(span.get("end_s"), _MOST_S)
    ]
    kv_bytes = told.get("kv_bytes")
    return min(ends, default=None), int(kv_bytes) if _is_below(kv_bytes, _MOST_BYTES) else 0


def _is_below(value: object, most: float) -> TypeGuard[int | float]:
    """Say whether a stranger's value is a number that can be one of these."""
    return isinstance(value, int | float) and 0 <= value < most
